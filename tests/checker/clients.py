"""What the clients of a run do: enqueue, work, look, clear up, make and delete queues.

Each is a thread with a client and a seeded random choice of its own. Queues: `work`, whose claims
last for a while; `brief`, whose claims are often left to time out; `bulk`, whose jobs fail and are
retried and deleted; `large`, whose answers no socket holds whole; `temporary`, which comes and
goes; `keyed`, whose jobs have keys, are not due yet, and are enqueued again and again; `once`,
whose jobs have one attempt, and are claimed by clients that die within the answer; `limited`, of
which a few jobs only may be in progress.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pinlaterd.model import JobState
from tests.checker.calls import Calls, Claim
from tests.checker.history import UNKNOWN, History, Record

QUEUES = ("work", "brief", "bulk", "large", "temporary", "keyed", "once", "limited")
WORK, BRIEF, BULK, LARGE, TEMPORARY, KEYED, ONCE, LIMITED = QUEUES
CLAIM_SECONDS = {queue: 2.0 if queue in (BRIEF, ONCE, LIMITED) else 12.0 for queue in QUEUES}
IN_PROGRESS_LIMITS = {LIMITED: 3}
# How long a queue has to be empty for its claims to have ended, or its delayed jobs to be due.
DRAINED_SECONDS = {WORK: 2.5, BRIEF: 3.5, BULK: 2.5, LARGE: 0.0, ONCE: 3.5}
PRIORITIES = (1, 2, 3)
_MOST_UNFINISHED = 300
_RECENT_KEYS = 30
# After a call of unknown outcome, as an application would; and each makes the judge's work longer.
_BACK_OFF_SECONDS = 0.25
_HALF_AN_HOUR_MS = 1_800_000
_LARGE_BODY_BYTES = 20_000
# Together more than the buffers of a connection hold.
_LARGE_JOBS = 300
# Of these an answer is more than a client with a small buffer is sent before it reads.
_ONCE_JOBS, _ONCE_BODY_BYTES = 20, 5_000


@dataclass
class Shared:
    """What the clients of a run know together."""

    password: str
    seed: int
    stop_enqueuing: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)
    descriptors: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    unfinished: int = 0
    last_key: int = 0


class Client(threading.Thread):
    """One client; its work is a generator of pauses in seconds."""

    # Jobs that a drain moves, and that are due within a run.
    scheduled_ms = (14_000, 20_000)

    def __init__(self, name: str, calls: Calls, shared: Shared) -> None:
        super().__init__(name=name, daemon=True)
        self.calls = calls
        self.shared = shared
        self.rng = random.Random(f"{shared.seed}/{name}")
        self.serial = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            for pause_seconds in self.work():
                failed = self.calls.outcome == UNKNOWN
                if self.shared.stop.wait(max(pause_seconds, _BACK_OFF_SECONDS * failed)):
                    break
        except BaseException as error:  # the run fails with it
            self.error = error
            raise
        finally:
            self.calls.close()

    def work(self) -> Iterator[float]:
        raise NotImplementedError

    def job(self, *, attempts: int | None = None) -> tuple[str, int, int, int]:
        """Body, priority, attempts, delay in ms."""
        self.serial += 1
        rng = self.rng
        body = f"{self.name}.{self.serial}/0"
        if rng.random() < 0.02:
            body += "/" + "x" * rng.randrange(_LARGE_BODY_BYTES)
        delays_ms = (
            0,
            rng.randrange(100, 2500),
            rng.randrange(*self.scheduled_ms),
            _HALF_AN_HOUR_MS,
        )
        delay_ms = rng.choices(delays_ms, (87, 8, 3, 2))[0]
        return body, rng.choice(PRIORITIES), attempts or rng.choice((1, 2, 3)), delay_ms


class Enqueuer(Client):
    def work(self) -> Iterator[float]:
        shared, rng = self.shared, self.rng
        while not shared.stop_enqueuing.is_set():
            if shared.unfinished > _MOST_UNFINISHED:
                yield 0.05
                # Claims that are left to time out are never counted as finished.
                shared.unfinished -= 5
                continue
            jobs = [self.job() for _ in range(rng.choices((1, 3, 20, 130), (60, 25, 14, 1))[0])]
            queue = WORK if rng.random() < 0.8 else BRIEF
            found = self.calls.enqueue(queue, jobs)
            if found:
                shared.descriptors.extend(found)
                shared.unfinished += len(found)
            yield rng.uniform(0.005, 0.05)


class Repeater(Client):
    """Enqueues the keys that its like does, too, as if no outcome were ever known."""

    def work(self) -> Iterator[float]:
        shared, rng = self.shared, self.rng
        while not shared.stop_enqueuing.is_set():
            shared.last_key += 1
            recent = range(max(0, shared.last_key - _RECENT_KEYS), shared.last_key)
            numbers = rng.choices(recent, k=rng.choice((1, 1, 5)))
            self.calls.enqueue_keyed(KEYED, sorted({f"key{number}" for number in numbers}))
            yield rng.uniform(0.01, 0.05)


class Worker(Client):
    """Claims jobs and ends them, now and then wrongly, late or not at all."""

    def __init__(self, name: str, calls: Calls, shared: Shared) -> None:
        super().__init__(name, calls, shared)
        self.held: list[Claim] = []
        self.past: deque[Claim] = deque(maxlen=50)

    def work(self) -> Iterator[float]:
        deeds: dict[Callable[[], None], int] = {
            self.claim: 40,
            self.acknowledge: 35,
            self.act_on_a_past_claim: 5,
            self.checkpoint: 6,
            self.look: 6,
            self.look_ahead: 2,
            self.forget: 2,
            self.die: 2,
        }
        while True:
            self.rng.choices(list(deeds), list(deeds.values()))[0]()
            yield self.rng.uniform(0.002, 0.03)

    def _queue(self) -> str:
        return WORK if self.rng.random() < 0.75 else BRIEF

    def _take(self, queue: str, most: int) -> tuple[list[Claim], list[Claim]]:
        """Some claims to end, of one queue: those that succeed, those that fail."""
        mine = [claim for claim in self.held if claim.queue == queue][:most]
        self.held = [claim for claim in self.held if claim not in mine]
        self.past.extend(mine)
        self.shared.unfinished -= len(mine)
        failing = [claim for claim in mine if self.rng.random() < 0.25]
        return [claim for claim in mine if claim not in failing], failing

    def claim(self) -> None:
        rng, queue = self.rng, self._queue()
        succeeded, failed = self._take(queue, 5) if rng.random() < 0.4 else ([], [])
        wait_ms = rng.choice((0, 0, 100, 1500))
        found = self.calls.dequeue(
            queue,
            limit=rng.choice((1, 3, 10, 30)),
            wait_ms=wait_ms,
            coverage=rng.choices((1.0, 0.5), (90, 10))[0],
            succeeded=succeeded,
            failed=failed,
        )
        self.held += found or []

    def acknowledge(self) -> None:
        for queue in (WORK, BRIEF):
            succeeded, failed = self._take(queue, 15)
            if succeeded or failed:
                delay_ms = self.rng.choice((0, 0, 300))
                named = self.rng.random() < 0.85
                for _ in range(3):
                    if self.calls.ack(queue, succeeded, failed, named=named, delay_ms=delay_ms):
                        break
                    named = True  # repeated without claims it could end another's

    def act_on_a_past_claim(self) -> None:
        if self.past:
            claim = self.rng.choice(self.past)
            if self.rng.random() < 0.3:
                self.calls.checkpoint(claim, named=True, new_body=f"{_name(claim)}/stale")
            else:
                self.calls.ack(claim.queue, failed=[claim])

    def checkpoint(self) -> None:
        if not self.held:
            return
        rng = self.rng
        claim = rng.choice(self.held)
        self.serial += 1
        new_body = f"{_name(claim)}/{self.name}.{self.serial}" if rng.random() < 0.5 else None
        move = rng.random() < 0.3
        self.held.remove(claim)
        self.calls.checkpoint(
            claim,
            named=rng.random() < 0.7,
            new_body=new_body,
            move_to_pending=move,
            delay_ms=rng.choice((0, 500)) if move else 0,
            attempts=rng.choice((None, None, 2, 4)),
        )
        if move:
            self.past.append(claim)
        else:
            self.held.append(claim)

    def look(self) -> None:
        known = [claim.descriptor for claim in (*self.held, *self.past)]
        known += list(self.shared.descriptors)
        if known:
            self.calls.lookup(self.rng.sample(known, min(len(known), 10)))

    def look_ahead(self) -> None:
        self.calls.dequeue(self._queue(), limit=5, dry_run=True)

    def forget(self) -> None:
        """Some claims are never ended: their time runs out."""
        brief = [claim for claim in self.held if claim.queue == BRIEF]
        self.held = [claim for claim in self.held if claim not in brief]

    def die(self) -> None:
        """With an answer unread, or half read, and all that was claimed before.

        Not on `work`: where claims may be lost the judge can't tell which jobs are ready."""
        self.calls.dequeue(BRIEF, limit=5, read_bytes=self.rng.choice((0, 2, 40)))
        self.calls.close()
        self.held.clear()


