"""One real service that the tests of a process share, and a queue of each test's own.

What a test needs changed (a process down, other settings) it does to a deployment of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pinlaterd.client import Client
from pinlaterd.config.password import hash_password
from tests.deployment import MOST_PATIENT, Deployment, serving

ADMIN_PASSWORD = "open sesame"
# On this queue a claim times out so soon that tests can wait for it.
SHORT_CLAIMS_QUEUE = "short_claims"
SHORT_CLAIM_SECONDS = 6

_numbers = itertools.count(1)


@contextmanager
def running_service(folder: Path) -> Iterator[Deployment]:
    settings = {
        "admin_password_hash": hash_password(ADMIN_PASSWORD),
        "monitor_interval_seconds": 0.1,
        **MOST_PATIENT,
    }
    queues = {SHORT_CLAIMS_QUEUE: {"job_claimed_timeout_seconds": SHORT_CLAIM_SECONDS}}
    with serving(folder, shards=2, settings=settings, queues=queues) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running_service(tmp_path_factory.mktemp("service")) as deployment:
        yield deployment


@pytest.fixture
def client(service: Deployment) -> Iterator[Client]:
    with service.client() as client:
        yield client


@pytest.fixture
def queue(client: Client) -> str:
    """A queue that no other test uses."""
    name = f"queue_{next(_numbers):04}"
    client.create_queue(name)
    return name
