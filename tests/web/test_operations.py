"""Operations whose calls fail, whose trash is full, or that are many at a time."""

from __future__ import annotations

import asyncio
import functools
import tracemalloc
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from pinlaterd.client.calls import EnqueuedJob, PreparedCall
from pinlaterd.errors import (
    EnqueuedInPart,
    InvalidRequest,
    NoHealthyShards,
    OutcomeUnknown,
    PinLaterError,
)
from pinlaterd.model import (
    DeleteJobsRequest,
    EnqueueRequest,
    JobChoice,
    JobOptions,
    JobRecord,
    JobState,
    LookupRequest,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.router_client import RouterClient
from pinlaterd.web import operations as operations_of_web
from pinlaterd.web import trash
from pinlaterd.web.audit import AuditLog
from pinlaterd.web.operations import Operation, Operations, Phase, Selection, nonce_of_restore
from pinlaterd.web.sessions import Sessions
from tests.clocks import FakeClock


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that runs a coroutine."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


class Service:
    """Answers calls by `answer`; keeps their requests."""

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer
        self.requests: list[Any] = []

    async def run(self, call: PreparedCall[Any]) -> Any:
        await asyncio.sleep(0)
        self.requests.append(call.request)
        return self.answer(call.request)


def job(descriptor: str, body: bytes = b"x") -> JobRecord:
    return JobRecord(descriptor, JobState.FAILED, 1, 0, "why", 1, 2, 3, None, body)


def jobs_of(request: Any) -> int:
    return len(request.options.descriptors)


def make(folder: Path, service: Service) -> Operations:
    clock = FakeClock()
    audit = AuditLog(folder / "audit.jsonl", clock)
    return Operations(cast("RouterClient", service), folder, audit, clock)


def names_of(jobs: int) -> list[str]:
    return [f"mail:s1:p1:{n}" for n in range(1, jobs + 1)]


def operation(what: str = "retry", jobs: int = 3, nonce: str = "n", **more: Any) -> Operation:
    selection = Selection("mail", "failed", JobChoice(names_of(jobs), ended_before_ms=9))
    return Operation(what, "ada", nonce, selection, **more)


async def finish(operations: Operations, begun: Operation) -> None:
    """Wait until an operation rests."""
    while tasks := [task for task, number in operations._tasks.items() if number == begun.number]:
        await asyncio.wait(tasks, timeout=10)


def test_files_that_a_crash_has_damaged_leave_what_others_say(tmp_path: Path):
    lines = [b"\0\0\0", b'{"at_ms": 1, "number": 1, "who": "\xff"}', b'{"number": 2, "outcome": 5}']
    whole = [b'{"at_ms": 1, "number": 7, "who": "ada", "what": "set", "facts": {}}']
    cut = [b'{"at_ms": 1, "number": 8, "wh']
    (tmp_path / "audit.jsonl").write_bytes(b"\n".join(lines + whole + cut))
    (tmp_path / "operations").mkdir()
    (tmp_path / "operations/1.json").write_bytes(b"")
    (tmp_path / "operations/2.json").write_bytes(b'{"what": "retry", "who": "\xff"}')
    (tmp_path / "sessions").write_bytes(b'{"a": {"user": "\xff"')

    operations = make(tmp_path, Service(lambda _: 0))
    Sessions(FakeClock(), "pinlaterd", tmp_path / "sessions")

    [change] = operations._audit.changes()
    assert change.who == "ada"
    assert operations._audit.next_number() == 8


def test_all_changes_are_listed_page_by_page(tmp_path: Path):
    audit = AuditLog(tmp_path / "audit.jsonl", FakeClock())
    for number in range(1, 8_001):  # more than is read at first
        facts = {"queue": "mail", "reason": "x" * 100}
        audit._append({"number": number, "who": "ada", "what": "retry", "facts": facts})
        if number > 1:
            audit.end(number - 1, "done")

    for before, numbers in ((8_001, range(8_000, 7_900, -1)), (101, range(100, 0, -1))):
        page = audit.changes(before, 100)
        assert [change.number for change in page] == [*numbers]
    assert {change.outcome for change in page} == {"done"}
    assert len(audit.changes()) < 8_000


@in_a_loop
async def test_an_audit_log_that_cannot_be_read_refuses_changes_only(tmp_path: Path):
    (tmp_path / "audit.jsonl").mkdir()
    operations = make(tmp_path, Service(lambda _: 0))

    with pytest.raises(OSError, match="audit"):
        await operations.begin(operation())
    assert operations.get(1) is None


def test_an_audit_log_that_can_be_read_again_gives_no_number_twice(tmp_path: Path):
    path, kept = tmp_path / "audit.jsonl", tmp_path / "kept"
    audit = AuditLog(path, FakeClock())
    audit.begin(audit.next_number("form"), "ada", "set", {"nonce": "form"})
    path.rename(kept)
    path.mkdir()

    again = AuditLog(path, FakeClock())
    for asked in (again.number_of, again.next_number):
        with pytest.raises(OSError, match="audit"):
            asked("form")
    path.rmdir()
    kept.rename(path)

    assert (again.number_of("form"), again.next_number()) == (1, 2)


@in_a_loop
async def test_an_unknown_outcome_is_counted_again(tmp_path: Path):
    answers = iter([2, 1])  # one was carried out, two are left

    def answer(_request: RetryFailedRequest) -> int:
        if len(service.requests) == 1:
            raise OutcomeUnknown("no answer came")
        return next(answers)

    service = Service(answer)
    operations = make(tmp_path, service)
    begun = await operations.begin(operation())
    await finish(operations, begun)

    assert (begun.phase, begun.done, begun.missed, begun.unsure) == (Phase.DONE, 2, 1, 0)
    assert [request.dry_run for request in service.requests] == [False, True, False]
    assert {request.options.ended_before_ms for request in service.requests} == {9}


@in_a_loop
async def test_a_service_that_fails_interrupts_and_it_goes_on_where_it_was(tmp_path: Path):
    fails = [True]

    def answer(request: RetryFailedRequest) -> int:
        if fails:
            raise PinLaterError("all shards are down")
        return jobs_of(request)

    operations = make(tmp_path, Service(answer))
    begun = await operations.begin(operation(jobs=1_200))
    await finish(operations, begun)
    assert (begun.phase, begun.note, begun.done) == (Phase.INTERRUPTED, "all shards are down", 0)

    fails.clear()
    operations.go_on(begun)
    await finish(operations, begun)
    assert (begun.phase, begun.done) == (Phase.DONE, 1_200)
    again = make(tmp_path, Service(answer)).get(begun.number)
    assert again == begun


@in_a_loop
async def test_of_a_queue_one_works_at_a_time_and_one_ends_behind_its_batch(tmp_path: Path):
    service = Service(jobs_of)
    operations = make(tmp_path, service)
    first = await operations.begin(operation(jobs=1_000))
    second = await operations.begin(operation(jobs=700, nonce="other"))
    operations.stop(second)
    await finish(operations, first)
    await finish(operations, second)

    assert (first.phase, first.done) == (Phase.DONE, 1_000)
    assert (second.phase, second.done) == (Phase.STOPPED, 0)


@in_a_loop
async def test_a_full_trash_asks_before_more_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trash, "MOST_BYTES", 2_000)

    def answer(request: Any) -> Any:
        if isinstance(request, LookupRequest):
            return {each: job(each, b"x" * 1_000) for each in request.descriptors}
        return jobs_of(request)

    service = Service(answer)
    operations = make(tmp_path, service)
    begun = await operations.begin(operation("delete", jobs=3))
    await finish(operations, begun)
    assert (begun.phase, begun.done) == (Phase.ASKING, 0)
    assert "the trash is full" in begun.note

    operations.go_on(begun)
    await finish(operations, begun)
    assert (begun.phase, begun.done) == (Phase.DONE, 3)
    assert not operations.trash.holds(begun.number)


