"""What is wanted against what there is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.coordinator.programs import Present, Program, Step, plan

names = st.sampled_from(["coordinator", "router", "shard-1", "shard-2"])
definitions = st.sampled_from(["old", "new"])
wanted_programs = st.dictionaries(names, definitions)
present_programs = st.dictionaries(names, st.tuples(definitions | st.just(""), st.booleans()))


def test_nothing_to_do():
    assert plan([Program("router", "a")], [Present("router", "a", running=True)]) == []


def test_each_kind_of_difference():
    wanted = [Program(name, "now") for name in ("new", "same", "changed", "stopped")]
    present = [
        Present("same", "now", running=True),
        Present("changed", "before", running=True),
        Present("stopped", "now", running=False),
        Present("old", "before", running=True),
    ]

    steps = [(action.step, action.program.name) for action in plan(wanted, present)]

    assert steps == [
        (Step.REMOVE, "old"),
        (Step.ADD, "new"),
        (Step.REPLACE, "changed"),
        (Step.START, "stopped"),
    ]


@given(wanted_programs, present_programs)
def test_carried_out_it_leaves_nothing_to_do(wanted, present):
    programs = [Program(name, definition) for name, definition in wanted.items()]
    there = {
        name: Present(name, definition, running) for name, (definition, running) in present.items()
    }

    for step, program in plan(programs, there.values()):
        if step is Step.REMOVE:
            del there[program.name]
        else:
            there[program.name] = Present(program.name, program.definition, running=True)

    assert {name: found.definition for name, found in there.items()} == wanted
    assert plan(programs, there.values()) == []
