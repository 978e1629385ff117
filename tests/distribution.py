"""Which tests one process of pytest-xdist takes together, because what they share is started once.

Those of a file, in general. The tests of the Thrift interface share one service for each engine
over all their files: they go by engine.
"""

from __future__ import annotations

import re

from xdist.scheduler import LoadScopeScheduling

from tests.conformance.api import BACKENDS

_ENGINES = "|".join(backend.engine for backend in BACKENDS)
_INTERFACE_TEST = re.compile(rf"tests/conformance/test_api_.*?\[({_ENGINES})\b")


def group_of(nodeid: str) -> str:
    """The name of the group in which the test with this pytest id is run."""
    of_engine = _INTERFACE_TEST.match(nodeid)
    if of_engine is not None:
        return f"tests/conformance on {of_engine[1]}"
    return nodeid.partition("::")[0]


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # it comes without types
    """Hands out a group after the other, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
