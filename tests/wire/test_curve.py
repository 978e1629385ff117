"""The cluster's key: its file, and who gets a connection with it, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from pinlaterd.errors import ConfigError
from pinlaterd.wire.curve import ClusterKey

OURS = ClusterKey(bytes(32), "prod")
ANSWER_MS, SILENCE_MS = 20_000, 500


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """An endpoint that echoes what holders of the key send, and ipc that echoes anybody."""
    monkeypatch.chdir(tmp_path)
    echo = context.socket(zmq.ROUTER)
    echo.bind("ipc://before.ipc")
    OURS.listen(echo, "tcp://127.0.0.1:*")
    there = echo.get_string(zmq.LAST_ENDPOINT)
    echo.bind("ipc://after.ipc")
    ends = context.socket(zmq.PULL)
    ends.bind("inproc://end")

    def run() -> None:
        poller = zmq.Poller()
        for waited in (echo, ends):
            poller.register(waited, zmq.POLLIN)
        while ends not in (ready := dict(poller.poll())):
            if echo in ready:
                echo.send_multipart(echo.recv_multipart())
        echo.close()
        ends.close()

    thread = threading.Thread(target=run)
    thread.start()
    yield there
    ending = context.socket(zmq.PUSH)
    ending.connect("inproc://end")
    ending.send(b"")
    thread.join()


def _is_answered(endpoint: str, key: ClusterKey | None, *, wait_ms: int) -> bool:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        if key is not None:
            key.call(client)
        client.connect(endpoint)
        client.send(b"hello")
        return bool(client.poll(wait_ms)) and client.recv() == b"hello"


def test_who_holds_the_key_is_admitted(server):
    assert _is_answered(server, OURS, wait_ms=ANSWER_MS)


@pytest.mark.parametrize(
    "key", [None, ClusterKey(b"1" * 32, "prod"), ClusterKey(bytes(32), "other")]
)
def test_others_get_no_connection(server, key):
    assert not _is_answered(server, key, wait_ms=SILENCE_MS)
    assert _is_answered(server, OURS, wait_ms=ANSWER_MS)


class _KeyOfItsOwn(ClusterKey):
    """What a stranger would hold who makes up a key pair, and one for the server."""

    def call(self, socket: zmq.Socket[bytes]) -> None:
        public, secret = zmq.curve_keypair()
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.curve_serverkey = public


def test_who_makes_up_a_key_gets_no_connection(server):
    assert not _is_answered(server, _KeyOfItsOwn(b"", ""), wait_ms=SILENCE_MS)
    assert _is_answered(server, OURS, wait_ms=ANSWER_MS)


@pytest.mark.parametrize(
    "greeting",
    [
        b"\x01\x00" + b"\x06\x00hello",  # ZMTP 1.0, before there was security: identity, message
        b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x00\x00" + b"\x00\x05hello",  # ZMTP 2.0
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04\x06\x05READY",  # 3.0, plain
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x00\x05hello",  # no handshake
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_no_dialect_of_zeromq_goes_round_it(server, greeting):
    address = server.removeprefix("tcp://").split(":")
    with socket.create_connection(address, timeout=ANSWER_MS / 1000) as stranger:
        stranger.sendall(greeting)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := stranger.recv(1000):  # until the server ends it
                answer += data
    assert b"hello" not in answer
    assert _is_answered(server, OURS, wait_ms=ANSWER_MS)


@pytest.mark.parametrize("bound", ["before", "after"])
def test_connections_without_curve_are_not_asked_about(server, context, bound):
    with context.socket(zmq.DEALER) as client:
        client.connect(f"ipc://{bound}.ipc")
        client.send(b"hello")
        assert client.poll(ANSWER_MS)


def test_a_key_that_is_generated_is_the_same_wherever_it_is_copied(tmp_path):
    path = tmp_path / "cluster.key"
    ClusterKey.generate(path)

    key = ClusterKey.load(path, "prod")

    assert path.stat().st_mode & 0o777 == 0o600
    assert key == ClusterKey.load(path, "prod")
    assert key.pair == ClusterKey.load(path, "prod").pair
    public, secret = key.pair
    assert (len(public), len(secret)) == (40, 40)
    user, _, password = key.digest.partition(":")
    assert user == "pinlaterd"
    assert len(bytes.fromhex(password)) == 32
    with pytest.raises(FileExistsError):
        ClusterKey.generate(path)


def test_each_cluster_and_key_has_credentials_of_its_own(tmp_path):
    other = tmp_path / "cluster.key"
    ClusterKey.generate(other)
    keys = [OURS, ClusterKey(OURS.secret, "other"), ClusterKey.load(other, "prod")]

    assert len({key.pair for key in keys}) == len({key.digest for key in keys}) == 3


def test_a_key_is_not_shown():
    assert OURS.secret.hex() not in repr(OURS)
    assert repr(OURS.secret) not in repr(OURS)


def _problem(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        ClusterKey.load(path, "prod")
    [problem] = caught.value.problems
    assert problem.startswith(f"{path}: ")
    return problem.removeprefix(f"{path}: ")


def test_what_is_no_key_is_refused(tmp_path):
    path = tmp_path / "cluster.key"
    assert _problem(path) == (
        "can't be read (No such file or directory); copy it from another server of the cluster"
    )
    ClusterKey.generate(path)
    path.chmod(0o640)
    assert _problem(path) == f"others can read it; chmod 600 {path}"
    path.chmod(0o600)
    for content in (b"", b"abc", b"ab" * 31, b"\xff" * 64, os.urandom(32)):
        path.write_bytes(content)
        assert _problem(path) == (
            "holds no key (64 hexadecimal digits); copy it again from another server of the cluster"
        )
