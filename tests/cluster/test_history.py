"""Every server shows the history and the marks of all of them."""

from __future__ import annotations

import time

import pytest

from tests.cluster.load import PROBE
from tests.cluster.run import Run
from tests.cluster.site import Site, wait_until

pytestmark = [pytest.mark.service, pytest.mark.rounds, pytest.mark.timeout(600)]

_HISTORY = f"/history.json?queue={PROBE}&since=5m"


def test_history_and_marks_are_of_the_whole_service(site: Site):
    first, victim, _ = site.servers
    with Run(site) as run:
        began_ms = int(time.time() * 1000)
        with run.fault("router killed") as began:
            victim.kill("router")
            run.wait_until_served(began)

        def text_of_marks() -> list[str]:
            marks = first.page(f"/events.json?servers=all&since={began_ms}")["events"]
            return [mark["text"] for mark in marks]

        restarted = f"{victim.name}: router restarted"
        wait_until(lambda: any(text.startswith(restarted) for text in text_of_marks()))

        def rates(path: str) -> list[dict[int, float]]:
            """By server: the jobs/s that came, by the time of each point that is known."""
            found = [server.page(path) for server in site.servers]
            return [
                {
                    one["from_ms"] + place * one["step_ms"]: value
                    for place, value in enumerate(one["series"]["in"])
                    if value is not None
                }
                for one in found
            ]

        def agree() -> bool:
            """Whether, for a time that all know, each server shows the sum of all."""
            own, whole = rates(_HISTORY), rates(f"{_HISTORY}&servers=all")
            times = set.intersection(*(set(one) for one in (*own, *whole)))
            sums = {at: sum(one[at] for one in own) for at in times}
            busy = [at for at in times if all(one[at] for one in own)]
            return bool(busy) and all(
                one[at] == pytest.approx(sums[at]) for one in whole for at in busy
            )

        wait_until(agree)

    outlines = [server.page("/outlines.json?series=in&servers=all") for server in site.servers]
    assert all(PROBE in one for one in outlines)

    def is_gone() -> bool:
        servers = first.page("/status.json")["servers"]
        return [one["name"] for one in servers if one["state"] == "gone"] == [victim.name]

    victim.machine.off()
    try:
        wait_until(is_gone)
        assert first.page(f"{_HISTORY}&servers=all")["unanswered"] == [victim.name]
    finally:
        site.restore()
