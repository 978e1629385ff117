"""How old claims are, whatever the clock did and however long the shard was away."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.clock import STEP_MS
from pinlaterd.model import JobDescriptor
from pinlaterd.shard import timekeeping
from pinlaterd.shard.timekeeping import Timekeeper
from tests.clocks import FakeClock
from tests.shard.conftest import MakeShard

HOUR_MS = 3_600_000


class SteppedClock(FakeClock):
    """Follows steps at once."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead_ms = 0

    def look(self) -> bool:
        followed = abs(self.ahead_ms) > STEP_MS
        self._now_ms += self.ahead_ms
        self.ahead_ms = 0
        return followed


def serving(clock: FakeClock) -> Timekeeper:
    timekeeper = Timekeeper(clock)
    timekeeper.begin()
    advance(clock, timekeeper, 20)
    return timekeeper


def advance(clock: FakeClock, timekeeper: Timekeeper, seconds: int) -> None:
    for _ in range(seconds):
        clock.advance(1)
        timekeeper.awake()


def test_a_claim_found_at_the_opening_has_its_whole_time_out():
    clock = FakeClock()
    timekeeper = Timekeeper(clock)
    timekeeper.begin()
    before_ms = clock.now_ms() - HOUR_MS

    advance(clock, timekeeper, 599)
    assert timekeeper.claimed_before_ms(600_000) <= before_ms
    advance(clock, timekeeper, 2)

    assert timekeeper.claimed_before_ms(600_000) == clock.now_ms() - 600_000


def test_a_claim_does_not_age_while_the_process_stands_still():
    clock = FakeClock()
    timekeeper = serving(clock)
    claimed_ms = clock.now_ms()
    advance(clock, timekeeper, 5)
    clock.advance(60)
    timekeeper.awake()

    assert timekeeper.claimed_before_ms(10_000) < claimed_ms
    advance(clock, timekeeper, 4)
    assert timekeeper.claimed_before_ms(10_000) < claimed_ms
    advance(clock, timekeeper, 2)
    assert timekeeper.claimed_before_ms(10_000) > claimed_ms


def test_a_claim_does_not_age_while_the_process_stands_still_in_the_middle_of_a_turn():
    clock = FakeClock()
    timekeeper = serving(clock)
    claimed_ms = clock.now_ms()
    clock.advance(60)

    assert timekeeper.claimed_before_ms(10_000) < claimed_ms


def test_time_for_which_the_process_stood_still_until_a_tick_was_not_served():
    clock = SteppedClock()
    timekeeper = serving(clock)
    claimed_ms = clock.now_ms()
    clock.advance(60)
    clock.ahead_ms = HOUR_MS

    timekeeper.tick()

    assert timekeeper.claimed_before_ms(10_000) < claimed_ms


def test_what_is_not_known_any_more_after_many_breaks_ends_no_claim():
    clock = FakeClock()
    timekeeper = serving(clock)
    claimed_ms = clock.now_ms()
    for _ in range(200):
        clock.advance(60)
        timekeeper.awake()
        advance(clock, timekeeper, 1)

    assert timekeeper.claimed_before_ms(210_000) < claimed_ms
    assert timekeeper.claimed_before_ms(90_000) > claimed_ms


def test_a_step_forward_ends_no_claim():
    clock = SteppedClock()
    timekeeper = serving(clock)
    claimed_ms = clock.now_ms()
    advance(clock, timekeeper, 5)
    clock.ahead_ms = HOUR_MS

    assert not timekeeper.tick()

    advance(clock, timekeeper, 4)
    assert timekeeper.claimed_before_ms(10_000) == claimed_ms - 1000
    advance(clock, timekeeper, 2)
    assert timekeeper.claimed_before_ms(10_000) == claimed_ms + 1000


def test_a_step_back_ends_no_claim_that_was_made_after_it():
    clock = SteppedClock()
    timekeeper = serving(clock)
    clock.ahead_ms = -HOUR_MS
    assert timekeeper.tick()
    claimed_ms = clock.now_ms()

    advance(clock, timekeeper, 9)
    assert timekeeper.claimed_before_ms(10_000) <= claimed_ms
    assert not timekeeper.known_for(10_000)
    advance(clock, timekeeper, 2)

    assert timekeeper.claimed_before_ms(10_000) > claimed_ms
    assert timekeeper.known_for(10_000)


def test_a_successor_goes_on_with_the_time_of_its_boot(tmp_path):
    clock, file = FakeClock(), tmp_path / "shard-1.clock"
    timekeeper = Timekeeper(clock, file)
    timekeeper.begin()
    timekeeper.tick()
    claimed_ms, time_ms = clock.now_ms(), clock.now_ms()
    clock.advance(60)
    clock.resume(time_ms + HOUR_MS)  # what its wall clock says

    successor = Timekeeper(clock, file)
    successor.resume()
    successor.begin()

    assert clock.now_ms() == time_ms + 60_000
    assert successor.claimed_before_ms(10_000) < claimed_ms
    advance(clock, successor, 11)
    assert successor.claimed_before_ms(10_000) > claimed_ms


def test_a_damaged_note_is_as_none(tmp_path):
    clock, file = FakeClock(), tmp_path / "shard-1.clock"
    file.write_bytes(b'{"boot": "\xff"}')
    time_ms = clock.now_ms()

    Timekeeper(clock, file).resume()

    assert clock.now_ms() == time_ms


