"""A deployment's folders, and its locks between real processes."""

import multiprocessing
import os
import re
import shlex
import signal
import stat
import subprocess
from pathlib import Path

import pytest

from pinlaterd.config import layout
from pinlaterd.config.layout import lock
from pinlaterd.errors import DeploymentError

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


FOLDERS = (".", "etc", "run", "run/log", "run/supervisord.d", "data")
CHECKED = (*FOLDERS, "etc/supervisord.conf", "etc/proxy.py", "etc/pinlaterd.yaml")


@pytest.fixture
def deployment(tmp_path):
    folder = tmp_path / "my deployment"
    for name in ("etc", "run/log", "run/supervisord.d", "data"):
        (folder / name).mkdir(parents=True)
    for name in CHECKED[len(FOLDERS) :]:
        (folder / name).touch()
        (folder / name).chmod(0o644)
    layout.check_folders(folder)
    return folder


def refusals(folder):
    with pytest.raises(DeploymentError) as refused:
        layout.check_folders(folder)
    return str(refused.value).splitlines()


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("right", [stat.S_IWGRP, stat.S_IWOTH | stat.S_ISVTX])
def test_what_others_may_write_to_is_refused_until_its_cure_is_applied(deployment, name, right):
    path = deployment / name
    path.chmod(path.stat().st_mode | right)
    if name.endswith("yaml") and right == stat.S_IWGRP:
        layout.check_folders(deployment)  # a group may share it
        return

    [refusal] = refusals(deployment)

    assert refusal.startswith(f"{path}: other users may write to it")
    subprocess.run(re.findall("`(.*)`", refusal)[0], shell=True, check=True)
    layout.check_folders(deployment)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", CHECKED)
def test_what_is_another_users_is_refused_and_roots_is_not(deployment, name, monkeypatch):
    path = deployment / name
    os.chown(path, 4711, -1)

    [refusal] = refusals(deployment)

    assert refusal.startswith(f"{path}: another user (uid 4711;")
    assert refusal.endswith(f"`chown -R 0 {shlex.quote(str(path))}`")
    # To that user all else is root's, as files that the configuration's management wrote.
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    layout.check_folders(deployment)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_is_refused_in_place_of_a_folder(deployment, name, tmp_path):
    path, target = deployment / name, tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)

    [refusal] = refusals(deployment)

    assert refusal.startswith(f"{path}: a link")
    assert str(target) in refusal
    target.rename(tmp_path / "gone")
    if name != ".":
        assert refusals(deployment)[0].endswith(f"; `rm '{path}'`")


def test_links_that_only_the_owner_can_turn_are_none_of_its_business(deployment, tmp_path):
    """A linked parent of DIR, and linked files in etc/."""
    for name in CHECKED[len(FOLDERS) :]:
        target = tmp_path / Path(name).name
        (deployment / name).rename(target)
        (deployment / name).symlink_to(target)
    (tmp_path / "linked").symlink_to(tmp_path)

    layout.check_folders(tmp_path / "linked" / deployment.name)


def test_all_that_is_wrong_is_said_at_once(deployment):
    for name in ("etc", "data"):
        (deployment / name).chmod(0o777)

    assert len(refusals(deployment)) == 2
