"""The bytes of one connection to Thrift messages: no I/O, no clock.

A connection keeps to one form, told by its first bytes:

    80 01 ..                   strict TBinaryProtocol without frames
    LENGTH 80 01 ..            framed, strict
    LENGTH 00 .. (or any)      framed, not strict: a message begins with the length of a name
    LENGTH 82 ..               framed TCompactProtocol

A length never begins with 80 or above: frames are at most 1 GiB. Whatever the pieces in which bytes
come, the same bytes give the same messages and the same failure; no byte is copied or looked at
more than a bounded number of times.
"""

from __future__ import annotations

import re
from typing import Final

from pinlaterd.config.schema import MOST_FRAME_BYTES
from pinlaterd.errors import ProtocolError
from pinlaterd.rpc import compact
from pinlaterd.rpc.binary import U32, BeyondEnd, Walk, walk_message

_UNFRAMED: Final = b"\x80\x01"

# As the length of a frame each would be above 200 MiB.
_IS_HTTP: Final = re.compile(rb"GET |POST|HEAD|PUT |OPTI|DELE|PATC|CONN|TRAC|PRI ").match
_IS_TLS: Final = re.compile(rb"\x16\x03").match
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


class FrameReader:
    """Cuts what one connection sends into messages; those are of TBinaryProtocol always."""

    __slots__ = (
        "_buffer",
        "_decided",
        "_is_first",
        "_max_frame_bytes",
        "_missing",
        "_needed",
        "_walk",
        "compact",
        "failure",
        "framed",
        "http_answer",
        "unfinished",
    )

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._decided = False
        self._is_first = True
        self._buffer = bytearray()  # an unfinished message, or an unfinished length
        self._missing = 0  # bytes of the framed message in `_buffer` that have yet to come
        self._walk: Walk | None = None  # through the unframed message in `_buffer`
        self._needed = 0  # how many bytes `_buffer` must have for `_walk` to go on
        self.unfinished = False  # whether a part of a message, or of a length, is here
        self.framed = True
        self.compact = False  # whether answers have to be of TCompactProtocol
        self.failure: ProtocolError | None = None
        self.http_answer = b""  # for a client that speaks HTTP

    @property
    def buffered(self) -> int:
        """Bytes of an unfinished message."""
        return len(self._buffer)

    @property
    def missing(self) -> int:
        """How many bytes, at least, an unfinished message still lacks; 0: there is none."""
        if self._missing:
            return self._missing
        if self._walk is not None:
            return self._needed - len(self._buffer)
        return 4 - len(self._buffer) if self._buffer else 0

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes.

        Once the bytes make no sense, `failure` says why, and nothing more is read from them.
        """
        if self.failure is not None:
            return []
        messages: list[bytes] = []
        try:
            if not self._decided:
                self._begin(data, messages)
            elif self.framed and not self.unfinished:
                self._cut_frames(data, 0, messages)
            else:
                self._cut(data, messages)
        except BeyondEnd:
            cure = self._cure(self._max_frame_bytes + 1)
            self.failure = ProtocolError(f"an unframed message is too long; {cure}")
        except ProtocolError as error:
            self.failure = error
        if self.failure is not None:
            self._buffer = bytearray()
            self._missing, self._walk = 0, None
        self.unfinished = bool(self._buffer or self._missing)
        return messages

    def _begin(self, data: bytes, messages: list[bytes]) -> None:
        """Until the form is known, which takes four bytes."""
        start = bytes(self._buffer) + data[: 4 - len(self._buffer)]
        if len(start) < 4:
            self._buffer += data
            return
        self._decided = True
        if _IS_HTTP(start):
            self.http_answer = _HTTP_ANSWER
            raise ProtocolError(f"HTTP; {_THIS}, statistics are on stats_port")
        if _IS_TLS(start):
            raise ProtocolError(
                f"TLS; {_THIS}, which is not encrypted: switch TLS off in the client"
            )
        self.framed = not start.startswith(_UNFRAMED)
        if self.framed and start[0] >= 0x80:
            raise ProtocolError(
                f"no Thrift protocol that is spoken here (it begins {start.hex(' ')}); "
                "set the client to framed TBinaryProtocol or TCompactProtocol"
            )
        self._cut(data, messages)

    def _cut(self, data: bytes, messages: list[bytes]) -> None:
        if not self.framed:
            self._cut_unframed(data, messages)
        elif self._missing:
            self._continue_frame(data, messages)
        else:
            if self._buffer:
                data = bytes(self._buffer) + data
                self._buffer = bytearray()
            self._cut_frames(data, 0, messages)

    def _cut_frames(self, data: bytes, at: int, messages: list[bytes]) -> None:
        """Frames from `at` on, where a length begins."""
        end = len(data)
        max_bytes = self._max_frame_bytes
        while end - at >= 4:
            (length,) = U32(data, at)
            if not 0 < length <= max_bytes:
                raise ProtocolError(self._bad_length(length, data[at : at + 4]))
            begin = at + 4
            at = begin + length
            if at > end:
                self._buffer = bytearray(data[begin:])
                self._missing = at - end
                return
            message = data[begin:at]
            if self._is_first or self.compact:
                message = self._accept(message)
            messages.append(message)
        if at < end:
            self._buffer = bytearray(data[at:])

    def _continue_frame(self, data: bytes, messages: list[bytes]) -> None:
        """A frame that began in an earlier piece."""
        missing = self._missing
        if len(data) < missing:
            self._buffer += data
            self._missing = missing - len(data)
            return
        self._buffer += data[:missing]
        message = bytes(self._buffer)
        self._buffer = bytearray()
        self._missing = 0
        messages.append(self._accept(message))
        self._cut_frames(data, missing, messages)

    def _accept(self, message: bytes) -> bytes:
        """A framed message as strict or non-strict binary; the first one tells which protocol
        the connection speaks."""
        if self._is_first:
            self._is_first = False
            self.compact = message[0] == compact.PROTOCOL_ID
        return compact.to_binary(message, self._max_frame_bytes) if self.compact else message

    def _cut_unframed(self, data: bytes, messages: list[bytes]) -> None:
        buffer: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        begin = 0
        while begin < len(buffer):
            end = self._unframed_end(buffer, begin)
            if end is None:
                break
            messages.append(bytes(buffer[begin:end]))
            begin = end
        if begin or not self._buffer:
            self._buffer = bytearray(buffer[begin:])
        if begin and self._buffer:  # it has moved, and is walked again: once for each message
            self._walk = None
            self._unframed_end(self._buffer, 0)

    def _unframed_end(self, buffer: bytes | bytearray, begin: int) -> int | None:
        """Where the message that begins there ends; None if more bytes have to come."""
        try:
            if self._walk is None:
                self._walk = walk_message(buffer, begin, self._max_frame_bytes)
                self._needed = next(self._walk)
            else:
                self._needed = self._walk.send(buffer)
        except StopIteration as ended:
            self._walk = None
            return int(ended.value)
        return None

    def _bad_length(self, length: int, start: bytes) -> str:
        if length == 0:
            return "a frame of length 0; a frame holds one message"
        return f"a frame of {length} bytes (it begins {start.hex(' ')}); {self._cure(length)}"

    def _cure(self, wanted_bytes: int) -> str:
        """What to do about a message of so many bytes."""
        cure = f"max_frame_bytes is {self._max_frame_bytes}: send fewer jobs a call"
        if wanted_bytes > MOST_FRAME_BYTES:
            return cure
        return f"{cure}, or raise it in etc/pinlaterd.yaml"
