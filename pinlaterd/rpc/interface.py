"""The interface file, loaded: its structs, enums and methods as plain tables.

The file is read once, at import; nothing of it is written a second time in code. thriftpy2 is
used for its parser only: its decoders trust the lengths that a message claims and recurse as
deep as it nests, and they cannot say which field of which job is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import thriftpy2
from thriftpy2.thrift import TType as _ParserType

from pinlaterd.rpc.thrift_types import TType

INTERFACE_FILE: Final = Path(__file__).with_name("pinlater.thrift")


@dataclass(frozen=True, slots=True)
class Type:
    """A type of the interface; `name` is that of a struct or an enum."""

    code: TType
    binary: bool = False
    name: str | None = None
    key: Type | None = None  # of a map
    element: Type | None = None  # of a map (its values), a list or a set


@dataclass(frozen=True, slots=True)
class Field:
    id: int
    name: str
    type: Type
    required: bool
    default: object = None


@dataclass(frozen=True, slots=True)
class MethodType:
    """`result` has field 0, the result, unless the method is void; then what may be thrown."""

    arguments: tuple[Field, ...]
    result: tuple[Field, ...]
    oneway: bool


@dataclass(frozen=True, slots=True)
class Interface:
    """Fields are in the order of their ids, the order in which they are written."""

    structs: Mapping[str, tuple[Field, ...]]
    enums: Mapping[str, Mapping[str, int]]
    constants: Mapping[str, str]
    methods: Mapping[str, MethodType]


def load_interface(path: Path = INTERFACE_FILE) -> Interface:
    module = thriftpy2.load(str(path), module_name="pinlater_thrift")
    meta = module.__thrift_meta__
    service = module.PinLater
    return Interface(
        structs={
            struct.__name__: _fields(struct) for struct in (*meta["structs"], *meta["exceptions"])
        },
        enums={enum.__name__: dict(vars(enum)["_NAMES_TO_VALUES"]) for enum in meta["enums"]},
        constants=_text_constants(module),
        methods={name: _method(service, name) for name in service.thrift_services},
    )


def _text_constants(module: ModuleType) -> dict[str, str]:
    return {
        name: value
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }


def _method(service: Any, name: str) -> MethodType:
    result = getattr(service, f"{name}_result")
    return MethodType(
        arguments=_fields(getattr(service, f"{name}_args")),
        result=_fields(result),
        oneway=result.oneway,
    )


def _fields(struct: Any) -> tuple[Field, ...]:
    defaults = dict(struct.default_spec)
    fields = []
    for number, (code, name, *detail, required) in sorted(struct.thrift_spec.items()):
        spec = (code, detail[0]) if detail else code
        fields.append(Field(number, name, _type(spec), required, defaults.get(name)))
    return tuple(fields)


def _type(spec: Any) -> Type:
    """thriftpy2 writes a type as its code, or as (code, what it is made of)."""
    code, detail = spec if isinstance(spec, tuple) else (spec, None)
    if code == _ParserType.BINARY:
        return Type(TType.STRING, binary=True)
    if code == TType.MAP:
        key, value = detail
        return Type(TType.MAP, key=_type(key), element=_type(value))
    if code in (TType.LIST, TType.SET):
        return Type(TType(code), element=_type(detail))
    if detail is not None:
        return Type(TType(code), name=detail.__name__)
    return Type(TType(code))


INTERFACE: Final = load_interface()
