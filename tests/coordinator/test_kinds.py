"""A row in the table of kinds is all that a new kind of process takes, its own code aside."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import pinlaterd
from pinlaterd.config import kinds
from tests.conftest import WaitUntil
from tests.coordinator.made_up_kind import KIND, QUEUE
from tests.deployment import Deployment, frozen

NAMES = ("made-up-1", "made-up-2")
_ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One whose every process, commands included, has the row."""
    folder = tmp_path_factory.mktemp("d")  # the path of a Unix socket must be short
    root = folder / "root"
    root.mkdir()
    (root / "pinlaterd").symlink_to(Path(pinlaterd.__file__).parent)
    (root / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(_ROOT)!r})\n"
        "from tests.coordinator import made_up_kind\nmade_up_kind.register()\n"
    )
    made = Deployment(folder / "d", environment={"PYTHONPATH": str(root)})
    made.init()
    with made.running():
        yield made


@pytest.mark.service
def test_a_kind_runs_is_watched_and_restarted_by_its_row(
    deployment: Deployment, wait_until: WaitUntil
) -> None:
    def serving() -> dict[str, int]:
        """Pids by program."""
        return {
            process["name"]: process["pid"]
            for process in deployment.status()["processes"]
            if process["kind"] == KIND.name and process["state"] == "serving"
        }

    def problems() -> list[str]:
        url = f"http://127.0.0.1:{deployment.stats_port}/health"
        try:
            with urllib.request.urlopen(url) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        return list(found["problems"])

    assert not {*NAMES} & deployment.pids().keys(), "nothing configured needs one"

    deployment.write("queues", {QUEUE: {}})
    wait_until(lambda: serving().keys() == {*NAMES}, seconds=60)
    assert {*NAMES} <= deployment.pids().keys(), "supervisord runs them"
    [process] = deployment.processes_called(NAMES[0]).values()
    assert process["facts"] == {"shards": "1"}
    assert deployment.stats()["processes"][NAMES[0]]["counters"]["made_up_ticks"] > 0
    wait_until(lambda: problems() == [])

    killed = deployment.pid_of(NAMES[0])
    with frozen(deployment.supervisord_pid()):  # which may restart it before we have looked
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: any(text.startswith(NAMES[0]) for text in problems()))
    wait_until(lambda: serving().get(NAMES[0], killed) != killed, seconds=60)
    wait_until(lambda: problems() == [])

    before = serving()
    told = deployment.admin("restart", KIND.name)
    wait_until(lambda: problems() == [])
    after = serving()
    assert all(f"{name} is restarted" in told for name in NAMES)
    assert (deployment.folder / f"run/log/{NAMES[1]}-handover.log").exists(), "one served meanwhile"
    assert after.keys() == {*NAMES}
    assert not {*after.values()} & {*before.values()}

    deployment.write("queues", {"mail": {}})
    wait_until(lambda: not {*NAMES} & deployment.pids().keys(), seconds=60)
    wait_until(deployment.is_serving)


@pytest.mark.parametrize(
    ("program", "is_peer"),
    [("router-handover", True), ("router-2-handover", True), ("shard-x-handover", False)],
)
def test_a_handover_peer_is_one_of_a_kind_that_hands_over(program: str, *, is_peer: bool) -> None:
    assert kinds.is_handover_peer(program) is is_peer
