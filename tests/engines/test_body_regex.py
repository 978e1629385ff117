"""RE2 on bytes."""

from __future__ import annotations

import pytest

from pinlaterd.engines.searching import compile_body_regex
from pinlaterd.errors import InvalidRequest


@pytest.mark.parametrize(
    ("pattern", "body", "found"),
    [
        ("b", b"abc", True),
        ("^b", b"abc", False),
        ("", b"", True),
        ("a.c", b"a\xffc", True),
        (r"\x00\xff", b"--\x00\xff--", True),
        ("é", "café".encode(), True),
        ("é", b"caf\xe9", False),
        ("a.*z", b"a\0\n\0z", False),
        ("(?s)a.*z", b"a\0\n\0z", True),
        ("(?i)ABC", b"xabcx", True),
        (r"\d{3}", b"id=4711", True),
    ],
)
def test_a_pattern_is_searched_anywhere_byte_by_byte(pattern: str, body: bytes, found: bool):
    assert compile_body_regex(pattern)(body) is found


@pytest.mark.parametrize("pattern", ["(", "a**", "[z-a]", r"(a)\1", "(?=a)", "a{1001}", "\\"])
def test_what_re2_does_not_take_is_the_callers_mistake(pattern: str):
    with pytest.raises(InvalidRequest, match=r"^invalid request: bodyRegexToMatch"):
        compile_body_regex(pattern)


def test_a_pattern_that_would_take_too_much_memory_is_refused():
    with pytest.raises(InvalidRequest):
        compile_body_regex("((a{100}){100}){100}")


def test_a_body_that_could_take_minutes_is_refused():
    matches = compile_body_regex(".*(a|b).{900}.*(a|b).{900}" * 4)
    assert not matches(b"ab" * 1_000)
    with pytest.raises(InvalidRequest, match=r"^invalid request: .* 500,000,000 at most"):
        matches(b"ab" * 500_000)