def test_a_successor_goes_on_with_what_was_corrected_just_before(tmp_path):
    clock, file = SteppedClock(), tmp_path / "shard-1.clock"
    timekeeper = Timekeeper(clock, file)
    timekeeper.begin()
    clock.advance(1)
    clock.ahead_ms = 700
    timekeeper.tick()
    time_ms = clock.now_ms()

    successor_of(clock, file, away=1)

    assert clock.now_ms() == time_ms + 1000


def successor_of(clock: FakeClock, file: Path, *, away: float) -> Timekeeper:
    clock.advance(away)
    successor = Timekeeper(clock, file)
    successor.resume()
    successor.begin()
    return successor


def assert_ends_when_due(
    clock: FakeClock, timekeeper: Timekeeper, claimed_ms: int, *, served: int
) -> None:
    """A claim of 600 s, of which so many are over, ends when the others are, not before."""
    advance(clock, timekeeper, 600 - served)
    assert timekeeper.claimed_before_ms(600_000) < claimed_ms
    advance(clock, timekeeper, 2)
    assert timekeeper.claimed_before_ms(600_000) > claimed_ms


def test_a_second_restart_does_not_forget_the_time_away_before_the_first(tmp_path):
    clock, file = FakeClock(), tmp_path / "shard-1.clock"
    timekeeper = Timekeeper(clock, file)
    timekeeper.begin()
    advance(clock, timekeeper, 1)
    claimed_ms = clock.now_ms()
    advance(clock, timekeeper, 60)
    timekeeper.tick()

    successor = successor_of(clock, file, away=3600)
    advance(clock, successor, 60)
    successor.tick()
    successor = successor_of(clock, file, away=1)

    assert_ends_when_due(clock, successor, claimed_ms, served=121)


def test_claims_from_before_the_boot_keep_their_time_out_through_a_restart(tmp_path):
    clock, file = FakeClock(), tmp_path / "shard-1.clock"
    claimed_ms = clock.now_ms() - HOUR_MS
    timekeeper = successor_of(clock, file, away=0)
    advance(clock, timekeeper, 60)
    timekeeper.tick()

    successor = successor_of(clock, file, away=1)

    assert_ends_when_due(clock, successor, claimed_ms, served=61)


def test_a_step_and_then_a_restart_end_no_claim(tmp_path):
    clock, file = SteppedClock(), tmp_path / "shard-1.clock"
    timekeeper = Timekeeper(clock, file)
    timekeeper.begin()
    advance(clock, timekeeper, 1)
    claimed_ms = clock.now_ms()
    clock.ahead_ms = HOUR_MS
    timekeeper.tick()

    successor = successor_of(clock, file, away=1)

    advance(clock, successor, 9)
    assert successor.claimed_before_ms(10_000) < claimed_ms
    advance(clock, successor, 2)
    assert successor.claimed_before_ms(10_000) > claimed_ms


def test_an_orderly_end_notes_all_that_was_served(
    make_shard: MakeShard, clock: FakeClock, tmp_path
):
    file = tmp_path / "shard-1.clock"
    shard = make_shard("s1", timekeeper=Timekeeper(clock, file))
    clock.advance(3)
    shard.service.close()

    assert json.loads(file.read_text())["elapsed"] == clock.elapsed()


def test_what_was_noted_in_another_boot_is_not_used(tmp_path):
    clock, file = FakeClock(), tmp_path / "shard-1.clock"
    now_ms = clock.now_ms()
    other_boot = json.dumps({"boot": "other", "elapsed": 5.0, "now_ms": 5})
    for noted in (other_boot, "{}", "[]", "x", ""):
        file.write_text(noted)
        timekeeper = Timekeeper(clock, file)

        timekeeper.resume()
        timekeeper.begin()

        assert clock.now_ms() == now_ms


@pytest.mark.parametrize("served", [0, 60])
def test_no_id_is_given_out_twice_by_a_copy_and_a_clock_that_was_set_back(
    make_shard: MakeShard,
    clock: FakeClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    served: int,
):
    """Each owner is of a boot of its own; the second one opens the copy an hour before the first,
    the third one, too."""
    file, copy = tmp_path / "s1.sqlite", tmp_path / "copy"
    boots = itertools.count()

    def enqueued_by_an_owner_of_another_boot() -> int:
        monkeypatch.setattr(timekeeping, "_boot_id", partial(str, next(boots)))
        keeper = Timekeeper(clock, tmp_path / "shard-1.clock")
        shard = make_shard("s1", timekeeper=keeper)
        shard.create()
        for _ in range(served):
            clock.advance(1)
            keeper.tick()
        [descriptor] = shard.enqueue(b"x")
        shard.service.close()
        parsed = JobDescriptor.parse(descriptor)
        assert parsed is not None
        return parsed.local_id

    make_shard("s1").service.close()
    shutil.copy(file, copy)
    ids = [enqueued_by_an_owner_of_another_boot()]
    clock.resume(clock.now_ms() - HOUR_MS)
    for _ in range(2):
        shutil.copy(copy, file)
        ids.append(enqueued_by_an_owner_of_another_boot())

    assert ids == sorted(set(ids))
