"""What of the coordinator's problems keeps a command's edit of a file from acting."""

from __future__ import annotations

import pytest

from pinlaterd.cli.shards import EditRefused, tell
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.reload import HeldJobs, advance

MISTAKE = "etc/queues.yaml: the file is gone or empty; what it said stays active. Put it back"


@pytest.fixture
def refusals() -> dict[str, str | None]:
    """As the coordinator says them of shards that hold jobs, or do not serve."""
    shards = {name: ShardSettings(name) for name in ("1", "4", "5", "6.1")}
    before = Config(ServerSettings(), shards, {}, (), ())
    wanted = Config(ServerSettings(), {"1": shards["1"]}, {}, (), ())
    holding = {"4": HeldJobs(1, pending=1, in_progress=0)}
    found = advance(ActiveConfig(1, before), wanted, {}, holding.get).refusals
    return {text: name for name, text in found.items()}


@pytest.mark.parametrize("removed", [None, "6"])
def test_refused_removals_of_other_shards_are_warnings(refusals, capsys, removed):
    tell("queue mail is paused", refusals, was_changed=True, removed=removed)

    *warnings, done = capsys.readouterr().err.splitlines()
    assert warnings == [f"warning: {text}" for text in refusals]
    assert done == "queue mail is paused"


@pytest.mark.parametrize("removed", ["5", "6.1"])
def test_a_refused_removal_ends_the_command_that_removes_that_shard(refusals, removed):
    with pytest.raises(EditRefused) as refused:
        tell("shard is removed", refusals, was_changed=True, removed=removed)

    [text] = [text for text, shard in refusals.items() if shard == removed]
    assert str(refused.value) == text
    assert not refused.value.mistakes


@pytest.mark.parametrize("removed", [None, "4"])
def test_a_mistake_in_the_files_ends_every_command(refusals, removed):
    with pytest.raises(EditRefused) as refused:
        tell("queue mail is paused", {**refusals, MISTAKE: None}, was_changed=True, removed=removed)

    assert MISTAKE in str(refused.value)
    assert refused.value.mistakes
