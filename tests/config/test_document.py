"""Whatever is in a file, reading it ends in a document or a DocumentError."""

from __future__ import annotations

import json
import math

from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.config.document import DocumentError, ValueNode, parse
from pinlaterd.config.edit_text import plain

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


@given(json_values, st.sampled_from([None, 2, "\t"]))
def test_json_is_read_as_json_reads_it(value, indent):
    text = json.dumps(value, indent=indent)

    node = parse(text.encode())

    assert node is not None
    assert plain(node) == json.loads(text)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_hostile_bytes_are_a_document_or_an_error(data):
    try:
        node = parse(data)
    except DocumentError as error:
        assert error.line >= 1  # noqa: PT017
    else:
        assert node is None or isinstance(node, ValueNode)


def test_scalars_of_yaml_mean_what_people_mean():
    node = parse(b"[1_000, 1e3, 1.5, on, ~, 1:30, 1:30.5, 2026-01-01, 0x1F, 'x', -.inf, .nan, =]")

    assert node is not None
    values = plain(node)
    assert isinstance(values, list)
    assert math.isnan(values.pop(-2))
    assert values[:5] == [1000, "1e3", 1.5, True, None]
    assert values[5:] == ["1:30", "1:30.5", "2026-01-01", "0x1F", "x", -math.inf, "="]
