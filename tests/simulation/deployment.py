"""The real coordinator, routers and shards of one deployment, in one thread and on virtual time.

Simulated are the edges only: ZeroMQ and the clients' connections (`network`), the stores
(`store`), the clocks and the schedule (`world`), supervisord (`kill` and `stop`). The files of
`run/` are real, in the current folder, which the caller has made a temporary one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import ParamSpec, TypeVar, cast
from unittest import mock

import zmq

from pinlaterd import lifecycle
from pinlaterd.config.active import ActiveConfig, activate
from pinlaterd.config.layout import CONFIG_FILE, RATES_FILE, RUN, SNAPSHOT_FILE, shard_endpoint
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings, default_queue_settings
from pinlaterd.coordinator.process import Coordinator
from pinlaterd.errors import StorageError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.router.main import Router
from pinlaterd.rpc.connection import Answer
from pinlaterd.rpc.connection import Connection as ThriftConnection
from pinlaterd.shard.loop import ShardLoop, Updates
from pinlaterd.shard.service import ShardService
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlClient,
    ControlServer,
    ProcessState,
    write_snapshot,
)
from tests.simulation.network import (
    Connection,
    Network,
    RouterSocket,
    SimulatedContext,
    SimulatedShardEnd,
)
from tests.simulation.store import Disk, Fault, ModelStore
from tests.simulation.world import AsyncProcess, Process, World, WorldClock

P = ParamSpec("P")
T = TypeVar("T")

_FIRST_PID = 10_000_000  # beyond what Linux gives out: no real process is meant
_OPEN_AGAIN_SECONDS = 1.0
_RESTART_SECONDS = (0.1, 1.0)


class Deployment:
    """Starts all programs, named as under supervisord: router, shard-1, coordinator."""

    def __init__(
        self,
        world: World,
        server: ServerSettings,
        *,
        shards: int,
        routers: int,
        limits: Mapping[str, float],
    ) -> None:
        """`limits`: jobs/s, by queue."""
        self.world = world
        self.network = Network(world)
        mock.patch.object(lifecycle, "_ASIDE", _AtOnce()).start()
        names = [str(number) for number in range(1, shards + 1)]
        queue = default_queue_settings(server)
        self.config = Config(
            server,
            {name: ShardSettings(name) for name in names},
            {name: replace(queue, max_jobs_per_second=limit) for name, limit in limits.items()},
        )
        self.fault = lambda: Fault.NONE
        self.disks = {name: Disk(self._draw_fault, self._commit_seconds) for name in names}
        self.processes: dict[str, Process] = {}
        self.slow_commits = 0.002
        self.on_start: Callable[[str], None] = lambda program: None
        self._pids = iter(range(_FIRST_PID, 2 * _FIRST_PID))
        self._running_pids: dict[str, int] = {}
        self._stops: dict[str, StopSignal] = {}
        self.router_names = (
            ["router"] if routers == 1 else [f"router-{n + 1}" for n in range(routers)]
        )
        for path in (CONFIG_FILE, SNAPSHOT_FILE, RATES_FILE):
            path.unlink(missing_ok=True)
        RUN.mkdir(exist_ok=True)
        self._version = activate(self.config).version
        self._mains: dict[str, Callable[[], Process]] = {"coordinator": self._coordinator}
        for name in names:
            self._mains[f"shard-{name}"] = partial(self._shard, name)
        for name in self.router_names:
            self._mains[name] = partial(self._router, name)
        for program in self._mains:
            self.start(program)

    @property
    def programs(self) -> list[str]:
        return list(self._mains)

    def start(self, program: str) -> None:
        self._running_pids[program] = next(self._pids)
        self.processes[program] = self._mains[program]()
        self.on_start(program)

    def kill(self, program: str) -> None:
        """kill -9; supervisord starts it again, soon."""
        process = self.processes[program]
        process.kill()
        self._ended(program, process)

    def stop(self, shard: str) -> None:
        """SIGTERM: the shard finishes what it has; supervisord starts it again."""
        self._stops[shard].set()
        self.processes[f"shard-{shard}"].wake()

    def _ended(self, program: str, process: Process) -> None:
        self.network.process_ended(process)
        self._running_pids.pop(program, None)
        self.world.after(self.world.rng.uniform(*_RESTART_SECONDS), lambda: self.start(program))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
        for stop in self._stops.values():
            stop.close()

    def _draw_fault(self) -> Fault:
        return self.fault()

    def _commit_seconds(self) -> float:
        return self.world.rng.random() * self.slow_commits

    def _is_running(self, pid: int) -> bool:
        return pid in self._running_pids.values()

    # --- the coordinator -----------------------------------------------------------------------

    def _coordinator(self) -> Process:
        process: AsyncProcess
        version, config = self._version, self.config

        async def main() -> None:
            with mock.patch("psutil.pid_exists", self._is_running):
                in_force = ActiveConfig(version, config)
                coordinator = _Coordinator(Path("etc"), in_force, WorldClock(self.world))
            coordinator.serve(SimulatedContext(self.network, process))
            await asyncio.Event().wait()

        process = AsyncProcess(self.world, main)
        return process

    # --- routers -------------------------------------------------------------------------------

    def _router(self, name: str) -> Process:
        process: AsyncProcess
        pid, rng = self._running_pids[name], Random(self.world.rng.random())

        async def main() -> None:
            context = SimulatedContext(self.network, process)
            with (
                mock.patch("pinlaterd.router.main.new_context", return_value=context),
                mock.patch("os.getpid", return_value=pid),
                mock.patch("pinlaterd.router.main.Random", return_value=rng),
            ):
                router = _SimulatedRouter(
                    name, ActiveConfig(self._version, self.config), WorldClock(self.world), Stats()
                )
            await router.start()
            ClientPort(self.network, process, name, router.handle)
            await asyncio.Event().wait()

        process = AsyncProcess(self.world, main)
        return process

    # --- shards --------------------------------------------------------------------------------

    def _shard(self, name: str) -> Process:
        stop = StopSignal()
        if name in self._stops:
            self._stops[name].close()
        self._stops[name] = stop
        process: Process

        def main() -> None:
            clock, stats = WorldClock(self.world), Stats()
            context = SimulatedContext(self.network, process)
            control = ControlClient(
                f"shard-{name}",
                "shard",
                stats,
                clock.now_ms(),
                context=context,  # type: ignore[arg-type]
            )
            control.config_version = self._version
            store = ModelStore(self.disks[name], lambda: process)
            rng = Random(self.world.rng.random())
            service = ShardService(name, store, self.config, clock, stats, rng)
            service.follow(self.config)
            while not service.serving:
                try:
                    service.open()
                except StorageError:
                    process.sleep(_OPEN_AGAIN_SECONDS)
            end = SimulatedShardEnd(self.network, process)
            end.bind(shard_endpoint(name))
            updates = Updates(control, service, self.config.server)
            ShardLoop(service, end, updates, stop, clock, stats, dict).run()  # type: ignore[arg-type]
            end.close()

        process = Process(self.world, main)
        process.on_exit = partial(self._ended, f"shard-{name}", process)
        return process


class _Coordinator(Coordinator):
    """The coordinator without its pages: those are HTTP."""

    def serve(self, context: SimulatedContext) -> None:
        write_snapshot(self._snapshot)
        self._control = ControlServer(context=context)  # type: ignore[arg-type]
        self._loop.add_reader(self._control.fileno(), self._hear)
        self._hear()


class _AtOnce(Executor):
    """Runs in the caller's thread: a simulated loop waits for no other."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as every executor does
            future.set_exception(error)
        return future


