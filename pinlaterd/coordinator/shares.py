"""A rate divided over those who spend it: first over servers, then over a server's routers.

Pure. The shares of a division always add up to the rate, so that the whole cluster never exceeds
it. Every sharer keeps a floor, so that one whose demand has just begun is not starved until the
next division; the rest goes by demand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

FLOOR_FRACTION = 0.1  # of the rate, divided evenly whatever the demand


def server_share(rate: float, server: str, servers: Sequence[str]) -> float:
    """This server's even part of `rate`; all of it for one that is in no server set."""
    return rate / len(servers) if server in servers else rate


def divide(
    rate: float, demands: Mapping[str, float], reserved: Mapping[str, float] | None = None
) -> dict[str, float]:
    """`rate` over the sharers in `demands`, by their demand (in any one unit; negative and
    unknown ones count as 0).

    `reserved`: what sharers that are alive but cut off still spend. It is taken off first."""
    if not demands:
        return {}
    left = max(0.0, rate - math.fsum((reserved or {}).values()))
    wanted = {
        name: demand if math.isfinite(demand) and demand > 0 else 0.0
        for name, demand in demands.items()
    }
    most = max(wanted.values())
    if most == 0:
        return dict.fromkeys(demands, left / len(demands))
    parts = {name: demand / most for name, demand in wanted.items()}
    total = math.fsum(parts.values())
    floor = left * FLOOR_FRACTION / len(demands)
    by_demand = left * (1 - FLOOR_FRACTION)
    return {name: floor + by_demand * (part / total) for name, part in parts.items()}
