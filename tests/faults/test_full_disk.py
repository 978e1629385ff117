"""A full disk: errors while it lasts, nothing acknowledged lost, back once there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.deployment import Deployment
from tests.faults.load import Load

pytestmark = pytest.mark.service

DISK_BYTES = 12 * 1024 * 1024
_CHUNK = bytes(64 * 1024)


def _unable(why: str) -> None:
    message = f"a small file system can't be mounted: {why}; run this as root"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def small_disk(new_deployment) -> Iterator[Deployment]:
    """A deployment of two shards whose data lies on a file system of a few MB."""
    if os.geteuid() != 0:
        _unable("not root")
    deployment: Deployment = new_deployment(2)
    data = deployment.folder / "data"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(data)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        _unable(done.stderr.strip())
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.destroy()
        subprocess.run(["umount", str(data)], check=True)


def _fill(path: Path) -> None:
    """Write until not one more byte fits."""
    with path.open("wb", buffering=0) as file:
        for chunk in (_CHUNK, bytes(1)):
            try:
                while file.write(chunk):
                    pass
            except OSError:
                continue


def test_a_full_disk_loses_nothing_and_is_got_over(small_disk: Deployment, wait_until):
    with small_disk.client() as client:
        client.create_queue("q")
    load = Load(small_disk, "q")
    filler = small_disk.folder / "data/filler"
    with load.running():
        wait_until(partial(load.has_progressed, since=0))

        _fill(filler)
        wait_until(lambda: len(load.errors) >= 10)
        filler.unlink()

        small_disk.wait_until_serving()
        wait_until(partial(load.has_progressed, since=load.progress()))

    load.check(claims_may_be_lost=True)
