"""Clients of other services that come to the Thrift port: told where they are, or closed."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator

import pymysql
import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.shared_service import running_service

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Not the shared one: its log has to be about these tests."""
    with running_service(tmp_path_factory.mktemp("service")) as deployment:
        yield deployment


def complaints(service: Deployment, about: str) -> int:
    return (service.folder / "run/log/router.log").read_text().count(f": {about}")


def test_an_http_client_is_told_where_it_is(service: Deployment, wait_until: WaitUntil):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{service.port}/health", timeout=10)

    assert refused.value.code == 400
    assert b"this is pinlaterd's Thrift port" in refused.value.read()
    wait_until(lambda: complaints(service, "HTTP; this is") == 1)


def test_a_tls_client_is_closed(service: Deployment, wait_until: WaitUntil):
    context = ssl.create_default_context()
    with (
        socket.create_connection(("127.0.0.1", service.port), timeout=10) as plain,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(plain, server_hostname="localhost")

    wait_until(lambda: complaints(service, "TLS; this is") == 1)


def test_a_mysql_client_gives_up_and_others_are_served(service: Deployment):
    """It waits for a greeting; what the log says of long silences is tested in tests/rpc."""
    with pytest.raises(pymysql.err.OperationalError):
        pymysql.connect(host="127.0.0.1", port=service.port, read_timeout=1)
    with service.client() as client:
        client.queue_names()
