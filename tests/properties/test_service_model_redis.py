"""A service on Redis against the model of a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.properties.service_model import Keeps, check_service, running
from tests.servers.redis import RedisServer, redis_program, redis_server

__all__ = ["redis_program", "redis_server"]

pytestmark = pytest.mark.service

# As PinLater has it there: an ack's text replaces what was there.
KEEPS = Keeps(status_chars=3000, acks_replace_status=True)


@pytest.fixture
def deployment(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    master = {"host": redis_server.address.host, "port": redis_server.port}
    shard = {"engine": "redis", "master": master}
    with running(tmp_path_factory.mktemp("d"), shard) as deployment:
        yield deployment


def test_any_order_of_calls_leaves_what_the_model_has(
    deployment: Deployment, wait_until: WaitUntil
):
    check_service(deployment, 4, wait_until, KEEPS)
