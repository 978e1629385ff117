"""Arbitrary calls as trees of fields: any values, any order, unknown fields, and wrong ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from pinlaterd.rpc.interface import METHODS, Struct, TType, Type
from tests.rpc.thrift_bytes import (
    BOOL,
    BYTE,
    DOUBLE,
    I16,
    I32,
    I64,
    LIST,
    MAP,
    SET,
    STRING,
    STRUCT,
    Field,
)

NUMBERS = {
    BOOL: st.integers(0, 1),
    BYTE: st.integers(-128, 127),
    DOUBLE: st.floats(allow_nan=False),
    I16: st.integers(-(2**15), 2**15 - 1),
    I32: st.integers(-(2**31), 2**31 - 1),
    I64: st.integers(-(2**63), 2**63 - 1),
}
TEXT = st.text(max_size=12).map(str.encode)
BINARY = st.binary(max_size=12)
ONE_IN_TWENTY = st.integers(0, 19).map(lambda drawn: drawn == 0)


def _any_value(children: st.SearchStrategy[tuple[int, Any]]) -> st.SearchStrategy[tuple[int, Any]]:
    same_type = st.one_of(
        st.lists(BINARY, max_size=3).map(lambda values: (STRING, values)),
        st.lists(NUMBERS[I32], max_size=3).map(lambda values: (I32, values)),
        st.lists(children, max_size=3).map(
            lambda some: (STRUCT, [_unknown([one]) for one in some])
        ),
    )
    return st.one_of(
        st.tuples(st.sampled_from([LIST, SET]), same_type),
        same_type.map(lambda values: (MAP, (I32, values[0], list(enumerate(values[1]))))),
        st.lists(children, max_size=3).map(lambda some: (STRUCT, _unknown(some))),
    )


def _unknown(values: list[tuple[int, Any]]) -> list[Field]:
    return [Field(200 + number, code, value) for number, (code, value) in enumerate(values)]


SCALAR = st.one_of(
    *(st.tuples(st.just(code), values) for code, values in NUMBERS.items()),
    st.tuples(st.just(STRING), BINARY),
)
ANY_VALUE = st.recursive(SCALAR, _any_value, max_leaves=6)
UNKNOWN_FIELD = st.builds(
    lambda number, value: Field(number, *value), st.sampled_from([-1, 0, 77, 99, 300]), ANY_VALUE
)


class Shape:
    """How far the structs that are drawn may stray: in `order` or any, with `unknown` fields or
    none, and `wrong` in values and types or right."""

    def __init__(self, *, in_order: bool, unknown: bool, wrong: bool) -> None:
        self.in_order = in_order
        self.unknown = unknown
        self.wrong = wrong

    def struct(self, declared: Struct) -> st.SearchStrategy[list[Field]]:
        @st.composite
        def draw_struct(draw: st.DrawFn) -> list[Field]:
            fields = []
            for field in declared.fields:
                if field.required:
                    absent = self.wrong and draw(ONE_IN_TWENTY)
                else:
                    absent = draw(st.booleans())
                if not absent:
                    fields.append(Field(field.id, field.type.code, draw(self.value(field.type))))
                if self.wrong and draw(ONE_IN_TWENTY):
                    code, value = draw(ANY_VALUE)
                    fields.append(Field(field.id, code, value))
            if self.unknown:
                fields += draw(st.lists(UNKNOWN_FIELD, max_size=2))
            return fields if self.in_order else draw(st.permutations(fields))

        return draw_struct()

    def value(self, declared: Type) -> st.SearchStrategy[Any]:
        if declared.struct is not None:
            return st.deferred(lambda: self.struct(declared.struct))  # type: ignore[arg-type]
        if declared.code == TType.LIST:
            assert declared.element is not None
            elements = self.value(declared.element)
            # Equal neighbours are what the fast readers count on.
            repeated = st.builds(lambda one, times: [one] * times, elements, st.integers(0, 4))
            lists = st.one_of(st.lists(elements, max_size=4), repeated)
            code = declared.element.code
            return lists.map(lambda values: (code, values))
        if declared.enum is not None:
            return NUMBERS[I32] if self.wrong else st.integers(0, 3)
        if declared.code == TType.STRING:
            return BINARY if self.wrong or declared.binary else TEXT
        return NUMBERS[declared.code]


def calls(methods: list[Any], shape: Shape) -> st.SearchStrategy[tuple[str, list[Field]]]:
    return st.sampled_from(methods).flatmap(
        lambda method: shape.struct(METHODS[method].arguments).map(
            lambda fields: (method.value, fields)
        )
    )
