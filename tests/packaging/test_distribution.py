"""What is built from the sources carries all that the service reads at run time."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BUILT_FROM = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "pinlaterd", "thrift")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from a source archive, which is built from a copy of the sources."""
    sources = tmp_path_factory.mktemp("sources")
    for name in BUILT_FROM:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, sources / name, symlinks=True)
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
        if path.is_file() and path.suffix != ".pyc"
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