@in_a_loop
async def test_bodies_that_are_too_much_for_one_answer_are_kept_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trash, "_BATCH_BYTES", 2_500)

    def answer(request: Any) -> Any:
        if not isinstance(request, LookupRequest):
            return jobs_of(request)
        if len(request.descriptors) > 2:
            raise InvalidRequest("look up fewer jobs at a time")
        return {each: job(each, b"x" * 900) for each in request.descriptors}

    operations = make(tmp_path, Service(answer))
    begun = await operations.begin(operation("delete", jobs=7))
    await finish(operations, begun)

    assert (begun.phase, begun.done) == (Phase.DONE, 7)
    batches = list(operations.trash.batches(begun.number, 1, 500))
    assert [len(batch) for batch in batches] == [2, 2, 2]
    kept = sorted(one.descriptor for batch in batches for one in batch)
    assert kept == [f"mail:s1:p1:{n}" for n in range(2, 8)]


class Store:
    """Answers as a service whose jobs of `mail` are those of an operation."""

    def __init__(self, jobs: int) -> None:
        self.jobs = {one.descriptor: one for one in map(job, names_of(jobs))}
        self.enqueued: list[str] = []  # keys
        self.held: set[str] = set()
        self.answers: list[Any] = []  # to enqueues in place of the usual one

    def __call__(self, request: Any) -> Any:
        match request:
            case DeleteJobsRequest():
                failed = [one for one, job in self.jobs.items() if job.state is JobState.FAILED]
                for one in failed:
                    del self.jobs[one]
                return len(failed)
            case LookupRequest(keys=None):
                return {one: self.jobs[one] for one in request.descriptors if one in self.jobs}
            case LookupRequest():
                keys = [one.key for one in request.keys or () if one.key in self.held]
                keyed = {f"mail:s1:p9:{n}": JobOptions(key) for n, key in enumerate(keys)}
                return {each: job(each)._replace(options=its) for each, its in keyed.items()}
        assert isinstance(request, EnqueueRequest)
        keys = [key for one in request.jobs if one.options and (key := one.options.key)]
        self.enqueued += keys
        if self.answers and isinstance(error := self.answers.pop(0), Exception):
            raise error
        return [EnqueuedJob("", key in self.held) for key in keys]


