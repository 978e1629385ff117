"""A full disk: errors while it lasts, nothing acknowledged lost, back once there is room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pinlaterd.errors import Overloaded
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.faults.load import Load
from tests.faults.small_disk import SmallDisk, fill

pytestmark = pytest.mark.service

DISK_BYTES = 12 * 1024 * 1024


@pytest.fixture
def deployment(small_disk: SmallDisk, new_deployment: Callable[[int], Deployment]) -> Deployment:
    """Of two shards, whose data lies on a file system of a few MB."""
    deployment = new_deployment(2)
    small_disk(deployment.folder / "data", DISK_BYTES)
    deployment.up()
    return deployment


def test_a_full_disk_loses_nothing_and_is_got_over(
    deployment: Deployment, load: Load, wait_until: WaitUntil
):
    filler = deployment.folder / "data/filler"
    with load.running():
        fill(filler)
        wait_until(lambda: len(load.errors) >= 10)
        # Who enqueues is told what, where and how to mend it.
        wait_until(lambda: any(_says_so(error) for error in load.errors))
        filler.unlink()

        deployment.wait_until_serving()

    load.check(claims_may_be_lost=True)


def _says_so(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, Overloaded) and "store is full" in text and "make room" in text
