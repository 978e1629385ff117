"""Every block of Python in README.md, docs/python.md and docs/worker.md runs on a real service."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Callable, Iterator

import pytest

from pinlaterd.client import Handlers, Job, JobState, Worker
from tests.client.working import running
from tests.docs.pages import REPOSITORY, python_blocks
from tests.servers.tls_proxy import write_certificate

pytestmark = pytest.mark.service

Names = dict[str, object]
RunBlock = Callable[[str], Names]


@pytest.fixture
def run_block(service, queue, tmp_path, monkeypatch) -> RunBlock:
    """Runs a block after those before it, for a reader with a service and functions of his own."""
    monkeypatch.chdir(tmp_path)
    write_certificate(tmp_path).rename(tmp_path / "ca.pem")
    names: Names = {
        "__name__": "tasks",
        "send": _Sending,
        "fetch": lambda body: body if body != b"missing" else None,
        "shrink": len,
        "deliver": _deliver,
    }

    def run_block(block: str) -> Names:
        for its, ours in {
            '"queue.example.com"': f'"127.0.0.1:{service.port}"',
            '"127.0.0.1", 9010': f'"127.0.0.1", {service.port}',
            '"mail"': f'"{queue}"',
        }.items():
            block = block.replace(its, ours)
        code = compile(block, "a block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        # Not exec: a block with `await` outside of a function makes a coroutine, to be run.
        result = eval(code, names)
        if inspect.iscoroutine(result):
            asyncio.run(result)
        return names

    return run_block


class _Sending:
    """What the reader's `send(body)` returns, to code that awaits it and to code that does not."""

    def __init__(self, body: bytes) -> None:
        self._is_sent = b"ada" in body

    def __bool__(self) -> bool:
        return self._is_sent

    def __await__(self) -> Iterator[None]:
        return iter(())


async def _deliver(body: bytes) -> None:
    if body == b"bounces":
        raise ConnectionError("no route to host")


def the_block(page: str, holding: str) -> str:
    text = (REPOSITORY / "docs" / page).read_text("utf-8")
    [found] = [block for block in python_blocks(text) if holding in block]
    return found


@pytest.fixture
def ctrl_c_comes_at_once(monkeypatch) -> None:
    """Workers of the documentation run until they are stopped."""
    run = Worker.run

    def run_stopped(worker: Worker) -> None:
        worker.stop()
        run(worker)

    monkeypatch.setattr(Worker, "run", run_stopped)


@pytest.mark.usefixtures("ctrl_c_comes_at_once")
@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/worker.md"])
def test_all_blocks_of_a_page_run_one_after_the_other(run_block, page):
    for block in python_blocks((REPOSITORY / page).read_text("utf-8")):
        run_block(block)


def test_the_client_of_the_page_does_what_it_says(run_block, client, queue):
    run_block(the_block("python.md", "[now, later] = client.enqueue("))

    [ada] = client.scan(queue, JobState.SUCCEEDED)
    assert ada.attempts_remaining == 2
    [grace] = client.scan(queue, JobState.PENDING, future=True)
    assert (grace.attempts_allowed, grace.run_after_ms) == (5, 1_900_000_000_000)


def test_the_asyncio_program_of_the_page_does_what_it_says(run_block, client, queue):
    run_block(the_block("python.md", "asyncio.run(main())"))

    assert client.count(queue, JobState.SUCCEEDED) == 10
    assert client.count(queue, JobState.PENDING) == 90


def test_the_handlers_of_the_page_do_what_they_say(run_block, client, queue, wait_until):
    handlers = run_block(the_block("worker.md", "# tasks.py"))["handlers"]
    assert isinstance(handlers, Handlers)
    client.create_queue("images")
    [image, missing] = client.enqueue("images", [b"picture", b"missing"])
    # On a slow machine it is tried again before its worker ends.
    again = Job(b"bounces", attempts_allowed=50)
    [mail, bounces] = client.enqueue(queue, [b"to: ada", again])
    descriptors = [image, missing, mail, bounces]

    def found() -> dict[str, tuple[JobState, str]]:
        records = client.lookup(descriptors)
        return {name: (job.state, job.custom_status) for name, job in records.items()}

    with running(Worker(client, handlers, max_wait_ms=200)):
        wait_until(lambda: all(said or job == mail for job, (_, said) in found().items()))
        wait_until(lambda: found()[mail][0] is JobState.SUCCEEDED)

    at_the_end = found()
    assert at_the_end[image] == (JobState.SUCCEEDED, "7 bytes")
    assert at_the_end[missing] == (JobState.PENDING, "not uploaded yet; ")
    assert at_the_end[bounces][0] is JobState.PENDING
    assert at_the_end[bounces][1].startswith("ConnectionError: no route to host (")