def fails_first(answer: Callable[[Any], Any], kind: type[Any], times: int) -> Callable[[Any], Any]:
    """Return an answerer by which the first requests of a kind fail."""
    fails = iter([True] * times)

    def answer_or_fail(request: Any) -> Any:
        if isinstance(request, kind) and next(fails, False):
            raise PinLaterError("shard s1 is down")
        return answer(request)

    return answer_or_fail


async def settled(operations: Operations) -> None:
    """Wait until all deletes have noted which jobs of cut-short batches are left."""
    await asyncio.wait_for(asyncio.gather(*operations._settling.values()), 60)


async def assert_not_restored_once_they_ran(
    operations: Operations, deleted: Operation, store: Store
) -> None:
    """Let the jobs that a delete has left run, and restore it: none is enqueued."""
    await settled(operations)
    store.jobs.clear()

    begun = await restore(operations, deleted)
    assert (begun.phase, store.enqueued) == (Phase.DONE, [])


async def restore(operations: Operations, deleted: Operation) -> Operation:
    """Restore what an operation has deleted."""
    again = Operation("restore", "ada", nonce_of_restore(deleted.number), deleted.selection)
    again.source, again.expected = deleted.number, deleted.done
    begun = await operations.begin(again)
    await finish(operations, begun)
    return begun


@in_a_loop
async def test_what_may_have_been_restored_is_not_sent_again(tmp_path: Path):
    store = Store(3)
    operations = make(tmp_path, Service(store))
    deleted = await operations.begin(operation("delete"))
    await finish(operations, deleted)
    store.answers = [PinLaterError("no router answers")]

    begun = await restore(operations, deleted)
    assert begun.phase is Phase.INTERRUPTED
    store.held = {"trash-1-1-1-1"}  # the others were not stored, or have run and are gone
    operations = make(tmp_path, Service(store))  # the process was killed
    again = operations.get(begun.number)
    assert again is not None
    operations.go_on(again)
    await finish(operations, again)

    assert len(store.enqueued) == 3
    assert "done: 1 enqueued again, 2 not, as they may have run" in again.outcome
    assert operations.is_restored(deleted)


