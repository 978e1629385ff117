"""Which programs to add, replace, start and remove, so that what should run does.

Pure: what is wanted against what there is, to a list of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Program(NamedTuple):
    """A program as wanted: its name and its section of supervisord's configuration."""

    name: str
    definition: str


class Present(NamedTuple):
    """A program that supervisord knows. `definition` "": not what its file says any more."""

    name: str
    definition: str
    running: bool


class Step(Enum):
    REMOVE = "remove"  # stop it, forget it
    REPLACE = "replace"  # stop it, start it by its new definition
    ADD = "add"  # make it known, start it
    START = "start"  # it is known, but stopped


class Action(NamedTuple):
    step: Step
    program: Program


def plan(wanted: Iterable[Program], present: Iterable[Present]) -> Sequence[Action]:
    """What to do, in order: removals first, since they may hold what a newcomer needs."""
    wanted_by_name = {program.name: program for program in wanted}
    present_by_name: Mapping[str, Present] = {program.name: program for program in present}
    actions = [
        Action(Step.REMOVE, Program(name, found.definition))
        for name, found in sorted(present_by_name.items())
        if name not in wanted_by_name
    ]
    for name, program in wanted_by_name.items():
        found = present_by_name.get(name)
        if found is None:
            actions.append(Action(Step.ADD, program))
        elif found.definition != program.definition:
            actions.append(Action(Step.REPLACE, program))
        elif not found.running:
            actions.append(Action(Step.START, program))
    return actions
