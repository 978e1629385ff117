"""Clock on clocks that the test moves."""

from __future__ import annotations

import time

import pytest

from pinlaterd import clock as clock_module
from pinlaterd.clock import HOLD_SECONDS, Clock

HOUR = 3600.0


class Machine:
    """The machine's clocks. `held_up` is how long the process stands still after a reading."""

    CLOCK_BOOTTIME = time.CLOCK_BOOTTIME

    def __init__(self) -> None:
        self.wall = 1_700_000_000.0
        self.steady = 50.0
        self.held_up = 0.0

    def time(self) -> float:
        return self._read(self.wall)

    def clock_gettime(self, clock: int) -> float:
        assert clock == time.CLOCK_BOOTTIME
        return self._read(self.steady)

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def _read(self, value: float) -> float:
        held_up, self.held_up = self.held_up, 0.0
        self.advance(held_up)
        return value


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock_module, "time", machine)
    return machine


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_step_that_comes_back_changes_nothing(machine, step):
    clock = Clock()
    before = clock.now_ms()
    machine.wall += step
    assert not clock.look()
    assert f"stepped by {step:+.0f} s" in clock.warning
    machine.advance(HOLD_SECONDS - 1)
    assert not clock.look()
    machine.wall -= step

    assert not clock.look()

    assert clock.now_ms() == before + round((HOLD_SECONDS - 1) * 1000)
    assert "came back" in clock.warning
    machine.advance(2 * HOUR)
    clock.look()
    assert clock.warning == ""


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_step_that_lasts_is_followed(machine, step):
    clock = Clock()
    machine.wall += step
    clock.look()
    machine.advance(HOLD_SECONDS)
    assert clock.now_ms() == round((machine.wall - step) * 1000)

    assert clock.look()

    assert clock.now_ms() == round(machine.wall * 1000)
    assert clock.step_ms == 0


def test_a_step_that_changes_has_to_last_from_then_on(machine):
    clock = Clock()
    machine.wall += HOUR
    clock.look()
    machine.advance(HOLD_SECONDS - 1)
    machine.wall += HOUR
    clock.look()
    machine.advance(HOLD_SECONDS - 1)

    assert not clock.look()

    machine.advance(1)
    assert clock.look()


@pytest.mark.parametrize("difference", [0.5, -0.5])
def test_a_small_correction_is_followed_at_once_but_never_backwards(machine, difference):
    clock = Clock()
    before = clock.now_ms()
    machine.wall += difference

    assert not clock.look()

    assert clock.now_ms() == before + max(0, round(difference * 1000))
    assert clock.warning == ""
    machine.advance(1)
    assert clock.now_ms() == round(machine.wall * 1000)


def test_it_goes_on_with_a_predecessors_time(machine):
    clock = Clock()

    clock.resume(1_600_000_000_000)

    machine.advance(2)
    assert clock.now_ms() == 1_600_000_002_000


def test_a_process_held_up_between_two_readings_sees_no_step(machine):
    clock = Clock()
    machine.held_up = 5.0

    assert not clock.look()

    assert clock.warning == ""
    assert clock.now_ms() == round(machine.wall * 1000)