@in_a_loop
async def test_what_was_certainly_not_restored_is_sent_again(tmp_path: Path):
    store = Store(3)
    operations = make(tmp_path, Service(store))
    deleted = await operations.begin(operation("delete"))
    await finish(operations, deleted)
    in_part = EnqueuedInPart(["mail:s1:p1:9", "", ""], "a shard is down")
    store.answers = [NoHealthyShards(), in_part]

    begun = await restore(operations, deleted)
    for held in ((), store.enqueued[:1]):
        assert begun.phase is Phase.INTERRUPTED
        store.held = set(held)
        operations.go_on(begun)
        await finish(operations, begun)

    assert [store.enqueued.count(key) for key in store.enqueued[:3]] == [2, 3, 3]
    assert begun.outcome == "done: 3 enqueued again"


@in_a_loop
async def test_a_restore_says_what_it_left_out(tmp_path: Path):
    store = Store(4)
    first, second, third, _ = store.jobs
    store.jobs[first] = store.jobs[first]._replace(options=JobOptions("taken"))
    store.jobs[second] = store.jobs[second]._replace(options=JobOptions("old", 1))
    operations = make(tmp_path, Service(store))
    keep = operations.trash.add

    def succeeds_meanwhile(number: int, jobs: list[JobRecord]) -> None:
        keep(number, jobs)
        store.jobs[third] = store.jobs[third]._replace(state=JobState.SUCCEEDED)

    operations.trash.add = succeeds_meanwhile  # type: ignore[method-assign, assignment]
    deleted = await operations.begin(operation("delete", jobs=4))
    await finish(operations, deleted)
    assert (deleted.done, deleted.missed) == (3, 1)
    store.jobs.clear()  # and was removed
    store.held = {"taken"}
    begun = await restore(operations, deleted)

    assert store.enqueued == ["trash-1-1-1-4"]
    assert begun.outcome == (
        "done: 1 enqueued again, 1 not, as other jobs hold their keys, 1 not, as they have expired"
    )


@in_a_loop
async def test_what_a_killed_process_had_deleted_is_known_once_the_next_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(operations_of_web, "_SETTLE_SECONDS", 0)
    store = Store(2)
    first, second = store.jobs
    operations = make(tmp_path, Service(store))
    begun = operation("delete", jobs=2)
    begun.selection = Selection("mail", "failed", JobChoice(ended_before_ms=9))
    begun.number, begun.phase = 1, Phase.INTERRUPTED
    operations.trash.add(1, list(store.jobs.values()))
    await operations._store(begun)
    del store.jobs[first]  # by the call under way

    operations = make(tmp_path, Service(fails_first(store, LookupRequest, 3)))
    operations.settle()
    await settled(operations)
    again = operations.get(1)
    assert again is not None
    assert again.outcome.startswith("interrupted: 1 deleted")
    del store.jobs[second]  # it had run
    [batch] = operations.trash.batches(1, 0, 9)

    assert [one.descriptor for one in batch] == [first]


@in_a_loop
async def test_jobs_that_run_after_a_delete_was_interrupted_are_not_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(operations_of_web, "_SETTLE_SECONDS", 0)
    store = Store(3)
    operations = make(tmp_path, Service(fails_first(store, DeleteJobsRequest, 1)))
    deleted = await operations.begin(operation("delete"))
    await finish(operations, deleted)
    assert deleted.phase is Phase.INTERRUPTED
    await assert_not_restored_once_they_ran(operations, deleted, store)


