"""When files in etc/ count as changed."""

from __future__ import annotations

import os
import shutil

import pytest

from pinlaterd.coordinator.reload import ConfigWatch


@pytest.fixture
def etc(tmp_path):
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "shards.yaml").write_text("one")
    return folder


@pytest.fixture
def watch(etc):
    made = ConfigWatch(etc)
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


def test_a_file_that_is_gone(etc, watch):
    (etc / "shards.yaml").unlink()

    assert watch.look() is None
    found = watch.look()
    assert found is not None
    with pytest.raises(FileNotFoundError):
        found.read(etc / "shards.yaml")


def test_what_is_read_is_what_was_there_then(etc, watch):
    replace(etc / "shards.yaml", "two")
    watch.look()
    found = watch.look()
    assert found is not None
    replace(etc / "shards.yaml", "three")

    assert found.read(etc / "shards.yaml") == b"two"
