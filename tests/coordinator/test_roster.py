"""Who reports, how each of them is, and that no figure is lost or counted twice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pinlaterd.coordinator.roster import SILENT_SECONDS, Roster
from pinlaterd.stats import Stats, merge
from pinlaterd.wire.control import ProcessState, Report


class Machine:
    """Which pids there are."""

    def __init__(self):
        self.dead = set()

    def is_alive(self, pid):
        return pid not in self.dead


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def roster(clock, machine):
    return Roster(clock, machine.is_alive)


def report(process="shard-1", pid=1, state=ProcessState.SERVING, enqueued=0, depth=0.0, full=True):
    stats = Stats()
    if enqueued:
        stats.count("mail_enqueue", enqueued)
    stats.gauge("mail_pending", depth)
    return Report(process, "shard", pid, pid * 1000, state, {}, stats.snapshot(), full)


def states(roster):
    return [(view.process, view.pid, view.state) for view in roster.views()]


def enqueued(roster):
    return merge(roster.stats().values())["counters"].get("mail_enqueue", 0)


def test_a_process_that_reports_is_as_it_says(roster):
    assert roster.heard(b"a", report(state=ProcessState.STARTING))
    assert states(roster) == [("shard-1", 1, "starting")]

    roster.heard(b"a", report(state=ProcessState.SERVING))
    assert states(roster) == [("shard-1", 1, "serving")]


def test_a_heartbeat_keeps_it_so_and_silence_does_not(roster, clock):
    roster.heard(b"a", report())
    clock.advance(SILENT_SECONDS - 0.1)
    assert roster.heard(b"a", None)
    clock.advance(SILENT_SECONDS - 0.1)
    assert states(roster) == [("shard-1", 1, "serving")]

    clock.advance(0.2)
    assert states(roster) == [("shard-1", 1, "silent")]

    roster.heard(b"a", None)
    assert states(roster) == [("shard-1", 1, "serving")]


def test_an_ended_process_is_stopped_at_once(roster, machine):
    roster.heard(b"a", report())
    machine.dead.add(1)

    assert states(roster) == [("shard-1", 1, "stopped")]


def test_who_is_not_known_has_to_tell_all(roster):
    assert not roster.heard(b"a", None)
    assert not roster.heard(b"a", report(full=False))
    assert roster.views() == []

    assert roster.heard(b"a", report())
    assert roster.heard(b"a", None)


def test_changes_go_over_what_was_reported_before(roster):
    roster.heard(b"a", report(enqueued=5, depth=2))
    roster.heard(b"a", report(depth=3, full=False))

    [stats] = roster.stats().values()
    assert stats["counters"] == {"mail_enqueue": 5}
    assert stats["gauges"] == {"mail_pending": 3}


def test_a_new_incarnation_goes_on_where_the_totals_of_the_old_one_ended(roster, machine):
    roster.heard(b"a", report(pid=1, enqueued=5, depth=9))
    machine.dead.add(1)
    assert enqueued(roster) == 5

    roster.heard(b"b", report(pid=2, enqueued=2, depth=1))
    assert states(roster) == [("shard-1", 2, "serving")]
    assert enqueued(roster) == 7
    assert roster.stats()["shard-1"]["gauges"] == {"mail_pending": 1}

    machine.dead.add(2)
    roster.heard(b"c", report(pid=3, enqueued=1))
    assert enqueued(roster) == 8


def test_totals_of_a_replaced_process_are_added_to_what_changes_alone(roster, machine):
    """A scrape costs what has changed, also after a shard with thousands of queues was replaced."""
    stats = Stats()
    stats.record("job_body_size_mail", 3)
    stats.record("job_body_size_idle", 3)
    stats.count("mail_enqueue", 5)
    roster.heard(b"a", replace(report(), stats=stats.snapshot()))
    machine.dead.add(1)
    roster.heard(b"b", replace(report(pid=2), stats=stats.snapshot()))
    before = dict(roster.stats()["shard-1"]["histograms"])

    stats.take_changes()
    stats.record("job_body_size_mail", 3)
    stats.count("mail_enqueue", 1)
    changes = stats.take_changes()
    roster.heard(b"b", replace(report(pid=2, full=False), stats=changes.now))

    after = roster.stats()["shard-1"]
    assert after["counters"] == {"mail_enqueue": 11}
    assert after["histograms"]["job_body_size_mail"]["count"] == 3
    assert after["histograms"]["job_body_size_idle"] is before["job_body_size_idle"]
    assert before["job_body_size_idle"]["count"] == 2

    roster.heard(b"c", replace(report(pid=2), stats=stats.snapshot()))
    assert enqueued(roster) == 11

    stats.drop_queue("mail")
    changes = stats.take_changes()
    dropped = replace(report(pid=2, full=False), stats=changes.now, dropped=changes.dropped)
    roster.heard(b"c", dropped)
    roster.heard(b"c", replace(report(pid=2), stats=stats.snapshot()))
    assert enqueued(roster) == 0


def test_a_process_that_reconnects_is_counted_once(roster):
    roster.heard(b"a", report(enqueued=5))
    roster.heard(b"b", report(enqueued=6))

    assert states(roster) == [("shard-1", 1, "serving")]
    assert enqueued(roster) == 6


def test_an_owner_and_its_standby_are_both_there(roster, machine):
    roster.heard(b"a", report(pid=1))
    roster.heard(b"b", report(pid=2, state=ProcessState.STANDBY))
    assert states(roster) == [("shard-1", 1, "serving"), ("shard-1", 2, "standby")]

    machine.dead.add(1)
    roster.heard(b"b", report(pid=2, state=ProcessState.SERVING))
    assert states(roster) == [("shard-1", 2, "serving")]


def test_gauges_of_a_silent_process_are_left_out(roster, clock):
    roster.heard(b"a", report(enqueued=5, depth=9))
    clock.advance(SILENT_SECONDS + 1)

    [stats] = roster.stats().values()
    assert stats["gauges"] == {}
    assert stats["counters"] == {"mail_enqueue": 5}
