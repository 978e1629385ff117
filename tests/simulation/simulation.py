"""One seed: a deployment, its clients and its faults, on virtual time; the judge's verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from pinlaterd.config.schema import ServerSettings
from tests.checker.history import OK, Record, Settings
from tests.checker.judge import judge
from tests.checker.run import Violation
from tests.simulation.clients import Client
from tests.simulation.deployment import Deployment
from tests.simulation.store import Fault
from tests.simulation.world import AsyncProcess, World

QUEUES = ("mail", "slow")
_RATES = (None, None, 4.0)  # jobs/s of the second
SERVER = ServerSettings(
    advertised_host="box",
    request_timeout_ms=1000,
    enqueue_split_jobs=5,
    job_claimed_timeout_seconds=2.0,
    monitor_interval_seconds=0.5,
)
_LOAD_SECONDS = 4.0
# Beyond this nothing is under way: claims have timed out, clients have gone, shards have recovered.
_QUIET_SECONDS = 7.0
_FREEZE_SECONDS = (0.5, 1.0, 3.0)
_LOOK_SECONDS = 0.4
_SLOWEST_COMMITS = (0.002, 0.002, 0.05)
_SLOWEST_MESSAGES = (0.001, 0.001, 0.05)
FAULTS = ("kill", "stop", "freeze", "delay", "store")


class Simulation:
    """A run of one seed. `records` is its history."""

    def __init__(self, seed: int, faults: Sequence[str] = FAULTS) -> None:
        """`faults`: those to draw from."""
        self.seed = seed
        self._kinds = faults
        self.records: list[Record] = []
        self._rng = Random(seed)
        self._world = World(seed)
        self._rates = {QUEUES[0]: None, QUEUES[1]: self._rng.choice(_RATES)}
        self._deployment = Deployment(
            self._world,
            SERVER,
            shards=self._rng.choice((1, 2, 2, 3)),
            routers=self._rng.choice((1, 2)),
            limits={queue: rate for queue, rate in self._rates.items() if rate is not None},
        )
        self._deployment.slow_commits = self._rng.choice(_SLOWEST_COMMITS)
        self._deployment.network.slowest_seconds = self._rng.choice(_SLOWEST_MESSAGES)
        self._clients = [self._client(f"c{n}") for n in range(3)]

    @property
    def calls(self) -> int:
        """How many calls of clients were answered with a result."""
        return sum(record.outcome == OK for client in self._clients for record in client.records)

    def run(self) -> Sequence[Violation]:
        world, deployment = self._world, self._deployment
        self._note("settings", dataclasses.asdict(self._settings()))
        try:
            self._start()
            self._look()
            for _ in range(self._rng.choice((0, 1, 2, 2, 3)) if self._kinds else 0):
                world.after(self._rng.uniform(1.0, _LOAD_SECONDS), self._hurt)
            world.run(world.now + 2 + _LOAD_SECONDS + _QUIET_SECONDS)
            self._read_stores()
        finally:
            deployment.close()
        for client in self._clients:
            self.records += [
                dataclasses.replace(r, t1=min(r.t1, world.now)) for r in client.records
            ]
        return [*judge(self.records), *self._beyond_rates()]

    def _beyond_rates(self) -> Iterator[Violation]:
        """From any moment on, no more jobs of a queue than its rate gives, beside what the routers'
        buckets may hold: together a second's worth, and for each less than a job more."""
        routers = len(self._deployment.router_names)
        for queue, rate in self._rates.items():
            if rate is None:
                continue
            got = sorted(
                (record.t0, record.t1, len(record.result))
                for client in self._clients
                for record in client.records
                if record.operation == "dequeue"
                and record.outcome == OK
                and record.arguments["queue"] == queue
            )
            for at, (start, _, _) in enumerate(got):
                jobs = 0
                for _, end, number in sorted(got[at:], key=lambda answer: answer[1]):
                    jobs += number
                    if jobs > rate * (end - start) + max(1.0, rate) + routers:
                        text = f"{jobs} of {queue} from {start:.3f} to {end:.3f}, {rate} a second"
                        yield Violation("rates hold", text)
                        return

    def _settings(self) -> Settings:
        return Settings(
            request_seconds=SERVER.request_timeout_ms / 1000,
            claim_seconds=SERVER.job_claimed_timeout_seconds,
            recovery_seconds=6.0,
            grace_seconds=0.7,
            release_seconds=1.5,
            wall_offset=self._world.now_ms() / 1000 - self._world.now,
        )

    def _client(self, name: str) -> Client:
        deployment = self._deployment
        rng = Random(self._rng.random())
        return Client(name, deployment.network, deployment.router_names, self._rates, rng)

    def _start(self) -> None:
        until = self._world.now + 2 + _LOAD_SECONDS
        maker = self._client("maker")

        async def create() -> None:
            await maker.create_queues()
            for client in self._clients:
                _run(self._world, client, until)

        maker.process = AsyncProcess(self._world, create)
        self._maker = maker

    # --- faults --------------------------------------------------------------------------------

    def _hurt(self) -> None:
        kind = self._rng.choice(self._kinds)
        getattr(self, f"_{kind}")()

    def _kill(self) -> None:
        program = self._rng.choice(self._deployment.programs)
        if self._deployment.processes[program].alive:
            self._deployment.kill(program)
            self._note("fault", {"kind": "kill", "places": [_place(program)], "holds": ""}, 1.0)

    def _stop(self) -> None:
        """supervisorctl restart: the shard ends in order."""
        shard = self._rng.choice(list(self._deployment.disks))
        if self._deployment.processes[f"shard-{shard}"].alive:
            self._deployment.stop(shard)
            self._note("fault", {"kind": "stop", "places": [f"shard-{shard}"], "holds": ""}, 1.0)

    def _freeze(self) -> None:
        program = self._rng.choice(self._deployment.programs)
        seconds = self._rng.choice(_FREEZE_SECONDS)
        self._deployment.processes[program].freeze(seconds)
        holds = {"router": "calls", "coordinator": ""}.get(_place(program), "shard")
        arguments = {"kind": "freeze", "places": [_place(program)], "holds": holds}
        self._note("fault", arguments, seconds)

    def _delay(self) -> None:
        network, seconds = self._deployment.network, self._rng.uniform(0.5, 3.0)
        before, network.slowest_seconds = network.slowest_seconds, 0.2

        def mend() -> None:
            network.slowest_seconds = before

        self._world.after(seconds, mend)
        arguments = {"kind": "delay", "places": ["router", "coordinator"], "holds": "calls"}
        self._note("fault", arguments, seconds)

    def _store(self) -> None:
        deployment, rng = self._deployment, self._rng
        seconds = rng.uniform(0.2, 2.0)
        kinds = rng.choice(([Fault.REFUSED], [Fault.LOST_BEFORE, Fault.LOST_AFTER], list(Fault)))
        deployment.fault = lambda: rng.choice(kinds) if rng.random() < 0.3 else Fault.NONE

        def mend() -> None:
            deployment.fault = lambda: Fault.NONE

        self._world.after(seconds, mend)
        places = [f"shard-{name}" for name in deployment.disks]
        self._note("fault", {"kind": "store", "places": places, "holds": ""}, seconds)

    # --- the history ---------------------------------------------------------------------------

    def _note(self, operation: str, arguments: dict[str, Any], seconds: float = 0.0) -> None:
        now = self._world.now
        self.records.append(Record(now, now + seconds, "simulation", operation, arguments))

    def _look(self) -> None:
        """What the stores hold in the middle of it all, as a look-up would see it."""
        now = self._world.now
        found = {descriptor: row for _, descriptor, row in self._rows()}
        arguments = {"descriptors": list(found)}
        self.records.append(Record(now, now, "stores", "lookup", arguments, result=found))
        self._world.after(_LOOK_SECONDS, self._look)

    def _read_stores(self) -> None:
        now = self._world.now
        for shard, descriptor, row in self._rows():
            arguments = {"shard": shard, "descriptor": descriptor}
            self.records.append(Record(now, now, "stores", "row", arguments, result=row))

    def _rows(self) -> Iterator[tuple[str, str, list[object]]]:
        for shard, disk in self._deployment.disks.items():
            for queue, rows in disk.jobs.items():
                for row in rows.values():
                    found = [
                        int(row.state),
                        row.body.decode(),
                        row.attempts_allowed,
                        row.attempts_remaining,
                        row.claim,
                        row.created_at_ms,
                        row.run_after_ms,
                        row.updated_at_ms,
                    ]
                    yield shard, f"{queue}:s{shard}:p{row.key.priority}:{row.key.local_id}", found


def _run(world: World, client: Client, until: float) -> None:
    client.process = AsyncProcess(world, lambda: client.run(until))


def _place(program: str) -> str:
    """As the judge calls it."""
    return "router" if program.startswith("router") else program
