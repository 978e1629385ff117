"""When files in etc/ count as changed, and what should be active next."""

from __future__ import annotations

import os
import shutil
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.layout import CONFIG_FILES, ConfigFiles, FileWatch
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.reload import HeldJobs, Leaving, advance

VERSION = 7


def config(*names, dequeue_only=(), abandon=(), server=None, files=()):
    shards = {name: ShardSettings(name, dequeue_only=name in dequeue_only) for name in names}
    return Config(server or ServerSettings(), shards, {}, tuple(abandon), tuple(files))


def step(before, wanted, leaving=None, holding=None):
    return advance(ActiveConfig(VERSION, before), wanted, leaving or {}, lambda _name: holding)


def test_new_shards_and_changed_settings_act_at_once():
    found = step(config("1"), config("1", "2", dequeue_only=["1"]))

    assert found.config == config("1", "2", dequeue_only=["1"])
    assert found.converged


def test_a_removed_shard_gets_no_jobs_first():
    found = step(config("1", "2"), config("1"), holding=HeldJobs(VERSION, 0, 0))

    assert found.config == config("1", "2", dequeue_only=["2"])
    assert found.leaving == {"2": Leaving(ShardSettings("2"), VERSION + 1)}
    assert not found.converged


def test_it_goes_once_it_said_after_that_that_it_is_empty():
    leaving = {"2": Leaving(ShardSettings("2"), VERSION)}
    before = config("1", "2", dequeue_only=["2"])

    not_yet = step(before, config("1"), leaving, HeldJobs(VERSION - 1, 0, 0))
    assert not_yet.config == before

    found = step(before, config("1"), leaving, HeldJobs(VERSION, 0, 0))
    assert found.config == config("1")
    assert found.converged


def test_one_that_was_dequeue_only_before_goes_at_once():
    before = config("1", "2", dequeue_only=["2"])

    assert step(before, config("1"), holding=HeldJobs(VERSION, 0, 0)).config == config("1")


def test_one_that_got_a_job_meanwhile_is_as_before():
    leaving = {"2": Leaving(ShardSettings("2"), VERSION)}

    found = step(
        config("1", "2", dequeue_only=["2"]), config("1"), leaving, HeldJobs(VERSION, 1, 0)
    )

    assert found.config == config("1", "2")
    assert found.leaving == {}
    assert "1 job is pending and 0 in progress" in found.refusals["2"]


def test_one_that_does_not_serve_stays():
    found = step(config("1", "2"), config("1"))

    assert found.config == config("1", "2")
    assert "shards.2: not removed: it does not serve" in found.refusals["2"]


names = st.sets(st.sampled_from(["1", "2", "3", "4"]), min_size=1)
holdings = st.none() | st.builds(
    HeldJobs, st.integers(VERSION - 1, VERSION + 1), st.integers(0, 1), st.integers(0, 1)
)


@given(names, names, names, st.dictionaries(st.sampled_from("1234"), holdings))
def test_no_shard_with_jobs_ever_goes_unless_abandoned(there, wanted, abandoned, holds):
    target = config(*wanted, abandon=abandoned - wanted)

    found = advance(ActiveConfig(VERSION, config(*there)), target, {}, holds.get)

    assert wanted <= found.config.shards.keys()
    is_empty_for_good = HeldJobs(VERSION + 1, 0, 0)  # said after enqueues there had ended
    for name in there - found.config.shards.keys():
        assert name in abandoned or holds.get(name) == is_empty_for_good


# --- the files --------------------------------------------------------------------------------


@pytest.fixture
def etc(tmp_path):
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "shards.yaml").write_text("one")
    return folder


@pytest.fixture
def watch(etc):
    made = FileWatch([etc / name for name in CONFIG_FILES], partial(ConfigFiles, etc))
    assert made.look() is None
    assert made.look() is not None  # what it finds first
    assert made.look() is None
    return made


def replace(path, text):
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


def swap_link(path, text):
    target = path.with_suffix(".target")
    target.write_text(text)
    beside = path.with_suffix(".link")
    beside.symlink_to(target)
    beside.replace(path)


def put_back(path, text):
    path.unlink()
    path.write_text(text)


def same_length_and_time(path, _text):
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [replace, swap_link, put_back, same_length_and_time])
def test_each_kind_of_change_counts_once(etc, watch, change):
    path = etc / "shards.yaml"
    change(path, "two")

    assert watch.look() is None  # it may be written still
    found = watch.look()
    assert found is not None
    assert found.read(path) == b"two"
    assert watch.look() is None


def test_a_file_that_is_being_written_waits(etc, watch):
    path = etc / "shards.yaml"
    with path.open("w") as file:
        for part in ("a", "b", "c"):
            file.write(part)
            file.flush()
            assert watch.look() is None
    found = watch.look()
    assert found is not None
    assert found.read(path) == b"abc"


def test_a_folder_that_is_replaced(etc, watch, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(etc, other)
    (other / "queues.yaml").write_text("queues: {}")
    etc.rename(tmp_path / "old")
    other.rename(etc)

    assert watch.look() is None
    found = watch.look()
    assert found is not None
    assert found.read(etc / "queues.yaml") == b"queues: {}"


def test_what_is_read_is_what_was_there_then(etc, watch):
    replace(etc / "shards.yaml", "two")
    watch.look()
    found = watch.look()
    assert found is not None
    replace(etc / "shards.yaml", "three")

    assert found.read(etc / "shards.yaml") == b"two"
