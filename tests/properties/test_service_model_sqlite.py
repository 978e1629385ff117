"""A service on SQLite against the model of a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.properties.service_model import SQL_KEEPS, check_service, running

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running(tmp_path_factory.mktemp("d"), {"engine": "sqlite"}) as deployment:
        yield deployment


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_calls_leaves_what_the_model_has(
    deployment: Deployment, seed: int, wait_until: WaitUntil
):
    check_service(deployment, seed, wait_until, SQL_KEEPS)
