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
from pinlaterd.rpc.compact import PROTOCOL_ID
from pinlaterd.rpc.interface import PAUSE, U32, BeyondEnd, Walk, walk_message

_HEAD_BYTES: Final = 64  # hold the name of each method, and the sequence number
_UNFRAMED: Final = b"\x80\x01"

# Of messages without frames, which have to be walked, as many are taken in one go.
_UNFRAMED_SLICE_BYTES: Final = 16 * 1024

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
    """Cuts what one connection sends into messages.

    They are of TCompactProtocol if `compact`, else of TBinaryProtocol. While `paused`, more can be
    done without more bytes: `feed` it none, once others had their turn.
    """

    __slots__ = (
        "_decided",
        "_is_first",
        "_is_usual",
        "_max_frame_bytes",
        "_needed",
        "_walk",
        "buffer",
        "compact",
        "failure",
        "framed",
        "head",
        "http_answer",
        "left",
        "paused",
    )

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._decided = False
        self._is_first = True
        self._is_usual = False  # frames
        self._needed = 4  # how many bytes `buffer` must have before it is looked at again
        self._walk: Walk | None = None  # through the unframed message in `buffer`
        self.buffer = bytearray()  # an unfinished message, with its length
        self.framed = True
        self.compact = False
        self.paused = False  # within the walk through an unframed message of many values
        self.failure: ProtocolError | None = None
        self.http_answer = b""  # for a client that speaks HTTP
        self.head = b""  # the beginning of a message whose frame was too long
        self.left = 0  # of that, to be read over

    @property
    def missing(self) -> int:
        """The bytes, at least, that an unfinished message still lacks; 0: there is none."""
        return self._needed - len(self.buffer) if self.buffer else 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that `data` completes.

        Once the bytes make no sense, `failure` says why, and nothing more is read from them.
        """
        if self._is_usual and not self.buffer:
            size = len(data) - 4
            if 0 < size <= self._max_frame_bytes and U32(data, 0)[0] == size:
                return [data[4:]]  # a piece is a frame, most of the time
        messages: list[bytes] = []
        if self.failure is not None:
            self.left = max(0, self.left - len(data))
            return messages
        try:
            if not self.buffer:
                self._cut(data, messages)
            else:
                self.buffer += data
                if len(self.buffer) >= self._needed or self.paused:
                    self._cut(self.buffer, messages)
        except BeyondEnd:
            cure = self._cure(self._max_frame_bytes + 1)
            self.failure = ProtocolError(f"an unframed message is too long; {cure}")
        except ProtocolError as error:
            self.failure = error
        if self.failure is not None:
            self.buffer = bytearray()
            self._is_usual = self.paused = False
        return messages

    def _cut(self, data: bytes | bytearray, messages: list[bytes]) -> None:
        """Take whole messages, and keep what follows them."""
        if not self._decided and len(data) >= 4:
            self._decide(bytes(data[:4]))
        at, size = 0, len(data)
        while at < size:
            end = self._frame_end(data, at) if self.framed else self._unframed_end(data, at)
            self.paused = end == PAUSE
            if self.paused or end > size:
                self._needed = (end or size + 1) - at
                break
            message = bytes(data[at + 4 : end] if self.framed else data[at:end])
            if self._is_first:
                self._is_first = False
                self.compact = self.framed and message[0] == PROTOCOL_ID
                self._is_usual = self.framed
            messages.append(message)
            at = end
            if at < size and at > _UNFRAMED_SLICE_BYTES and not self.framed:
                self.paused = True
                self._needed = 4
                break
        if at or data is not self.buffer:
            self.buffer = bytearray(data[at:])
            if at:
                self._walk = None  # what is left has moved, and is walked again

    def _decide(self, start: bytes) -> None:
        """Tell the form, by the first four bytes."""
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

    def _frame_end(self, data: bytes | bytearray, at: int) -> int:
        """Find where the frame ends that begins there, or where its length does."""
        if len(data) - at < 4:
            return at + 4
        (length,) = U32(data, at)
        if not 0 < length <= self._max_frame_bytes:
            if length <= MOST_FRAME_BYTES:
                self.head = bytes(data[at + 4 : at + 4 + _HEAD_BYTES])
                self.left = max(0, length - (len(data) - at - 4))
            raise ProtocolError(self._bad_length(length, bytes(data[at : at + 4])))
        return at + 4 + int(length)

    def _unframed_end(self, data: bytes | bytearray, at: int) -> int:
        """Find where the message ends that begins there, or how far it must be there to go on."""
        try:
            if self._walk is not None and not at:
                return self._walk.send(data)
            self._walk = walk_message(data, at, self._max_frame_bytes)
            return next(self._walk)
        except StopIteration as ended:
            self._walk = None
            return int(ended.value)

    def _bad_length(self, length: int, start: bytes) -> str:
        if length == 0:
            return "a frame of length 0; a frame holds one message"
        return f"a frame of {length} bytes (it begins {start.hex(' ')}); {self._cure(length)}"

    def _cure(self, wanted_bytes: int) -> str:
        """Say what to do about a message of so many bytes."""
        cure = f"max_frame_bytes is {self._max_frame_bytes}: send fewer jobs a call"
        if wanted_bytes > MOST_FRAME_BYTES:
            return cure
        return f"{cure}, or raise it in etc/pinlaterd.yaml"
