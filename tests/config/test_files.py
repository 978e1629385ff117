"""Locks of a deployment, between real processes."""

import multiprocessing
import signal

import pytest

from pinlaterd.config.files import lock

_processes = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.lock"


def test_a_lock_is_had_once(path):
    with lock(path, patient=False), pytest.raises(BlockingIOError):
        lock(path, patient=False)

    with lock(path, patient=False):
        pass


def test_it_is_free_once_its_holder_was_killed(path):
    told, tell = _processes.Pipe()
    holder = _processes.Process(target=hold, args=(path, tell))
    holder.start()
    told.recv()
    with pytest.raises(BlockingIOError):
        lock(path, patient=False)

    holder.kill()
    holder.join()

    lock(path, patient=False).close()


def hold(path, tell):
    with lock(path, patient=True):
        tell.send("locked")
        signal.pause()


def test_a_file_that_cannot_be_had_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        lock(tmp_path / "nowhere" / "some.lock", patient=False)
