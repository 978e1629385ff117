"""The process `push`: it comes and goes with what is to be pushed, and keeps its secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pinlaterd.config.load import load_config
from tests.conftest import WaitUntil
from tests.deployment import MOST_PATIENT, Deployment
from tests.push.downstream import Downstream, downstream

pytestmark = pytest.mark.service


@pytest.fixture
def there() -> Iterator[Downstream]:
    with downstream() as made:
        yield made


def test_it_runs_where_a_queue_is_pushed(
    there: Downstream, tmp_path: Path, wait_until: WaitUntil
) -> None:
    deployment = Deployment(tmp_path / "d")
    deployment.init(settings={**MOST_PATIENT, "push_hosts": "127.0.0.1"})
    with deployment.running(), deployment.client() as client:
        for queue in ("mail", "news"):
            client.create_queue(queue)
        assert "push-1" not in deployment.pids(), "nothing is to be pushed"

        deployment.write("queues", {"mail": {"push": {"url": f"{there.url}/mail"}}})
        client.enqueue("mail", [b"1"])
        wait_until(lambda: [one.path for one in there.received] == ["/mail"])
        pid = deployment.pid_of("push-1")

        deployment.write("queues", {"news": {"push": {"url": f"{there.url}/news"}}})
        client.enqueue("news", [b"2"])
        wait_until(lambda: [one.path for one in there.received] == ["/mail", "/news"])
        client.enqueue("mail", [b"3"])
        left = client.dequeue("mail", limit=1, max_wait_ms=30_000)
        assert [job.body for job in left] == [b"3"], "it is left to workers now"
        assert deployment.pid_of("push-1") == pid, "nothing was restarted"

        deployment.write("queues", {})
        wait_until(lambda: "push-1" not in deployment.pids())


def test_the_environment_names_a_downstream(tmp_path: Path, wait_until: WaitUntil) -> None:
    secret = "planted-secret"
    environment = {"DOWNSTREAM_URL": "http://127.0.0.1:1/", "DOWNSTREAM_WORKER_AUTH": secret}
    deployment = Deployment(tmp_path / "d", environment=environment)
    deployment.init(settings=MOST_PATIENT)
    with deployment.running():
        first = deployment.pid_of("push-1")
        deployment.admin("restart", "push")
        wait_until(lambda: deployment.pids().get("push-1", first) != first)
        second = psutil.Process(deployment.pid_of("push-1"))

        assert second.environ()["DOWNSTREAM_WORKER_AUTH"] == secret
        Deployment.up(_in_another_shell(deployment))
        assert deployment.pid_of("push-1") == second.pid, "that shell says nothing of a downstream"
        assert secret not in " ".join(second.cmdline())
        assert secret not in str(deployment.status())
        # Others are about to take the name of what they replace.
        kept = (path for path in deployment.folder.rglob("*") if path.suffix != ".new")
        written = [path for path in kept if path.is_file()]
        assert not [path for path in written if secret.encode() in path.read_bytes()]


def test_a_secret_may_change_at_any_time(
    there: Downstream, tmp_path: Path, wait_until: WaitUntil
) -> None:
    deployment = Deployment(tmp_path / "d")
    push = {"url": f"{there.url}/", "auth_file": "etc/hooks.auth"}
    deployment.init(
        settings={**MOST_PATIENT, "push_hosts": "127.0.0.1"}, queues={"mail": {"push": push}}
    )
    secret = deployment.folder / "etc/hooks.auth"
    secret.write_text("first\n")

    def sent_with(authorization: str) -> bool:
        client.enqueue("mail", [b"1"])
        return authorization in [one.headers["Authorization"] for one in there.received]

    with deployment.running(), deployment.client() as client:
        client.create_queue("mail")
        wait_until(lambda: sent_with("Bearer first"))
        secret.write_text("ada:second\n")
        wait_until(lambda: sent_with("Basic YWRhOnNlY29uZA=="))

        for unfit in (b"a token\nand a remark\n", b"caf\xe9", b""):  # no request could bring them
            secret.write_bytes(unfit)
            wait_until(lambda: "etc/hooks.auth" in str(deployment.status()["warnings"]))
            there.received.clear()
            wait_until(lambda: sent_with("Basic YWRhOnNlY29uZA=="))
            secret.write_text("ada:second\n")
            wait_until(lambda: "etc/hooks.auth" not in str(deployment.status()["warnings"]))


def test_an_unfit_secret_holds_up_no_other_queue(
    there: Downstream, tmp_path: Path, wait_until: WaitUntil
) -> None:
    deployment = Deployment(tmp_path / "d")
    pushes = {
        queue: {"push": {"url": f"{there.url}/{queue}", "auth_file": f"etc/{queue}.auth"}}
        for queue in ("mail", "news", "old")
    }
    deployment.init(settings={**MOST_PATIENT, "push_hosts": "127.0.0.1"}, queues=pushes)
    for queue in pushes:
        (deployment.folder / f"etc/{queue}.auth").write_text("first\n")

    def is_sent(queue: str, secret: str) -> bool:
        client.enqueue(queue, [b"1"])
        sent = [(one.path, one.headers["Authorization"]) for one in there.received]
        return (f"/{queue}", f"Bearer {secret}") in sent

    def is_left_to_workers(queue: str) -> bool:
        client.enqueue(queue, [b"2"])
        return bool(client.dequeue(queue, limit=1, max_wait_ms=1_000))

    with deployment.running(), deployment.client() as client:
        for queue in pushes:
            client.create_queue(queue)
        wait_until(lambda: all(is_sent(queue, "first") for queue in pushes))
        first = deployment.pid_of("push-1")

        (deployment.folder / "etc/mail.auth").write_text("a token\nand a remark\n")
        (deployment.folder / "etc/news.auth").write_text("second\n")
        wait_until(lambda: is_sent("news", "second"))
        there.received.clear()
        wait_until(lambda: is_sent("mail", "first"))
        (deployment.folder / "etc/old.auth").write_text("")
        wait_until(lambda: "etc/old.auth" in str(deployment.status()["warnings"]))
        assert "etc/mail.auth" in str(deployment.status()["warnings"])
        del pushes["old"]
        deployment.write("queues", pushes)
        wait_until(lambda: "etc/old.auth" not in str(deployment.status()["warnings"]))
        wait_until(lambda: is_left_to_workers("old"))

        deployment.admin("restart", "push")
        wait_until(lambda: deployment.pids().get("push-1", first) != first)
        there.received.clear()
        wait_until(lambda: is_sent("news", "second"))
        assert "/mail" not in [one.path for one in there.received]
        wait_until(lambda: "etc/mail.auth" in str(deployment.status()["warnings"]))
        (deployment.folder / "etc/mail.auth").write_text("third\n")
        wait_until(lambda: is_sent("mail", "third"))


def test_another_downstream_needs_processes_that_see_it(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path / "d")
    deployment.init(settings=MOST_PATIENT)
    with deployment.running():
        other = Deployment(deployment.folder, environment={"DOWNSTREAM_URL": "http://127.0.0.1:1"})
        with pytest.raises(AssertionError, match="DOWNSTREAM_URL: not what supervisord was"):
            other.up()
        assert "push-1" not in deployment.pids()

        deployment.down()
        other.up()
        assert "push-1" in deployment.pids()


def _in_another_shell(deployment: Deployment) -> Deployment:
    other = Deployment(deployment.folder)
    other.port, other.stats_port = deployment.port, deployment.stats_port
    return other


@pytest.mark.parametrize(
    ("hosts", "url"),
    [("", "http://127.0.0.1/"), ("example.com", "http://10.0.0.1/"), ("*", "http://[::1]:80/")],
)
def test_a_host_that_is_not_listed_is_a_mistake(tmp_path: Path, hosts: str, url: str) -> None:
    deployment = Deployment(tmp_path / "d")
    deployment.init(settings={"push_hosts": f'"{hosts}"'}, queues={"mail": {"push": {"url": url}}})

    with pytest.raises(AssertionError, match="push_hosts"):
        deployment.admin("config", "check")


def test_the_limit_of_a_pushed_queue_is_the_queues(tmp_path: Path) -> None:
    push = {"url": "http://127.0.0.1/", "max_in_progress": 3}
    deployment = Deployment(tmp_path / "d")
    deployment.init(
        settings={"push_hosts": "127.0.0.1"},
        queues={"mail": {"push": push}, "news": {"push": push, "max_in_progress": 7}},
    )

    config = load_config(deployment.folder / "etc")

    assert [config.queue(name).max_in_progress for name in ("mail", "news")] == [3, 7]
