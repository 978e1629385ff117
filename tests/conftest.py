"""What tests share: the clock, free ports, waiting without sleeping, programs a machine may lack.

No test depends on a server that someone started, on a fixed port, or on a folder outside its
own `tmp_path`.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.clocks import FakeClock
from tests.deployment import unused_port
from tests.servers.mariadb import MariaDB, start_mariadb

pytest_plugins = ["tests.shared_service"]

# Else every process with aiohttp reads all certificates that the machine trusts, twice, and PyMySQL
# once a connection, which takes longer than most of what tests ask of a server. Those of a folder,
# SSL_CERT_DIR, are read once they are needed. All processes that tests start inherit this.
os.environ["SSL_CERT_FILE"] = os.devnull

# Machines that run tests are slow and shared: an example's time says nothing.
settings.register_profile("pinlaterd", deadline=None)
settings.load_profile("pinlaterd")

POLL_SECONDS = 0.01
_MOST_POLL_SECONDS = 0.05
API_TEST = re.compile(r"tests/conformance/test_api_(\w+)\.py::.*[\[-](sqlite|mysql|redis)[\]-]")
MYSQL_PARTS = "ds"  # first letters of the files that begin the second part and so on
# What takes longest, in that order: begun last, it would run alone.
LONG_GROUPS = (
    "cluster",
    "checker/test_promises.py",
    "checker/test_variants.py",
    "faults/test_every_step.py",
    "Thrift interface, redis",
    "Thrift interface, sqlite",
    "web/browser",
    "cli/test_up_and_down.py",
    "live/test_cluster_config.py",
    "live/test_drain.py",
    "faults/stores/test_network.py",
    "test_quickstart.py",
    "faults/test_restarts.py",
    "faults/test_kill.py",
    "rates/test_rates.py",
    "rates/test_several_servers.py",
    "simulation/test_simulation.py",
    "faults/test_failover.py",
    "push/test_faults.py",
    "faults/stores/test_two_owners.py",
    "Thrift interface, mysql 3",
    "Thrift interface, mysql 1",
    "Thrift interface, mysql 2",
    "properties/test_engine_model_sqlite.py",
    "properties/test_engine_model_mysql.py",
    "faults/stores/test_clock.py",
    "faults/stores/test_server.py",
    "faults/test_freeze.py",
    "properties/test_service_model.py",
    "properties/test_engine_model_redis.py",
    "live/test_keys.py",
    "faults/test_neighbours.py",
    "docs/test_migration.py",
    "rates/test_permits.py",
    "http/test_openapi.py",
    "http/test_import_rickover.py",
    "http/test_v1_faults.py",
    "push/test_process.py",
)
# Servers are there; an ordinary user's PATH has no such folder.
SYSTEM_PROGRAMS = "/usr/sbin"


class WaitUntil(Protocol):
    def __call__(self, condition: Callable[[], object], *, seconds: float = 20.0) -> None: ...


class FreePort(Protocol):
    def __call__(self) -> int: ...


class ProgramPath(Protocol):
    def __call__(self, program: str, *, debian_package: str) -> str: ...


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def free_port() -> FreePort:
    """Return a function that picks a TCP port of 127.0.0.1 which nothing listens on, and nothing
    takes by chance."""
    return unused_port


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """Waits for a condition, and fails the test if it has not come true in time."""

    def wait(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            if waited > seconds:
                pytest.fail(f"not within {seconds:g} s: {condition}")
            # What takes long is asked less often: a question may cost several processes time.
            time.sleep(min(POLL_SECONDS + waited / 20, _MOST_POLL_SECONDS))

    return wait


@pytest.fixture(scope="session")
def program_path() -> ProgramPath:
    """The path of a program; without it the test is skipped."""

    def find(program: str, *, debian_package: str) -> str:
        path = shutil.which(program) or shutil.which(program, path=SYSTEM_PROGRAMS)
        if path is None:
            pytest.skip(f"{program} is missing; on Debian: apt-get install {debian_package}")
        return path

    return find


def group_of(nodeid: str) -> str:
    """Tests of one group run one after the other in one process: those of a file, whose fixtures
    they share; those on a cluster; those in a browser, and those of the Thrift interface by engine,
    whose deployment they share. On MySQL in parts: a server with many hundred tables creates one
    more in seconds."""
    if nodeid.startswith("tests/cluster/test_") and "/test_machines.py" not in nodeid:
        return "cluster"
    if nodeid.startswith("tests/web/browser/"):
        return "web/browser"
    if not (found := API_TEST.search(nodeid)):
        return nodeid.partition("::")[0].removeprefix("tests/")
    file, engine = found.groups()
    part = bisect(MYSQL_PARTS, file) + 1
    return f"Thrift interface, mysql {part}" if engine == "mysql" else f"Thrift interface, {engine}"


class GroupScheduling(LoadFileScheduling):  # type: ignore[misc]  # xdist is not annotated
    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rounds", type=int, default=0, help="of each fault of a cluster; 0: a few faults, once"
    )
    parser.addoption(
        "--before", metavar="COMMIT", help="the release that servers are upgraded from"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long groups first, in the order of LONG_GROUPS; then those with the most tests."""
    if not config.getoption("--rounds"):
        left_out = [item for item in items if item.get_closest_marker("rounds")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    tests = Counter(group_of(item.nodeid) for item in items)
    place = {group: number for number, group in enumerate(LONG_GROUPS)}

    def order(item: pytest.Item) -> tuple[int, int, str]:
        group = group_of(item.nodeid)
        return place.get(group, len(place)), -tests[group], group

    items.sort(key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With CI=true a skipped test is a failed one."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        assert isinstance(report.longrepr, tuple)
        report.outcome = "failed"
        report.longrepr = f"CI=true allows no skipped test: {report.longrepr[2]}"
    return report


@pytest.fixture(scope="session")
def mariadb(
    program_path: ProgramPath,
    tmp_path_factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
) -> Iterator[MariaDB]:
    """The server that all tests of this worker share, each with shards of its own name."""
    server = start_mariadb(program_path, tmp_path_factory.mktemp("db") / "shared", free_port())
    os.environ["PINLATERD_TEST_MARIADB_PORT"] = str(server.port)
    yield server
    server.stop()
