"""Which moves of jobs were cut short, by the files that they leave."""

import os

import pytest

from pinlaterd.admin.moving import sole_move
from pinlaterd.config.files import lock
from pinlaterd.config.layout import RUN, move_lock
from pinlaterd.coordinator.status import unfinished_moves

SHARDS = ["1", "2"]


@pytest.fixture(autouse=True)
def deployment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RUN.mkdir()


def test_a_move_that_runs_is_no_matter():
    with sole_move("2"):
        assert unfinished_moves(SHARDS) == []

    assert unfinished_moves(SHARDS) == []


def test_one_that_left_its_file_was_cut_short_whoever_has_its_pid_by_now():
    move_lock("2").write_text(f"{os.getpid()}\n")

    [warning] = unfinished_moves(SHARDS)

    assert "shard drain 2 --move" in warning


def test_one_that_has_only_made_its_file_has_not_begun():
    lock(move_lock("1"), patient=False).close()

    assert unfinished_moves(SHARDS) == []


def test_the_next_move_ends_the_warning():
    move_lock("1").write_text("1\n")

    with sole_move("1"):
        assert unfinished_moves(SHARDS) == []

    assert unfinished_moves(SHARDS) == []
