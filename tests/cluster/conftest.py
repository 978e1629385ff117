"""Machines, and a cluster on them, that the tests of a process share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cluster.machines import Network, NoNamespacesError


@pytest.fixture(scope="session")
def network_here() -> Callable[[], Network]:
    """Makes a network; the test is skipped where no namespaces can be made."""

    def make() -> Network:
        try:
            return Network()
        except NoNamespacesError as error:
            pytest.skip(str(error))

    return make
