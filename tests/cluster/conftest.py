"""Machines, and a cluster on them, that the tests of a process share."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from tests.cluster.machines import Network, NoNamespacesError
from tests.cluster.site import Site
from tests.conftest import ProgramPath
from tests.servers.zookeeper import java_path

_PROGRAMS = {"mariadbd": "mariadb-server", "redis-server": "redis-server", "curl": "curl"}
_SECONDS: dict[str, list[float]] = defaultdict(list)


@pytest.fixture(scope="session")
def network_here() -> Callable[[], Network]:
    """Makes a network; the test is skipped where no namespaces can be made."""

    def make() -> Network:
        try:
            return Network()
        except NoNamespacesError as error:
            pytest.skip(str(error))

    return make


@pytest.fixture(scope="session")
def shared_site(
    network_here: Callable[[], Network],
    program_path: ProgramPath,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    for program, package in _PROGRAMS.items():
        program_path(program, debian_package=package)
    java = java_path(program_path)
    network = network_here()
    try:
        site = Site(network, tmp_path_factory.mktemp("c"), java)
        site.start()
        yield site
    finally:
        network.close()


@pytest.fixture
def site(shared_site: Site) -> Iterator[Site]:
    """All of it serves, whatever the test before did."""
    shared_site.restore()
    yield shared_site
    shared_site.restore()


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> range:
    """How often each fault comes."""
    return range(max(1, request.config.getoption("--rounds")))


@pytest.fixture
def note() -> Callable[[str, float], None]:
    """Called with what took how many seconds: they are shown at the end."""
    return lambda what, seconds: _SECONDS[what].append(seconds)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for what, seconds in _SECONDS.items():
        median = statistics.median(seconds)
        terminalreporter.write_line(
            f"{what}: {len(seconds)} times, median {median:.2f} s, longest {max(seconds):.2f} s"
        )