def _name(claim: Claim) -> str:
    return claim.body.partition("/")[0]


class Keeper(Client):
    """Fails jobs for good, retries and deletes them: the only client of its queue."""

    def work(self) -> Iterator[float]:
        rng = self.rng
        while not self.shared.stop_enqueuing.is_set():
            self.calls.enqueue(BULK, [self.job(attempts=1) for _ in range(rng.choice((3, 10)))])
            yield 0.05
            held = self.calls.dequeue(BULK, limit=rng.choice((4, 8))) or []
            self.calls.ack(BULK, succeeded=held[:1], failed=held[1:])
            yield 0.05
            priority, limit = rng.choice(PRIORITIES), rng.choice((2, 100))
            if rng.random() < 0.6:
                self.calls.retry(BULK, priority, rng.choice((1, 2)), limit)
            else:
                state = rng.choice(list(JobState))
                self.calls.delete(BULK, state, priority, limit)
            yield 0.05
            self.calls.scan(BULK, rng.choice(list(JobState)))
            yield rng.uniform(0.05, 0.2)


class Searcher(Client):
    """Looks for jobs by their bodies, to the end of what there is, and counts them."""

    def work(self) -> Iterator[float]:
        rng = self.rng
        states = (JobState.PENDING, JobState.PENDING, *JobState)
        while not self.shared.stop_enqueuing.is_set():
            queue, state = rng.choice((WORK, BRIEF, BULK)), rng.choice(states)
            pattern = rf"^[a-z]+[0-9]*\.[0-9]*{rng.choice(('', rng.randrange(10)))}/"
            future = rng.random() < 0.5
            self.calls.search(
                queue, state, pattern, future=future, page_size=rng.choice((3, 20, 1000))
            )
            yield rng.uniform(0.1, 0.3)
            self.calls.count(queue, state, future=future, pattern=pattern)
            yield rng.uniform(0.1, 0.3)


