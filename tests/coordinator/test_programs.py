"""Which processes a changed configuration makes a difference to, and what is done about it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from supervisor.options import ServerOptions, UnhosedConfigParser

import pinlaterd
from pinlaterd.config import layout
from pinlaterd.config.active import activate, read_active
from pinlaterd.config.load import load_config
from pinlaterd.coordinator.programs import (
    Program,
    ProgramInfo,
    ProgramStep,
    changed_programs,
    plan,
    wanted_programs,
)

SHARDS = (
    "shards: {1: {}, 2: {engine: mysql, master: {host: h, port: 1}, user: h, passwd: sesame}}\n"
)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "etc").mkdir()

    def load(shards=SHARDS, server="", queues=""):
        for name, text in (("shards", shards), ("pinlaterd", server), ("queues", queues)):
            (tmp_path / "etc" / f"{name}.yaml").write_text(text)
        return load_config(tmp_path / "etc")

    return load


def changed(before, after):
    """Names of programs whose definitions differ."""
    return {one.name for one in {*wanted_programs(before)} ^ {*wanted_programs(after)}}


def test_the_same_configuration_read_from_elsewhere_changes_none(load):
    config = load()
    activate(config)
    found = read_active()

    assert found is not None
    assert changed(config, found.config) == set()


def test_what_acts_at_once_changes_none(load):
    after = load(
        SHARDS.replace("{}", "{dequeue_only: true, server: jobs-1}"),
        "log_level: debug\n",
        "queues: {mail: {job_failed_ttl_hours: 1}}\n",
    )

    assert changed(load(), after) == set()


@pytest.mark.parametrize("edit", [("host: h", "host: i"), ("passwd: sesame", "passwd: y")])
def test_a_shard_of_other_settings_is_started_anew(load, edit):
    after = load(SHARDS.replace(*edit))

    assert changed(load(), after) == {"shard-2"}
    assert changed_programs(load(), after) == {"shard-2"}


def test_settings_of_all_concern_all(load):
    after = load(server="num_priority_levels: 4\n")

    assert changed(load(), after) == {"coordinator", "router", "http", "web", "shard-1", "shard-2"}


def test_definitions_hold_no_secrets(load):
    text = "".join(program.definition for program in wanted_programs(load()))

    assert "sesame" not in text


# What supervisor takes for an expansion, a comment, an escape, or the end of a text.
@pytest.mark.parametrize("folder", ["a #2 ;b %s [c] 'd'", 'C:\\new "x"\t#1 %(here)s', "\\", "é"])
def test_python_and_package_may_lie_in_folders_of_any_name(load, monkeypatch, folder):
    config = load()
    monkeypatch.setattr(sys, "executable", f"/{folder}/bin/python")
    monkeypatch.setattr(pinlaterd, "__file__", f"/{folder}/pinlaterd/__init__.py")
    layout.LOGS.mkdir()
    layout.SHARD_PROGRAMS.mkdir()
    parser, options = UnhosedConfigParser(), ServerOptions()
    options.here = str(layout.SHARD_PROGRAMS)

    for program in wanted_programs(config):
        parser.read_string(program.definition)
        section = f"program:{program.name}"
        [read] = options.processes_from_section(parser, section, program.name)

        assert shlex.split(read.command)[:4] == [sys.executable, "-P", "-m", "pinlaterd"]
        assert Path(read.environment["PYTHONPATH"]) == Path(f"/{folder}")
        assert read.environment["PINLATERD_PROGRAM"] == program.name


# --- plan -----------------------------------------------------------------------------------

names = st.sampled_from(["coordinator", "router", "shard-1", "shard-2"])
definitions = st.sampled_from(["old", "new"])
wanted_definitions = st.dictionaries(names, definitions)
present_programs = st.dictionaries(
    names, st.tuples(definitions | st.just(""), st.sampled_from(["RUNNING", "EXITED"]))
)


def test_each_kind_of_difference():
    wanted = [Program(name, "now") for name in ("new", "same", "changed", "stopped")]
    present = [
        ProgramInfo("same", "RUNNING", definition="now"),
        ProgramInfo("changed", "RUNNING", definition="before"),
        ProgramInfo("stopped", "STOPPED", definition="now"),
        ProgramInfo("old", "RUNNING", definition="before"),
    ]

    steps = [(action.step, action.program.name) for action in plan(wanted, present)]

    assert steps == [
        (ProgramStep.REMOVE, "old"),
        (ProgramStep.ADD, "new"),
        (ProgramStep.REPLACE, "changed"),
        (ProgramStep.START, "stopped"),
    ]


@given(wanted_definitions, present_programs)
def test_carried_out_it_leaves_nothing_to_do(wanted, present):
    programs = [Program(name, definition) for name, definition in wanted.items()]
    there = {
        name: ProgramInfo(name, state, definition=definition)
        for name, (definition, state) in present.items()
    }

    for step, program in plan(programs, there.values()):
        if step is ProgramStep.REMOVE:
            del there[program.name]
        else:
            there[program.name] = ProgramInfo(
                program.name, "STARTING", definition=program.definition
            )

    assert {name: found.definition for name, found in there.items()} == wanted
    assert plan(programs, there.values()) == []
