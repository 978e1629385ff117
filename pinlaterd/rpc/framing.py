"""The bytes of one connection to Thrift messages: no I/O, no clock.

A connection keeps to one form, told by its first bytes:

    80 01 ..                   strict TBinaryProtocol without frames
    LENGTH 80 01 ..            framed, strict
    LENGTH 00 .. (or any)      framed, not strict: a message begins with the length of a name
    LENGTH 82 ..               framed TCompactProtocol, by its Transcoder

A length never begins with 80 or above: frames are at most 1 GiB. What begins otherwise is none of
these; `strangers` knows who it may be. Whatever the pieces in which bytes come, the same bytes give
the same messages and the same failure; no byte is copied or looked at more than a bounded number of
times.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final, Protocol

from pinlaterd.config.schema import MOST_FRAME_BYTES
from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.strangers import Stranger, recognize, recognize_framed, recognize_text
from pinlaterd.rpc.walk import BeyondEnd, MessageWalk

_U32: Final = struct.Struct(">I").unpack_from
_U32_BYTES: Final = struct.Struct(">I").pack
_UNFRAMED: Final = b"\x80\x01"


class Transcoder(Protocol):
    """Another of Thrift's protocols, message by message, to strict binary and back.

    Both raise ProtocolError for bytes that are no message. What is within a message keeps its
    meaning; sizes may differ.
    """

    def to_binary(self, message: bytes) -> bytes: ...

    def from_binary(self, message: bytes) -> bytes: ...


# By the first byte of a connection's first framed message.
Transcoders = Mapping[int, Transcoder]


class FrameReader:
    """Cuts what one connection sends into messages."""

    __slots__ = (
        "_buffer",
        "_decided",
        "_is_first",
        "_max_frame_bytes",
        "_missing",
        "_transcoders",
        "_walk",
        "failure",
        "farewell",
        "framed",
        "transcoder",
        "unfinished",
    )

    def __init__(self, max_frame_bytes: int, transcoders: Transcoders) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._transcoders = transcoders
        self._decided = False
        self._is_first = True
        self._buffer = bytearray()  # an unfinished message, or an unfinished length
        self._missing = 0  # bytes of the framed message in `_buffer` that have yet to come
        self._walk: MessageWalk | None = None  # through the unframed message in `_buffer`
        self.unfinished = False  # whether a part of a message, or of a length, is here
        self.framed = True
        self.transcoder: Transcoder | None = None
        self.failure: ProtocolError | None = None
        self.farewell = b""  # what to tell a client that speaks another protocol

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
            return max(1, self._walk.at - len(self._buffer))
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
        self._refuse(recognize(start))
        self.framed = not start.startswith(_UNFRAMED)
        if self.framed and start[0] >= 0x80:
            raise ProtocolError(
                f"no Thrift protocol that is spoken here (it begins {start.hex(' ')})"
            )
        if self._buffer:
            data = bytes(self._buffer) + data
            self._buffer = bytearray()
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
            (length,) = _U32(data, at)
            if not 0 < length <= max_bytes:
                raise ProtocolError(self._bad_length(length))
            begin = at + 4
            at = begin + length
            if at > end:
                self._buffer = bytearray(data[begin:])
                self._missing = at - end
                return
            message = data[begin:at]
            if self._is_first or self.transcoder is not None:
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
            self._refuse(recognize_framed(message))
            self.transcoder = self._transcoders.get(message[0])
        return message if self.transcoder is None else self.transcoder.to_binary(message)

    def _cut_unframed(self, data: bytes, messages: list[bytes]) -> None:
        buffer: bytes | bytearray = data
        if self._buffer:
            self._buffer += data
            buffer = self._buffer
        walk = self._walk or MessageWalk(0, self._max_frame_bytes)
        begin = 0
        while True:
            end = walk.end(buffer)
            if end is None:
                break
            messages.append(bytes(buffer[begin:end]))
            begin = end
            if begin == len(buffer):
                self._buffer, self._walk = bytearray(), None
                return
            walk = MessageWalk(begin, self._max_frame_bytes)
        # What is left is walked anew if it moved: at most once for each message.
        self._walk = walk if begin == 0 else MessageWalk(0, self._max_frame_bytes)
        if begin or not self._buffer:
            self._buffer = bytearray(buffer[begin:])

    def _refuse(self, stranger: Stranger | None) -> None:
        if stranger is not None:
            self.farewell = stranger.answer
            raise ProtocolError(stranger.mistake)

    def _bad_length(self, length: int) -> str:
        if length == 0:
            return "a frame of length 0; a frame holds one message"
        start = _U32_BYTES(length)
        if self._is_first:
            self._refuse(recognize_text(start))
        return f"a frame of {length} bytes (it begins {start.hex(' ')}); {self._cure(length)}"

    def _cure(self, wanted_bytes: int) -> str:
        """What to do about a message of so many bytes."""
        cure = f"max_frame_bytes is {self._max_frame_bytes}: send fewer jobs a call"
        if wanted_bytes > MOST_FRAME_BYTES:
            return cure
        return f"{cure}, or raise it in etc/pinlaterd.yaml"
