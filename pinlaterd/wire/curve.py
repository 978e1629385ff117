"""The cluster's key: a server that holds it belongs to the cluster.

It is one random key, the same on all servers. From it and the cluster's name, HMAC-SHA256 derives
the CURVE key pair of connections between servers, the same at both ends, and the credentials for
what the cluster keeps in ZooKeeper. docs/architecture.md tells why no list of admitted clients is
needed: the public key is as secret as the secret one, and never sent in clear.
"""

from __future__ import annotations

import errno
import hmac
import os
import stat
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import zmq
from zmq.utils import z85

from pinlaterd.errors import ConfigError

_BYTES = 32
# A cut is noticed within 3 s, also if it is silent, and in one direction only. By the system, as
# ZeroMQ's pings would wake up idle processes.
_PROBE_SECONDS, _UNACKNOWLEDGED_MS = 1, 2000
# What a busy process has not taken yet must not fill the system's buffers: that would look like a
# cut. Senders bound their bytes.
_MESSAGES_WAITING = 100_000
_CONNECT_WITHIN_MS, _HANDSHAKE_WITHIN_MS = 1000, 2000
# How long the port of this process's last socket, which is closed in the background, may be taken.
_PORT_SECONDS, _PORT_AGAIN_SECONDS = 1.0, 0.01


@dataclass(frozen=True)
class ClusterKey:
    secret: bytes = field(repr=False)
    cluster: str  # the cluster's name

    @classmethod
    def load(cls, path: Path, cluster: str) -> ClusterKey:
        """Raises ConfigError."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(4 * _BYTES)
        except OSError as error:
            cure = "copy it from another server of the cluster"
            raise ConfigError([f"{path}: can't be read ({error.strerror}); {cure}"]) from error
        if stat.S_IMODE(mode) & 0o077:
            raise ConfigError([f"{path}: others can read it; chmod 600 {path}"])
        try:
            secret = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            secret = b""
        if len(secret) != _BYTES:
            cure = "copy it again from another server of the cluster"
            raise ConfigError([f"{path}: holds no key ({2 * _BYTES} hexadecimal digits); {cure}"])
        return cls(secret, cluster)

    @staticmethod
    def generate(path: Path) -> None:
        """Write a new key to `path`, for its owner only. Raises OSError; FileExistsError if there
        is one."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{os.urandom(_BYTES).hex()}\n")
            file.flush()
            os.fsync(file.fileno())

    def _derived(self, purpose: str) -> bytes:
        message = f"pinlaterd {purpose} {self.cluster}"
        return hmac.digest(self.secret, message.encode(), "sha256")

    @cached_property
    def pair(self) -> tuple[bytes, bytes]:
        """The public and the secret key for CURVE, in z85."""
        secret = z85.encode(self._derived("curve"))
        return zmq.curve_public(secret), secret

    @property
    def digest(self) -> str:
        """The credentials of ZooKeeper's scheme `digest`: user, colon, password."""
        return f"pinlaterd:{self._derived('zookeeper').hex()}"

    def listen(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind `socket` to `endpoint`, where only holders of the key are admitted. What else it is
        bound to is open as ever. Raises OSError if the address can't be had."""
        until = time.monotonic() + _PORT_SECONDS
        most_waiting = socket.rcvhwm
        socket.curve_secretkey = self.pair[1]
        socket.curve_server = True
        _bound_times(socket)
        try:
            while not _is_bound(socket, endpoint, is_last=time.monotonic() >= until):
                time.sleep(_PORT_AGAIN_SECONDS)
        finally:
            socket.curve_server = False
            socket.rcvhwm = most_waiting

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Have `socket` connect from now on as a holder of the key, to such only."""
        socket.curve_publickey, socket.curve_secretkey = self.pair
        socket.curve_serverkey = self.pair[0]
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_WITHIN_MS)
        _bound_times(socket)


def _bound_times(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_WITHIN_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _PROBE_SECONDS)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_SECONDS)
    socket.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
    socket.rcvhwm = _MESSAGES_WAITING


def _is_bound(socket: zmq.Socket[bytes], endpoint: str, *, is_last: bool) -> bool:
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno == errno.EADDRINUSE and not is_last:
            return False
        raise OSError(error.errno, f"can't listen on {endpoint}: {error}") from error
    return True
