"""A deployment's folders, and its locks between real processes."""

import multiprocessing
import signal
import stat
from pathlib import Path

import pytest

from pinlaterd.config import layout
from pinlaterd.config.layout import lock

_processes = multiprocessing.get_context("spawn")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.lock"


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


def test_a_deployment_that_was_only_checked_out_gets_its_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deployment" / "etc").mkdir(parents=True)

    etc = layout.enter(tmp_path / "deployment" / "etc")

    assert Path.cwd() == tmp_path / "deployment"
    assert etc == Path("etc")
    for folder in (layout.RUN, layout.DATA):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