class _SimulatedRouter(Router):
    """The router without its TCP port."""

    async def start(self) -> None:
        self._start_reporting()
        await self._wait_for_shards()
        self._enter(ProcessState.SERVING)

    def handle(self, message: bytes, connection: ThriftConnection) -> None:
        self._service.handle(message, connection)


class _ClientConnection:
    """Stands in for `rpc.connection.Connection`, for one call: what did not reach the client is
    undelivered."""

    oneway_calls = calls_that_may_wait = 0
    peer = "simulated:1"

    def __init__(self, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self.slots: list[Answer] = []
        self.server = self.budget = self
        self._connection = connection
        self._loop = loop
        connection.on_end.append(self._ended)

    def room(self) -> int:
        return 1 << 30

    def is_lost(self) -> bool:
        return not self._connection.open

    def is_next(self, _answer: Answer) -> bool:
        return True

    def answered(self, answer: Answer, message: bytes) -> bool:
        answer.sent = message
        return self._connection.carry(
            message, to_router=False, on_lost=lambda: self._undelivered(answer, message)
        )

    def _ended(self) -> None:
        for answer in self.slots:
            if answer.on_gone is not None and answer.sent is None:
                self._loop.call_soon(answer.on_gone)

    def _undelivered(self, answer: Answer, message: bytes) -> None:
        if answer.on_undelivered is not None:
            self._loop.call_soon(answer.on_undelivered, message, True)


class ClientPort:
    """Where clients connect to a router: its Thrift port."""

    def __init__(
        self,
        network: Network,
        process: AsyncProcess,
        name: str,
        handle: Callable[[bytes, ThriftConnection], None],
    ) -> None:
        self._loop = process.loop
        self._handle = handle
        self._socket = RouterSocket(network, process)
        self._socket.bind(thrift_endpoint(name))
        process.loop.add_reader(self._socket.getsockopt(zmq.FD), self._take)

    def _take(self) -> None:
        while self._socket.getsockopt(zmq.EVENTS):
            identity, message = self._socket.recv_multipart()
            connection = self._socket.connections.get(identity)
            if connection is not None:
                place = _ClientConnection(connection, self._loop)
                self._handle(message, cast("ThriftConnection", place))


def thrift_endpoint(router: str) -> str:
    return f"tcp://{router}"
