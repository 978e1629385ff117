"""What routers and the coordinator tell each other of rates, over the control channel.

    router -> coordinator    a RateReport: what it holds, and what is wanted of it
    coordinator -> router    a RateGrant: its share of each limited queue; replaces the one before

Grants are numbered upward, over restarts of the coordinator too; a router ignores one that is
not greater than the last, and confirms each by a report that bears its number. The coordinator
keeps what each router may hold in run/rates.json: for a coordinator that is restarted, and for a
router that starts while there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from pinlaterd.config.files import replace_file
from pinlaterd.config.layout import RATES_FILE
from pinlaterd.lifecycle import process_place
from pinlaterd.wire.envelope import MalformedEnvelope

# What tells these messages from the channel's others, which are JSON objects.
TAG = b"R"

Figures = Mapping[str, Annotated[float, msgspec.Meta(ge=0)]]  # by queue


class RouterId(NamedTuple):
    """One router process: its name under supervisord, and which of that name."""

    process: str
    pid: int
    started_at_ms: int


class RateReport(NamedTuple):
    """What a router says. `grant`: the last that it follows, 0: none yet."""

    router: RouterId
    grant: int
    shares: Figures  # jobs/s that it may spend, by limited queue
    demands: Figures  # jobs/s that its clients take or would; those that are 0 left out
    returned: Figures  # tokens that it gave up because `grant` cut its shares


class RateGrant(NamedTuple):
    """What a router may spend from now on. A queue that is not in `shares` has no limit."""

    number: int
    shares: Figures  # jobs/s
    credits: Figures  # tokens that others gave up for it, once


class Holding(NamedTuple):
    """The most that a router may be spending (jobs/s by queue), as of the grant `number`."""

    router: RouterId
    number: int
    shares: Figures


_REPORTS, _GRANTS = msgspec.json.Decoder(RateReport), msgspec.json.Decoder(RateGrant)
_HOLDINGS = msgspec.json.Decoder(tuple[str, list[Holding]])  # where they were noted


def pack_rate_report(report: RateReport) -> bytes:
    return TAG + msgspec.json.encode(report)


def unpack_rate_report(message: bytes) -> RateReport:
    try:
        return _REPORTS.decode(message.removeprefix(TAG))
    except ValueError as error:
        raise MalformedEnvelope("rate report") from error


def pack_rate_grant(grant: RateGrant) -> bytes:
    return TAG + msgspec.json.encode(grant)


def unpack_rate_grant(message: bytes) -> RateGrant:
    try:
        return _GRANTS.decode(message.removeprefix(TAG))
    except ValueError as error:
        raise MalformedEnvelope("rate grant") from error


def write_holdings(holdings: Sequence[Holding], path: Path = RATES_FILE) -> None:
    replace_file(path, msgspec.json.encode((process_place(), holdings)))


def read_holdings(path: Path = RATES_FILE) -> Sequence[Holding]:
    """Nothing if there is no file that can be read, or it is from before the machine or the
    container was started: all that held anything have ended, and their pids are others' by now."""
    try:
        place, holdings = _HOLDINGS.decode(path.read_bytes())
    except (OSError, ValueError):
        return []
    return holdings if place == process_place() else []