@in_a_loop
async def test_jobs_of_a_batch_that_filled_the_trash_are_not_restored_while_they_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(trash, "MOST_BYTES", 500)
    store = Store(4)

    def answer(request: Any) -> Any:
        if getattr(request, "include_body", False) and len(request.descriptors) > 2:
            raise InvalidRequest("look up fewer jobs at a time")
        return store(request)

    operations = make(tmp_path, Service(answer))
    deleted = await operations.begin(operation("delete", jobs=4))
    await finish(operations, deleted)
    assert deleted.phase is Phase.ASKING
    assert operations.trash.holds(deleted.number)
    await assert_not_restored_once_they_ran(operations, deleted, store)


@in_a_loop
async def test_an_operation_waits_until_deletes_before_it_have_noted_which_jobs_are_left(
    tmp_path: Path,
):
    store = Store(3)
    is_down: list[bool] = []

    def answer(request: Any) -> Any:
        if isinstance(request, DeleteJobsRequest) and not is_down:
            is_down.append(True)
        if any(is_down):
            raise PinLaterError("shard s1 is down")
        return store(request)

    operations = make(tmp_path, Service(answer))
    deleted = await operations.begin(operation("delete"))
    other = await operations.begin(operation("delete", nonce="other"))
    await finish(operations, deleted)
    await finish(operations, other)
    assert (other.phase, other.note, len(store.jobs)) == (Phase.INTERRUPTED, "shard s1 is down", 3)

    is_down[0] = False
    operations.go_on(other)
    await finish(operations, other)
    assert (other.phase, other.done) == (Phase.DONE, 3)
    assert list(operations.trash.batches(deleted.number, 0, 9)) == []


@in_a_loop
async def test_an_operation_goes_on_also_while_it_is_stored_that_it_asks(tmp_path: Path):
    operations = make(tmp_path, Service(jobs_of))
    store = operations._store

    async def goes_on_meanwhile(stored: Operation) -> None:
        await store(stored)
        if stored.phase is Phase.ASKING:
            operations.go_on(stored)

    operations._store = goes_on_meanwhile  # type: ignore[method-assign, assignment]
    begun = await operations.begin(operation(jobs=600, first_jobs=10))
    await finish(operations, begun)

    assert (begun.phase, begun.done) == (Phase.DONE, 600)
    assert operations._tasks == {}


@in_a_loop
async def test_no_operation_that_still_asks_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(operations_of_web, "_KEPT", 2)
    operations = make(tmp_path, Service(jobs_of))
    asking = await operations.begin(operation(first_jobs=1))
    await finish(operations, asking)
    for nonce in "abcd":
        other = await operations.begin(operation(nonce=nonce))
        await finish(operations, other)

    assert asking.phase is Phase.ASKING
    assert make(tmp_path, Service(jobs_of)).get(asking.number) == asking
    assert (operations.get(2), operations.get(5)) == (None, other)


@in_a_loop
async def test_what_is_stopped_while_jobs_are_looked_for_changes_none_of_them(tmp_path: Path):
    def answer(request: Any) -> Any:
        assert isinstance(request, ScanRequest)
        operations.stop(begun)
        return ScanResult([job("mail:s1:p1:1")], "more")

    operations = make(tmp_path, Service(answer))
    begun = Operation("retry", "ada", "n", Selection("mail", "failed"))
    await operations.begin(begun)
    await finish(operations, begun)

    assert (begun.phase, begun.done) == (Phase.STOPPED, 0)


@in_a_loop
async def test_a_spread_that_goes_on_begins_behind_what_was_sent(tmp_path: Path):
    def answer(request: RetryFailedRequest) -> int:
        if len(service.requests) == 2:
            raise PinLaterError("all shards are down")
        return jobs_of(request)

    service = Service(answer)
    operations = make(tmp_path, service)
    begun = await operations.begin(operation(jobs=1_000, per_second=10.0))
    await finish(operations, begun)
    operations.go_on(begun)
    await finish(operations, begun)

    assert begun.done == 1_000
    times = [request.run_after_ms for request in service.requests]
    assert all(later - before == 50_000 for before, later in pairwise(times))