class Cutter(Client):
    """Cuts its connection within a large answer, and looks whether those claims are released."""

    def work(self) -> Iterator[float]:
        while not self.shared.stop_enqueuing.is_set():
            stored = self._store()
            self.calls.dequeue(LARGE, limit=_LARGE_JOBS, read_bytes=40)
            self.calls.close()
            yield 4.5
            self.calls.lookup(stored[::20])
            while held := self.calls.dequeue(LARGE, limit=50):
                self.calls.ack(LARGE, succeeded=held)
            self.calls.delete(LARGE, JobState.SUCCEEDED, 1, 2 * _LARGE_JOBS)
            yield 3.0

    def _store(self) -> list[str]:
        stored: list[str] = []
        for _ in range(_LARGE_JOBS // 50):
            self.serial += 50
            names = [f"{self.name}.{number}/0/" for number in range(self.serial - 50, self.serial)]
            jobs = [(name + "x" * _LARGE_BODY_BYTES, 1, 3, 0) for name in names]
            stored += self.calls.enqueue(LARGE, jobs) or []
        return stored


class OneAttempt(Client):
    """Has jobs run at most once: ends some, forgets others, and dies within answers."""

    def work(self) -> Iterator[float]:
        rng = self.rng
        while not self.shared.stop_enqueuing.is_set():
            self.serial += _ONCE_JOBS // 2
            numbers = range(self.serial - _ONCE_JOBS // 2, self.serial)
            body = "x" * _ONCE_BODY_BYTES
            self.calls.enqueue(ONCE, [(f"{self.name}.{n}/0/{body}", 1, 1, 0) for n in numbers])
            yield rng.uniform(0.05, 0.2)
            if rng.random() < 0.5:
                most = rng.randrange(_ONCE_JOBS * _ONCE_BODY_BYTES)
                self.calls.dequeue(ONCE, limit=_ONCE_JOBS, read_bytes=most)
                self.calls.close()
            else:
                held = self.calls.dequeue(ONCE, limit=5) or []
                self.calls.ack(ONCE, succeeded=held[:2], failed=held[2:4])
            yield rng.uniform(0.05, 0.2)


class Limited(Client):
    """Works on a queue that has more jobs ready than may be in progress."""

    def work(self) -> Iterator[float]:
        rng = self.rng
        while not self.shared.stop_enqueuing.is_set():
            self.serial += 2
            names = [f"{self.name}.{number}/0" for number in (self.serial - 1, self.serial)]
            self.calls.enqueue(LIMITED, [(name, 1, 3, 0) for name in names])
            held = self.calls.dequeue(LIMITED, limit=rng.choice((1, 2)), wait_ms=200) or []
            yield rng.uniform(0.01, 0.1)
            if held and rng.random() < 0.95:  # else their claims time out
                self.calls.ack(LIMITED, succeeded=held)


class Builder(Client):
    """Makes a queue, uses it and deletes it, again and again."""

    def work(self) -> Iterator[float]:
        rng = self.rng
        while not self.shared.stop_enqueuing.is_set():
            if self.calls.create_queue(TEMPORARY):
                self.calls.enqueue(TEMPORARY, [self.job() for _ in range(6)])
                yield 0.05
                held = self.calls.dequeue(TEMPORARY, limit=3) or []
                self.calls.ack(TEMPORARY, succeeded=held[:2])
                self.calls.count(TEMPORARY, JobState.PENDING)
                yield 0.05
            self.calls.delete_queue(TEMPORARY, self.shared.password)
            self.calls.queue_names()
            yield rng.uniform(0.3, 1.0)


def drain(calls: Calls, history: History, *, seconds: float) -> None:
    """Work off all that is ready; afterwards no job is, or the judge finds those that are."""
    deadline = time.monotonic() + seconds
    empty_since: dict[str, float] = {}
    left = list(DRAINED_SECONDS)
    while left and time.monotonic() < deadline:
        time.sleep(0.1 if len(empty_since) == len(left) else 0.0)
        for queue in list(left):
            asked_at = time.monotonic()
            held = calls.dequeue(queue, limit=500)
            if held:
                calls.ack(queue, succeeded=held)
            if held != []:
                empty_since.pop(queue, None)
            elif asked_at - empty_since.setdefault(queue, asked_at) > DRAINED_SECONDS[queue]:
                history.add(Record(asked_at, asked_at, calls.name, "drained", {"queue": queue}))
                left.remove(queue)
                del empty_since[queue]
