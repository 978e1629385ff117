"""Locks of a deployment, between real processes."""

import multiprocessing
import signal

import pytest

from pinlaterd.config.files import is_locked, lock

_processes = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.lock"


def test_a_lock_is_had_once(path):
    with lock(path, patient=False):
        assert is_locked(path)
        with pytest.raises(BlockingIOError):
            lock(path, patient=False)

    assert not is_locked(path)
    with lock(path, patient=False):
        pass


def test_it_is_free_once_its_holder_was_killed(path):
    told, tell = _processes.Pipe()
    holder = _processes.Process(target=hold, args=(path, tell))
    holder.start()
    told.recv()
    assert is_locked(path)

    holder.kill()
    holder.join()

    assert not is_locked(path)


def hold(path, tell):
    with lock(path, patient=True):
        tell.send("locked")
        signal.pause()


def test_who_only_looks_keeps_nobody_out(path):
    path.touch()
    told, tell = _processes.Pipe()
    looking = _processes.Process(target=look_forever, args=(path, tell))
    looking.start()
    try:
        told.recv()
        for _ in range(2_000):
            lock(path, patient=False).close()
    finally:
        looking.kill()
        looking.join()


def look_forever(path, tell):
    is_locked(path)
    tell.send("looking")
    while True:
        is_locked(path)


def test_a_file_that_cannot_be_had_is_named(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        lock(tmp_path / "nowhere" / "some.lock", patient=False)
