"""SystemClock on clocks that the test moves."""

from __future__ import annotations

import pytest

from pinlaterd import clock as clock_module
from pinlaterd.clock import SystemClock


class Machine:
    """The machine's clocks. `held_up` is how long the process stands still after a reading."""

    def __init__(self) -> None:
        self.wall = 1_700_000_000.0
        self.steady = 50.0
        self.held_up = 0.0

    def time(self) -> float:
        return self._read(self.wall)

    def monotonic(self) -> float:
        return self._read(self.steady)

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def _read(self, value: float) -> float:
        self.advance(self.held_up)
        return value


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(clock_module, "time", machine)
    return machine


def test_it_follows_the_wall_clock_forward_at_once(machine):
    clock = SystemClock()
    machine.wall += 3600

    assert clock.now_ms() == 1_700_003_600_000


def test_it_never_goes_back_and_goes_on_at_the_same_speed(machine):
    clock = SystemClock()
    before = clock.now_ms()
    machine.wall -= 3600
    machine.advance(2)

    assert clock.now_ms() == before + 2000


def test_it_starts_no_earlier_than_its_floor(machine):
    assert SystemClock(floor_ms=1_800_000_000_000).now_ms() >= 1_800_000_000_000


def test_a_process_held_up_between_two_readings_does_not_get_ahead(machine):
    clock = SystemClock()
    machine.held_up = 5.0
    clock.now_ms()
    machine.held_up = 0.0
    machine.advance(1)

    assert clock.now_ms() == machine.wall * 1000
