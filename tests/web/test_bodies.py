"""Bodies as pages show them: as they were written, with all that is hostile made visible."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from pinlaterd.web.bodies import MOST_JSON_BYTES, MOST_JSON_DEPTH, redact, view_of, visible


def json_text(body: bytes) -> str:
    view = view_of(body)
    assert view.form == "json"
    return "\n".join(line.indent + line.key + line.rest for line in view.json)


@pytest.mark.parametrize(
    "value",
    [
        "12345678901234567890",
        "1.0",
        "1e400",
        "-0",
        "0.10",
        r'"\u00e9"',
        '"é"',
        r'"\u202e"',
        '"\\""',
    ],
)
def test_json_keeps_values_as_they_are_written(value):
    assert json_text(f'{{"a":{value}}}'.encode()) == f'{{\n  "a": {value}\n}}'


def test_json_keeps_the_order_of_keys_and_those_that_occur_twice():
    shown = json_text(b'{"b":1,"a":{"b: x":[]},"b":2}')

    assert shown == '{\n  "b": 1,\n  "a": {\n    "b: x": []\n  },\n  "b": 2\n}'


def test_a_text_with_quotes_and_colons_is_no_key():
    view = view_of(rb'["\": 1", {"a\"b": ": "}]')

    assert [line.key for line in view.json] == ["", "", "", r'"a\"b": ', "", ""]


@pytest.mark.parametrize("body", [b"NaN", b"{'a':1}", b"[1,]", b"", b"plain", b'{"a":01}'])
def test_text_that_is_no_json_is_text(body):
    assert view_of(body).form == "text"


@pytest.mark.parametrize(("depth", "form"), [(MOST_JSON_DEPTH, "json"), (100_000, "text")])
def test_deep_json_is_text(depth, form):
    assert view_of(b"[" * depth + b"1" + b"]" * depth).form == form


def test_deep_json_with_many_values_takes_no_more_room_than_others():
    body = b"[" * 500 + b"1," * 60_000 + b"1" + b"]" * 500
    tracemalloc.start()
    try:
        view = view_of(body)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert view.form == "text"
    assert most_bytes < 10 * len(body)


def test_brackets_in_texts_are_no_depth():
    assert view_of(b'["\\"[[", {"' + b"[" * 100 + b'": "]"}]').form == "json"


@pytest.mark.parametrize(
    ("size", "form"), [(MOST_JSON_BYTES, "json"), (MOST_JSON_BYTES + 1, "text")]
)
def test_large_json_is_text(size, form):
    assert view_of(b'"' + b"x" * (size - 2) + b'"').form == form


def test_bytes_are_shown_in_hexadecimal_page_by_page():
    body = bytes(range(256)) * 20

    view = view_of(body, at=4100)

    assert (view.form, view.possible) == ("hex", ["hex"])
    assert (view.at, view.end) == (4096, 5120)
    assert view.rows[4] == (
        "00001040",
        "40 41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f",
        "@ABCDEFGHIJKLMNO",
    )


def test_the_form_that_is_wanted_is_shown_if_the_body_has_it():
    assert view_of(b"{}", "hex").form == "hex"
    assert view_of(b"\xff", "json").form == "hex"


def test_a_part_of_a_long_text_ends_between_characters():
    view = view_of("é".encode() * 600_000)

    assert (view.form, view.end, view.size) == ("text", 262_144, 1_200_000)
    assert set(view.text) == {"é"}


@pytest.mark.parametrize(
    ("hidden", "shown"),
    [
        ("\x00", r"\u0000"),
        ("\x1b[31m", r"\u001b[31m"),
        ("\x7f\x85", r"\u007f\u0085"),
        ("a\u202eb", r"a\u202eb"),
        ("a\u200b\u200d\ufeffb", r"a\u200b\u200d\ufeffb"),
        ("\u2028\xa0\xad\u3164", r"\u2028\u00a0\u00ad\u3164"),
        ("\U000e0041\ue000", r"\U000e0041\ue000"),
        ("grüße, 世界 ✓\n\t", "grüße, 世界 ✓\n\t"),
        (r"\u202e", r"\u202e"),
    ],
)
def test_no_character_is_hidden(hidden, shown):
    assert re.sub("</?b[^>]*>", "", str(visible(hidden))) == shown


def test_a_hidden_character_can_be_told_from_its_number_in_the_text():
    assert visible("\u202e") != visible(r"\u202e")


def test_text_never_becomes_html():
    assert visible("<script>\u202e&") == ('&lt;script&gt;<b class="escape">\\u202e</b>&amp;')


def test_redaction_leaves_out_all_that_matches_also_between_bytes_that_are_no_text():
    assert redact(b'\xff{"card":"4111 1111"}\xfe', r"\d[\d ]+") == (
        b'\xff{"card":"[redacted]"}\xfe'
    )
    assert redact(b"4111", "") == b"4111"
