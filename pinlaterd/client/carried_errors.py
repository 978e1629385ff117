"""Exceptions on their way from one process to another, whatever they hold.

Retry policies and hooks go by an exception's class, so that comes along if anything does. What a
constructor would make of it again does not matter: state is taken along, where it can be pickled.
"""

from __future__ import annotations

import contextlib
import pickle
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


class RemoteTraceback(Exception):
    """The cause of an exception that came from another process: where it was raised there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


@dataclass(frozen=True, slots=True)
class CarriedError:
    """An exception as bytes, and what can be said of it without its class."""

    pickled: bytes
    traceback_text: str

    @classmethod
    def of(cls, error: BaseException) -> CarriedError:
        text = "".join(traceback.format_exception(error))
        for candidate in _candidates(error):
            with contextlib.suppress(Exception):  # a stranger's class may do anything when pickled
                pickled = pickle.dumps(candidate)
                _unpickled(pickled)
                return cls(pickled, text)
        raise AssertionError("unreachable: the last candidate is of the standard library")

    def restored(self) -> BaseException:
        """The exception, with a RemoteTraceback as its cause."""
        try:
            error = _unpickled(self.pickled)
        except Exception as unknown:  # noqa: BLE001 - its module can't be imported here
            error = RuntimeError(f"an error whose class is unknown in this process: {unknown}")
        error.__cause__ = RemoteTraceback(self.traceback_text)
        return error


@dataclass(frozen=True, slots=True)
class _Parts:
    """An exception that its own constructor can't make again."""

    kind: type[BaseException]
    arguments: tuple[object, ...]
    state: Mapping[str, object]


def _candidates(error: BaseException) -> Iterator[object]:
    """What to send for `error`, the best first."""
    yield error
    yield _Parts(type(error), error.args, vars(error))
    state = {name: value for name, value in vars(error).items() if _can_be_pickled(value)}
    for kind in type(error).__mro__:
        if issubclass(kind, BaseException):
            yield _Parts(kind, (_message(error),), state)


def _unpickled(pickled: bytes) -> BaseException:
    found = pickle.loads(pickled)  # noqa: S301 - made by this program, in this process or a child
    if isinstance(found, _Parts):
        error = found.kind.__new__(found.kind, *found.arguments)
        error.args = found.arguments
        error.__dict__.update(found.state)
        return error
    if not isinstance(found, BaseException):
        raise TypeError(f"pickled as an exception, it came back as {type(found).__name__}")
    return found


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - a stranger's class
        return False
    return True


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a stranger's code
        return ""
