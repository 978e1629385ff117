"""What is built from the sources carries all that the service reads at run time."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).parents[2]
BUILT_FROM = (
    *("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "docs", "pinlaterd", "thrift"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a source archive, which is built from a copy of the sources."""
    sources = tmp_path_factory.mktemp("sources")
    for name in BUILT_FROM:
        if (REPOSITORY / name).is_dir():
            # Other tests may write to __pycache__ meanwhile.
            no_caches = shutil.ignore_patterns("__pycache__")
            shutil.copytree(REPOSITORY / name, sources / name, symlinks=True, ignore=no_caches)
        else:
            shutil.copy(REPOSITORY / name, sources / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", str(sources)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = (sources / "dist").glob("*.whl")
    return wheel


def test_the_wheel_holds_every_file_of_the_package(wheel):
    sources = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "pinlaterd").rglob("*")
        if "__pycache__" not in path.parts and path.is_file()
    }

    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("pinlaterd/")}

    assert packed == sources


def test_the_wheel_holds_the_interface_itself_not_a_link_to_it(wheel):
    interface = (REPOSITORY / "thrift" / "pinlater.thrift").read_bytes()

    assert zipfile.ZipFile(wheel).read("pinlaterd/rpc/pinlater.thrift") == interface


def test_the_wheel_offers_the_command_lines(wheel):
    archive = zipfile.ZipFile(wheel)
    [entry_points] = [n for n in archive.namelist() if n.endswith("entry_points.txt")]

    text = archive.read(entry_points).decode()

    assert "pinlaterd = pinlaterd.cli:run_pinlaterd" in text
    assert "pinlater = pinlaterd.cli:run_pinlater" in text
    assert "pinlater-admin = pinlaterd.cli:run_pinlater_admin" in text


# --- what is needed beside it -------------------------------------------------------------------

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# As they are imported.
OF_SERVERS = [
    "aiohttp",
    "hiredis",
    "msgspec",
    "psutil",
    "pymysql",
    "re2",
    "redis",
    "supervisor",
    "uvloop",
    "yaml",
    "zmq",
]
CLIENT_ONLY = "import sys; sys.modules.update(dict.fromkeys({names!r})); "


def pinned(file: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (REPOSITORY / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


def needed(required: Iterable[str], extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """Yield these, of those `extras`, and what they need in turn, as they are installed here."""
    for one in map(Requirement, required):
        if not one.marker or any(one.marker.evaluate({"extra": each}) for each in ("", *extras)):
            yield one
            yield from needed(metadata.requires(one.name) or (), one.extras)


def test_the_constraints_are_the_tested_versions_of_all_that_a_service_needs():
    constraints, lock = pinned("constraints.txt"), pinned("requirements-dev.lock")
    required = [*PROJECT["dependencies"], *EXTRAS["server"], *EXTRAS["zookeeper"]]

    assert constraints.items() <= lock.items()
    for one in needed(required):
        assert one.specifier.contains(constraints[canonicalize_name(one.name)]), one


def run_without_server(call: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a Python that has none of the packages of the extra."""
    return subprocess.run(
        [sys.executable, "-c", CLIENT_ONLY.format(names=OF_SERVERS) + call, *arguments],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )


@pytest.mark.service
def test_clients_workers_and_pinlater_need_no_package_of_a_service(service, queue):
    assert len(PROJECT["dependencies"]) == 5
    imports = "import pinlaterd.client, pinlaterd.client.metrics, pinlaterd.cli.worker"
    assert run_without_server(imports).stderr == ""

    call = "from pinlaterd.cli import run_pinlater as run; run()"
    done = run_without_server(
        call, "enqueue", "--queue", queue, "--body", "x", "--port", str(service.port)
    )

    assert "enqueued 1 job in 1 call" in done.stdout, done.stderr
    assert run_without_server(call, "bench", "--help").returncode == 0


@pytest.mark.parametrize(
    ("run", "line"), [("run_pinlaterd", "up"), ("run_pinlater_admin", "status")]
)
def test_a_command_of_a_service_says_what_to_install(run, line):
    done = run_without_server(f"from pinlaterd.cli import {run} as run; run()", line)

    assert done.returncode == 1
    assert "`pip install 'pinlaterd[server]'` has what a service needs" in done.stderr
    assert done.stderr.count("\n") == 1
