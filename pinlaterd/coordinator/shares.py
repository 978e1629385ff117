"""A rate divided over those who spend it: first over servers, then over a server's routers.

Pure. The shares of a division always add up to the rate: never more, and nothing is wasted. As
water fills vessels: who wants little gets it whole, and the others an equal part of the rest, so
that nobody could have more but at the cost of one who has no more than he. Everybody keeps a
floor, so that one whose demand has just begun is not without a token until the next division.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

Sharer = TypeVar("Sharer", bound=Hashable)

# Of the rate, for all together. It is lost while those who have it want nothing, so it stays well
# below the 2 % by which a queue may miss its rate.
FLOOR_FRACTION = 0.01


def server_share(rate: float, servers: int) -> float:
    """One server's part of a cluster's rate."""
    return rate / max(1, servers)


def divide(rate: float, demands: Mapping[Sharer, float]) -> dict[Sharer, float]:
    """`rate` over the sharers in `demands`, who want so much each (in the same unit, at least 0).

    What nobody wants is divided evenly: it is there for demand that grows."""
    if not demands:
        return {}
    floor = rate * FLOOR_FRACTION / len(demands)
    wanted = {sharer: max(0.0, demand - floor) for sharer, demand in demands.items()}
    left = rate - floor * len(demands)
    shares = dict.fromkeys(demands, floor)
    hungry = sorted(wanted, key=lambda sharer: wanted[sharer])
    for index, sharer in enumerate(hungry):
        part = min(wanted[sharer], left / (len(hungry) - index))
        shares[sharer] += part
        left -= part
    return {sharer: share + left / len(demands) for sharer, share in shares.items()}