@in_a_loop
async def test_an_audit_log_that_was_moved_away_gives_no_number_twice(tmp_path: Path):
    operations = make(tmp_path, Service(jobs_of))
    first = await operations.begin(operation())
    await finish(operations, first)
    (tmp_path / "audit.jsonl").unlink()

    again = make(tmp_path, Service(jobs_of))
    second = await again.begin(operation(nonce="other"))
    await finish(again, second)

    assert (first.number, second.number) == (1, 2)
    assert again.get(1) == first
    assert again._audit.number_of(first.nonce) == 1


@in_a_loop
async def test_a_restore_is_known_as_long_as_the_trash_has_its_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(operations_of_web, "_KEPT", 1)
    operations = make(tmp_path, Service(Store(3)))
    deleted = await operations.begin(operation("delete"))
    await finish(operations, deleted)
    assert operations.can_restore(deleted)
    restored = await restore(operations, deleted)
    other = await operations.begin(operation("delete", nonce="other"))
    await finish(operations, other)
    (tmp_path / "audit.jsonl").unlink()

    again = make(tmp_path, Service(Store(3)))

    assert again.get(restored.number) == restored
    assert (again.is_restored(deleted), again.can_restore(deleted)) == (True, False)


def test_lines_that_a_crash_cut_short_hide_no_others(tmp_path: Path):
    clock = FakeClock()
    kept = trash.Trash(tmp_path / "trash", clock)
    kept.add(1, [job("mail:s1:p1:1", b"\x00\xff")])
    with (tmp_path / "trash/1.jsonl").open("ab") as file:
        file.write(b'{"descriptor": "mail:s1:p1:2", "bo')
    kept.add(1, [job("mail:s1:p1:1"), job("mail:s1:p1:3")])
    audit = AuditLog(tmp_path / "audit.jsonl", clock)
    audit.begin(audit.next_number(), "ada", "retry", {"queue": "mail"})
    with (tmp_path / "audit.jsonl").open("ab") as file:
        file.write(b'{"number": 1, "outc')
    audit.begin(audit.next_number(), "bob", "delete", {"queue": "mail"})
    audit.end(2, "done: 3 deleted")

    [batch] = list(kept.batches(1, 0, 10))
    assert [(one.descriptor, one.job.body) for one in batch] == [
        ("mail:s1:p1:1", b"\x00\xff"),
        ("mail:s1:p1:3", b"x"),
    ]
    found = [(change.number, change.who, change.outcome) for change in audit.changes()]
    assert found == [(2, "bob", "done: 3 deleted"), (1, "ada", "")]
    assert AuditLog(tmp_path / "audit.jsonl", clock).next_number() == 3


def test_a_large_delete_is_looked_through_in_little_memory(tmp_path: Path):
    kept = trash.Trash(tmp_path / "trash", FakeClock())
    names = names_of(20_000)
    for at in range(0, len(names), 500):
        kept.add(1, map(job, names[at : at + 500]))
        kept.add_left(1, names[at : at + 500])  # it was interrupted, and has gone on
        kept.add(1, map(job, names[at : at + 500]))
        kept.add_left(1, names[at : at + 10])
    kept.add(1, [job("mail:s1:p1:0")])

    tracemalloc.start()
    try:
        (before, unsettled), batches = kept.unsettled(1), kept.batches(1, 19_590, 20)
        first = next(batches)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert (before, unsettled) == (19_600, ["mail:s1:p1:0"])
    assert most < 1_000_000
    found = [one.descriptor for batch in (first, *batches) for one in batch]
    assert found == [*names[-10:], "mail:s1:p1:0"]


def test_after_a_day_the_trash_is_emptied(tmp_path: Path):
    clock = FakeClock()
    kept = trash.Trash(tmp_path / "trash", clock)
    kept.add(1, [job("mail:s1:p1:1")])
    assert kept.holds(1)

    clock.advance(86_401 + (tmp_path / "trash/1.jsonl").stat().st_mtime - clock.now_ms() / 1000)

    assert not kept.holds(1)
    kept.add(2, [])
    assert [file.name for file in (tmp_path / "trash").iterdir()] == ["2.jsonl"]
