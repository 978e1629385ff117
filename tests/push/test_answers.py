"""Answers of downstreams, however they are framed and however their bytes come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.push.downstream import MOST_ANSWER_BYTES, AnswerReader, BadAnswer, HttpAnswer

_OK = b"HTTP/1.1 200 OK\r\n"
_CHUNKED = _OK + b"Transfer-Encoding: chunked\r\n\r\n"
_WHOLE = {
    b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\n{}": HttpAnswer(202, b"{}", True),
    b"HTTP/1.1 202\r\ncontent-length: 0\r\n\r\n": HttpAnswer(202, b"", True),
    b"HTTP/1.1 204 No Content\r\n\r\n": HttpAnswer(204, b"", True),
    _OK + b"Content-Length: 4\r\nConnection: close\r\n\r\nnull": HttpAnswer(200, b"null", False),
    b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}": HttpAnswer(200, b"{}", False),
    b"HTTP/1.1 100 Continue\r\n\r\n" + _OK + b"Content-Length: 0\r\n\r\n": HttpAnswer(
        200, b"", True
    ),
    _CHUNKED + b"3;x=y\r\nabc\r\n0a\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\n": HttpAnswer(
        200, b"abc0123456789", True
    ),
}


def read(*parts: bytes) -> HttpAnswer | None:
    reader = AnswerReader()
    for part in parts[:-1]:
        assert reader.feed(part) is None
    return reader.feed(parts[-1])


@given(st.sampled_from(sorted(_WHOLE)), st.data())
def test_an_answer_is_the_same_in_any_parts(message: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(message) - 1))
    other = data.draw(st.integers(cut, len(message) - 1))

    assert read(message[:cut], message[cut:other], message[other:]) == _WHOLE[message]
    assert read(*(message[at : at + 1] for at in range(len(message)))) == _WHOLE[message]


def test_a_body_without_a_length_ends_with_its_connection() -> None:
    reader = AnswerReader()

    assert reader.feed(_OK + b"\r\n{") is None
    assert reader.feed(b"}") is None
    assert reader.end() == HttpAnswer(200, b"{}", False)


def test_what_nobody_asked_for_ends_the_connection() -> None:
    assert read(_OK + b"Content-Length: 0\r\n\r\nHTTP/1.1 200") == HttpAnswer(200, b"", False)


@pytest.mark.parametrize(
    "head",
    [
        _OK + b"Content-Length: %d\r\n\r\n" % (MOST_ANSWER_BYTES + 1),
        _CHUNKED + b"7fffffff\r\n" + bytes(MOST_ANSWER_BYTES + 1),
    ],
)
def test_a_body_that_is_too_long_is_not_read(head: bytes) -> None:
    assert read(head) == HttpAnswer(200, None, False)


@pytest.mark.parametrize(
    "message",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        _OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        _OK + b"Content-Length: -1\r\n\r\n",
        _OK + b"Content-Length: %s\r\n\r\n" % (b"9" * 4000),
        _OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        _OK + b"Transfer-Encoding: gzip\r\n\r\n",
        _CHUNKED + b"xyz\r\n",
        _CHUNKED + b"1\r\nabc",
        _CHUNKED + b"0\r\n" + b"X-Trailer: 1\r\n" * 50_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 50_000,
    ],
)
def test_what_is_no_answer_is_found_out(message: bytes) -> None:
    with pytest.raises(BadAnswer):
        read(message)


@pytest.mark.parametrize("message", [b"", _OK, _OK + b"Content-Length: 2\r\n\r\n{", _CHUNKED])
def test_an_answer_that_is_cut_short_is_none(message: bytes) -> None:
    reader = AnswerReader()
    assert reader.feed(message) is None

    with pytest.raises(BadAnswer):
        reader.end()
