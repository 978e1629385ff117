"""The cluster's key: whoever holds it belongs to the cluster.

It is one random key, the same on all servers. From it and the cluster's name, HMAC-SHA256 derives
what proves that a server holds it: the CURVE key pair of connections between servers (the same pair
at both ends), and the credentials for what the cluster keeps in ZooKeeper.

libzmq asks this process about each CURVE client before its first message passes (ZAP, RFC 27): a
client whose public key is not the cluster's gets no connection. Connections without CURVE, those
over ipc, are not asked about.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import zmq
from zmq.utils import z85

from pinlaterd.errors import ConfigError

_BYTES = 32
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks, by definition
_ZAP_DOMAIN = b"pinlaterd"


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

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Have `socket` admit only holders of this key where it is bound from now on. Its context
        needs an Admission."""
        socket.curve_secretkey = self.pair[1]
        socket.curve_server = True
        socket.zap_domain = _ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an Admission: nobody

    def call(self, socket: zmq.Socket[bytes]) -> None:
        """Have `socket` connect from now on to holders of this key only, as one."""
        socket.curve_publickey, socket.curve_secretkey = self.pair
        socket.curve_serverkey = self.pair[0]


class Admission:
    """Answers libzmq's questions about clients, for all sockets of its context that `serve`.

    `fileno()` is edge-triggered; when it is readable, `answer`. Until then new connections wait,
    which costs no thread and nothing while there are none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey) -> None:
        self._client_key = z85.decode(key.pair[0])
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ZAP_ENDPOINT)

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def answer(self) -> None:
        """All questions that are there, without waiting."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, request, _domain, _address, _id, mechanism, *credentials = (
                    self._socket.recv_multipart(zmq.NOBLOCK)
                )
                admitted = mechanism == b"CURVE" and credentials == [self._client_key]
                verdict = (b"200", b"", b"server") if admitted else (b"400", b"", b"")
                self._socket.send_multipart((version, request, *verdict, b""), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.unbind(_ZAP_ENDPOINT)  # at once, for a successor; closing takes a moment
        self._socket.close()
