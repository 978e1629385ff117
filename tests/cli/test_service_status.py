"""What of the coordinator's problems concerns a command that has edited a file."""

from __future__ import annotations

import click
import pytest

from pinlaterd.cli.service_status import ConfigProblem, tell, what_concerns
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.reload import Holding, advance

MISTAKE = ConfigProblem(
    "etc/queues.yaml: the file is gone or empty; what it said stays active. Put it back"
)


def refused_removals(*names: str) -> list[ConfigProblem]:
    """As the coordinator says them of shards that hold jobs, or do not serve."""
    shards = {name: ShardSettings(name) for name in ("1", *names)}
    before = Config(ServerSettings(), shards, {}, (), ())
    wanted = Config(ServerSettings(), {"1": shards["1"]}, {}, (), ())
    holding = {name: Holding(1, pending=1, in_progress=0) for name in names[:1]}
    found = advance(ActiveConfig(1, before), wanted, {}, holding.get).refusals
    return [ConfigProblem(text, name) for name, text in found.items()]


@pytest.fixture
def command():
    with click.Context(click.Command("pinlater-admin")):
        yield


def test_a_refused_removal_concerns_the_command_that_removes_that_shard_alone():
    four, five, six_one = refused_removals("4", "5", "6.1")

    assert what_concerns(None, [four, five, six_one]) == []
    assert what_concerns("5", [four, five, six_one]) == [five]
    assert what_concerns("6.1", [four, five, six_one]) == [six_one]
    assert what_concerns("6", [four, five, six_one]) == []


def test_a_mistake_in_the_files_concerns_all():
    [four] = refused_removals("4")

    assert what_concerns(None, [MISTAKE, four]) == [MISTAKE]
    assert what_concerns("4", [MISTAKE, four]) == [MISTAKE, four]


def test_what_concerns_others_is_a_warning(command, capsys):
    [four] = refused_removals("4")

    assert tell("queue mail is paused", [four], was_changed=True)

    assert capsys.readouterr().err == f"warning: {four.text}\nqueue mail is paused\n"


def test_what_concerns_all_ends_the_command(command, capsys):
    with pytest.raises(SystemExit) as ended:
        tell("queue mail is paused", [MISTAKE], was_changed=True)

    assert ended.value.code == 1
    assert capsys.readouterr().err == f"pinlater-admin: {MISTAKE.text}\n"


def test_without_a_coordinator_nothing_acts_yet(command, capsys):
    assert not tell("queue mail is paused", None, was_changed=True)

    assert "acts when the coordinator is back" in capsys.readouterr().err
