"""The moments that the coordinator takes: frames and history of what happened, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pinlaterd.coordinator.history import QUEUE, History
from pinlaterd.coordinator.sampler import STEP_SECONDS, Sampler
from pinlaterd.stats import Stats, totals
from pinlaterd.status import PauseNote, Sample, ServerFrame, whole_frame
from tests.clocks import FakeClock


class Server:
    """A server with two shards, of which `mail` is in both."""

    def __init__(self, clock: FakeClock, name: str = "", owned: str = "12") -> None:
        self.clock = clock
        self.name = name
        self.owned = owned
        self.stats = {f"shard-{shard}": Stats() for shard in owned}
        self.down: set[str] = set()
        self.uptimes = dict.fromkeys(self.stats, 1e6)
        for stats in self.stats.values():
            stats.gauge("shard_queues_counting", 0)
            stats.gauge("mail_pending", 10)
            stats.peak("mail_oldest_ready_age_ms", 70_000)
        self.history = History(1 << 20)
        self.sampler = Sampler(clock, self.sample, self.history)

    def sample(self) -> Sample:
        shards = [
            {
                "name": shard,
                "engine": "sqlite",
                "state": "serving",
                "dequeue_only": False,
                "degraded": "",
                "server": f"jobs-{shard}" if self.name else "",
                "healthy": True,
                "takes_jobs": True,
                "warnings": (),
            }
            for shard in "12"
        ]
        processes = [
            {
                "name": name,
                "kind": "shard",
                "state": "serving",
                "pid": 7,
                "facts": {},
                "warnings": [],
                "config_version": 1,
                "cpu_seconds": 1.0,
                "rss_bytes": 5,
                "uptime_seconds": self.uptimes[name],
            }
            for name in self.stats
        ]
        status: Any = {
            "healthy": True,
            "server": self.name,
            "shards": shards,
            "processes": processes,
            **dict.fromkeys(("problems", "warnings", "config_problems", "needs_restart"), ()),
            **dict.fromkeys(("deployment", "config_judged", "version", "thrift", "stats"), ""),
            **dict.fromkeys(("uptime_seconds", "snapshot_version", "config_version"), 1),
            "config_number": 0,
            "refused_removals": {},
            "cluster": "",
            "servers": (),
            "shards_to_leave": (),
        }
        found = {
            name: totals(stats.snapshot()) if name in self.down else stats.snapshot()
            for name, stats in self.stats.items()
            if name not in self.down or name in self.uptimes
        }
        return Sample(status, found, self.clock.monotonic())

    def work(self, jobs: int, *, wait_ms: int = 5, shard: str = "") -> None:
        stats = self.stats[f"shard-{shard or self.owned[0]}"]
        stats.count("mail_enqueue", jobs)
        stats.count("mail_dequeue", jobs)
        stats.record_each(("mail_dequeue_delay_ms",), [wait_ms] * jobs)

    def step(self) -> None:
        self.clock.advance(STEP_SECONDS)
        self.sampler.step()

    def ready(self) -> list[float | None]:
        now_ms = self.clock.now_ms()
        return [*self.history.read(QUEUE, "mail", now_ms - 60_000, now_ms).series["ready"]]

    def mail(self, **others: ServerFrame | None) -> Any:
        [row] = whole_frame(self.sampler.frame(), others)["queues"]
        return row


@pytest.fixture
def server(clock):
    return Server(clock)


def test_rates_are_of_the_last_seconds_and_verdicts_of_the_last_minute(server):
    server.sampler.step()
    for _ in range(20):
        server.work(50)
        server.step()
    server.clock.advance(1)

    row = server.mail()

    assert row["enqueues_per_second"] == pytest.approx(50 / 6, rel=0.01)
    assert row["dequeue_delay_p99_ms"] == pytest.approx(5, rel=0.05)
    assert (row["pending"], row["verdict"]["kind"]) == (20, "well")


def test_a_queue_from_which_nothing_is_handed_out_has_stopped(server):
    server.sampler.step()
    server.work(1)
    server.step()
    texts = []
    for _ in range(13):
        server.step()
        texts.append(server.mail()["verdict"]["text"])

    assert texts[:11] == ["Well"] * 11
    assert texts[-1] == "Stopped: no job is handed out, for 1 min 5 s"


def test_a_coordinator_that_has_just_begun_calls_no_queue_well_of_which_it_knows_nothing(server):
    texts = []
    for _ in range(13):
        server.step()
        texts.append(server.mail()["verdict"]["text"])

    assert texts[1] == "Not known yet: no job was handed out in the 5.0 s that are known"
    assert texts[-1] == "Stopped: no job is handed out, for at least 1 min"


def test_what_a_process_did_before_this_coordinator_knew_it_did_not_happen_just_now(server):
    """A coordinator that was restarted hears of one shard after the other."""
    late = server.stats.pop("shard-2")
    server.sampler.step()
    server.step()
    late.count("mail_enqueue", 1_000_000)
    server.stats["shard-2"] = late

    server.step()
    server.clock.advance(1)

    assert server.mail()["enqueues_per_second"] == 0
    now_ms = server.clock.now_ms()
    rates = server.history.read(QUEUE, "mail", now_ms - 60_000, now_ms).series["in"]
    assert max(rate or 0 for rate in rates) == 0


def test_a_process_that_has_just_begun_counts_from_nothing(server):
    young = server.stats.pop("shard-2")
    server.sampler.step()
    young.count("mail_enqueue", 50)
    server.stats["shard-2"], server.uptimes["shard-2"] = young, 3.0

    server.step()

    assert server.mail()["enqueues_per_second"] == pytest.approx(10)


@pytest.mark.parametrize("is_back", [False, True])
def test_what_others_did_is_not_counted_again_when_a_shard_is_killed(server, is_back):
    server.work(400)
    server.stats["shard-1"].count("mail_ack_failed", 400)
    server.work(100, shard="2")
    server.sampler.step()
    server.step()
    del server.stats["shard-2"]
    if is_back:
        server.stats["shard-2"], server.uptimes["shard-2"] = Stats(), 1.0
    server.step()
    server.clock.advance(1)
    server.work(30)
    row = server.mail()
    server.step()
    now_ms = server.clock.now_ms()
    rates = server.history.read(QUEUE, "mail", now_ms - 60_000, now_ms).series["in"]

    assert (row["enqueues_per_second"], row["failures_per_second"]) == (30, 0)
    assert row["verdict"]["word"] == "Well"
    assert [rate for rate in rates if rate] == pytest.approx([5])  # 30 jobs in 6 s


@pytest.mark.parametrize("owned", ["12", "1"])
def test_what_a_killed_shard_had_done_is_not_counted_again_when_it_is_back(clock, owned):
    server = Server(clock, "jobs-1" if owned == "1" else "", owned)
    server.work(400, shard=owned[-1])
    server.sampler.step()
    server.step()
    server.down = {f"shard-{owned[-1]}"}  # its totals stay, in those of the next process, too
    server.step()
    server.down = set()
    server.step()
    clock.advance(1)
    server.work(30, wait_ms=900)
    row = server.mail()
    server.step()
    now_ms = clock.now_ms()
    rates = server.history.read(QUEUE, "mail", now_ms - 60_000, now_ms).series["in"]

    assert row["enqueues_per_second"] == pytest.approx(5)
    assert row["dequeue_delay_p50_ms"] == pytest.approx(900, rel=0.05)
    assert [rate for rate in rates if rate] == pytest.approx([5])  # 30 jobs in 6 s


def test_a_shard_that_is_unavailable_leaves_a_gap_and_the_others_verdict(server):
    server.sampler.step()
    server.work(1)
    server.step()
    server.down = {"shard-2"}
    server.step()
    row = server.mail()
    server.down = set()
    server.step()

    assert server.ready()[-3:] == [20, None, 20]
    assert (row["pending"], row["verdict"]["text"]) == (10, "Well without shard 2")


def test_queues_keep_their_names_while_all_shards_are_unavailable(server):
    server.sampler.step()
    server.down = {"shard-1", "shard-2"}
    server.clock.advance(STEP_SECONDS)

    assert server.mail()["verdict"]["text"] == "Unreadable: shard 1, 2 does not answer"


def test_a_standby_of_another_servers_shard_leaves_no_gap(clock):
    server = Server(clock, "jobs-1", "1")
    server.stats["shard-2"], server.uptimes["shard-2"] = Stats(), 1e6
    server.sampler.step()
    server.step()

    assert server.ready()[-1] == 10


def test_a_server_whose_shards_have_moved_keeps_their_history(clock):
    server = Server(clock, "jobs-1", "1")
    server.sampler.step()
    server.step()
    server.stats["shard-1"] = Stats()
    server.name = "jobs-3"  # by now the owner is another one
    for _ in range(70):
        server.step()

    now_ms = clock.now_ms()
    assert 10 in server.history.read(QUEUE, "mail", now_ms - 600_000, now_ms).series["ready"]


def test_servers_are_shown_as_one_service(clock):
    """By what goes over the wire: counts and rates add up, percentiles are of all jobs."""
    own, other = Server(clock, "jobs-1", "1"), Server(clock, "jobs-2", "2")
    own.stats["shard-2"], own.uptimes["shard-2"] = Stats(), 1e6  # a standby
    for server in (own, other):
        server.sampler.step()
    own.work(99, wait_ms=10)
    other.work(1, wait_ms=9_000)
    clock.advance(STEP_SECONDS)
    sent = msgspec.json.decode(msgspec.json.encode(other.sampler.frame()), type=ServerFrame)

    row = own.mail(**{"jobs-2": sent})
    frame = whole_frame(own.sampler.frame(), {"jobs-2": sent}, {"mail": PauseNote("ada")})
    alone = own.mail(**{"jobs-2": None})

    assert (row["pending"], row["enqueues_per_second"]) == (20, 20)
    assert row["dequeue_delay_p50_ms"] == pytest.approx(10, rel=0.05)
    assert row["dequeue_delay_p99_ms"] == pytest.approx(10, rel=0.05)
    assert [shard["jobs"]["pending"] for shard in frame["shards"]] == [10, 10]
    names = [one["name"] for one in frame["processes"]]
    assert names == ["jobs-1/shard-1", "jobs-1/shard-2", "jobs-2/shard-2"]
    assert frame["queues"][0]["verdict"]["text"] == "Paused by ada"
    assert (alone["pending"], alone["verdict"]["detail"]) == (10, "without shard 2")
