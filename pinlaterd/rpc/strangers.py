"""What else may come to an open port: told by its first bytes, named, and, where its protocol lets
a server say so at once, answered in its own language.

A client of MySQL sends nothing to be told by: it waits for the server to speak first. `SILENT` is
for who goes after having waited. Pure; standard library
only.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_THIS: Final = "this is pinlaterd's Thrift port"
_HTTP_TEXT: Final = (
    f"{_THIS}; it does not speak HTTP.\n"
    "Statistics and health are on stats_port (9999 if etc/pinlaterd.yaml says nothing else).\n"
)
_HTTP_ANSWER: Final = (
    "HTTP/1.1 400 Bad Request\r\n"
    "Content-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(_HTTP_TEXT)}\r\n"
    "Connection: close\r\n"
    "\r\n"
    f"{_HTTP_TEXT}"
).encode()
_REDIS_ANSWER: Final = f"-ERR {_THIS}, not a Redis server\r\n".encode()


class Stranger(NamedTuple):
    """`mistake` is for the log: what came, and what the likely cure is. `answer` goes to the
    client as it stands; if empty, the connection is closed without a word."""

    mistake: str
    answer: bytes = b""


_HTTP: Final = Stranger(f"HTTP; {_THIS}, statistics are on stats_port", _HTTP_ANSWER)
_HTTP2: Final = Stranger(f"HTTP/2, as gRPC speaks it; {_THIS}", _HTTP_ANSWER)
_TLS: Final = Stranger(f"TLS; {_THIS}, which is not encrypted: switch TLS off in the client")
_SSH: Final = Stranger(f"SSH; {_THIS}")
_REDIS: Final = Stranger(f"a Redis client; {_THIS}", _REDIS_ANSWER)
_PROXY: Final = Stranger(
    "the PROXY protocol, which is not spoken here; switch it off in the load balancer"
)
_JSON: Final = Stranger("TJSONProtocol; set the client to TBinaryProtocol or TCompactProtocol")
_UNFRAMED_COMPACT: Final = Stranger(
    "TCompactProtocol without frames; set the client to framed transport (TFramedTransport)"
)
_UNFRAMED_LOOSE: Final = Stranger(
    "TBinaryProtocol without frames, not strict; set the client to framed transport "
    "(TFramedTransport)"
)
_MUX: Final = Stranger("ThriftMux; use Finagle's Thrift client (com.twitter.finagle.Thrift)")
_HEADER: Final = Stranger("THeader transport; set the client to framed transport without headers")

SILENT: Final = f"a MySQL client waits like this for a greeting; {_THIS}"

# By the first four bytes of a connection: as the length of a frame each would be above 200 MiB.
_BEGINNINGS: Final = {
    **dict.fromkeys(
        (b"GET ", b"POST", b"HEAD", b"PUT ", b"OPTI", b"DELE", b"PATC", b"CONN", b"TRAC"), _HTTP
    ),
    b"PRI ": _HTTP2,
    **{b"\x16\x03" + bytes((minor,)): _TLS for minor in range(5)},
    b"SSH-": _SSH,
    **{b"*%d" % arguments: _REDIS for arguments in range(1, 10)},
    b"PING": _REDIS,
    b"PROX": _PROXY,
    b"\r\n\r\n": _PROXY,
    b'[1,"': _JSON,
    **{b"\x82" + bytes((kind << 5 | 1,)): _UNFRAMED_COMPACT for kind in range(1, 5)},
}
# By the first bytes of a connection's first frame.
_FRAMED_BEGINNINGS: Final = {
    b"\x0f\xff": _HEADER,
    b'[1,"': _JSON,
    # Rerr and Tinit, with a tag of three bytes; the latter may be taken for a letter.
    b"\x7f\0\0": _MUX,
    b"\x44\0\0": _MUX,
}
# A message that is not strict begins with its method's name, after that one's length: without
# frames this looks like a frame that holds the name alone.
_IS_METHOD_NAME: Final = re.compile(rb"[A-Za-z_][\w.:]*").fullmatch


def recognize(start: bytes) -> Stranger | None:
    """Who begins a connection like this; `start` has four bytes."""
    return _find(_BEGINNINGS, start)


def recognize_framed(message: bytes) -> Stranger | None:
    """Who sends this as the first frame of a connection."""
    return _UNFRAMED_LOOSE if _IS_METHOD_NAME(message) else _find(_FRAMED_BEGINNINGS, message)


def recognize_text(start: bytes) -> Stranger | None:
    """Who begins a connection with these four bytes, which are no length that a frame may have."""
    text = start.decode("ascii", "replace")
    if not (text.isascii() and text.isprintable()):
        return None
    return Stranger(f"text (it begins {text!r}), no Thrift; {_THIS}")


def _find(beginnings: dict[bytes, Stranger], start: bytes) -> Stranger | None:
    for beginning, stranger in beginnings.items():
        if start.startswith(beginning):
            return stranger
    return None
