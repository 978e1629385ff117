"""What routers and the coordinator tell each other of rates, over the control channel.

    router -> coordinator    a RateReport: what it holds, and what is wanted of it
    coordinator -> router    a RateGrant: its share of each limited queue; replaces the one before

Grants are numbered upward, over restarts of the coordinator too; a router ignores one that is
not greater than the last, and confirms each by a report that bears its number. The coordinator
keeps what each router may hold in run/rates.json: for a coordinator that starts anew, and for a
router that starts while there is none.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pinlaterd.config.layout import RATES_FILE
from pinlaterd.lifecycle import process_place
from pinlaterd.wire.envelope import MalformedEnvelope

# What tells these messages from the channel's others, which are JSON objects.
TAG = b"R"


class RouterId(NamedTuple):
    """One router process: its name under supervisord, and which of that name."""

    process: str
    pid: int
    started_at_ms: int


class RateReport(NamedTuple):
    """What a router says. `grant`: the last that it follows, 0: none yet."""

    router: RouterId
    grant: int
    shares: Mapping[str, float]  # jobs/s that it may spend, by limited queue
    demands: Mapping[str, float]  # jobs/s that its clients take or would; those that are 0 left out
    returned: Mapping[str, float]  # tokens that it gave up because `grant` cut its shares


class RateGrant(NamedTuple):
    """What a router may spend from now on. A queue that is not in `shares` has no limit."""

    number: int
    shares: Mapping[str, float]  # jobs/s
    credits: Mapping[str, float]  # tokens that others gave up for it, once


class Holding(NamedTuple):
    """The most that a router may be spending (jobs/s by queue), as of the grant `number`."""

    router: RouterId
    number: int
    shares: Mapping[str, float]


def pack_rate_report(report: RateReport) -> bytes:
    return TAG + json.dumps(report, separators=(",", ":")).encode()


def unpack_rate_report(message: bytes) -> RateReport:
    try:
        router, grant, shares, demands, returned = json.loads(message.removeprefix(TAG))
        return RateReport(
            _router(router), int(grant), _figures(shares), _figures(demands), _figures(returned)
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise MalformedEnvelope("rate report") from error


def pack_rate_grant(grant: RateGrant) -> bytes:
    return TAG + json.dumps(grant, separators=(",", ":")).encode()


def unpack_rate_grant(message: bytes) -> RateGrant:
    try:
        number, shares, credits_ = json.loads(message.removeprefix(TAG))
        return RateGrant(int(number), _figures(shares), _figures(credits_))
    except (ValueError, TypeError, AttributeError) as error:
        raise MalformedEnvelope("rate grant") from error


def write_holdings(holdings: Sequence[Holding], path: Path = RATES_FILE) -> None:
    """Replace the file at once: readers see the old or the new one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    temporary.write_text(json.dumps([process_place(), holdings]))
    temporary.replace(path)


def read_holdings(path: Path = RATES_FILE) -> Sequence[Holding]:
    """Nothing if there is no file that can be read, or it is from before the machine or the
    container was started: all that held anything have ended, and their pids are others' by now."""
    try:
        place, holdings = json.loads(path.read_bytes())
        if place != process_place():
            return []
        return [
            Holding(_router(router), int(number), _figures(shares))
            for router, number, shares in holdings
        ]
    except (OSError, ValueError, TypeError, AttributeError):
        return []


def _router(found: Any) -> RouterId:
    process, pid, started_at_ms = found
    return RouterId(str(process), int(pid), int(started_at_ms))


def _figures(found: Any) -> Mapping[str, float]:
    figures = {str(queue): float(figure) for queue, figure in found.items()}
    if not all(math.isfinite(figure) and figure >= 0 for figure in figures.values()):
        raise ValueError("a rate is negative or no number")
    return figures
