"""Calls that several shards answer together: split by shard, sent to all at once, merged.

createQueue and getQueueNames go round a shard that is down; deleteQueue, counts, scans, retries
and deletes over all shards need every one of them, and name those that are missing; only a scan
that accepts a part leaves these out. Acks, checkpoints and look-ups need only the shards that their
descriptors name. A call that needs a shard that has gone a moment ago waits for it, so nothing
fails while a shard is restarted.

Splitting and merging is pure. Relies on `rpc` for bytes, on `shards` for whom to ask.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeVar, cast

from pinlaterd.config.password import AdminPasswords
from pinlaterd.config.ticket import accept_ticket
from pinlaterd.errors import (
    BadDescriptors,
    ContinuationInvalid,
    ErrorCode,
    InvalidRequest,
    LookupTooLarge,
    NoHealthyShards,
    Overloaded,
    PinLaterError,
    QueueNameInvalid,
    QueueNameTooLong,
    ShardConnectionFailed,
)
from pinlaterd.lifecycle import aside, begin_aside
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    QUEUE_NAME,
    AckInfo,
    AckOutcomes,
    AckRequest,
    CheckpointInfo,
    CheckpointOutcomes,
    CheckpointRequest,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    FinishInfo,
    FinishOutcome,
    FinishRequest,
    FinishResult,
    JobChoice,
    JobDescriptor,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueKey,
    QueueNamesRequest,
    Request,
    Result,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
    ScanResult,
)
from pinlaterd.router.call import Call, Query, Replies, Shared, ask_all, results_of
from pinlaterd.rpc import codec
from pinlaterd.rpc.tuned import ack_parts
from pinlaterd.wire.envelope import Op, ReplyEntry, Status
from pinlaterd.wire.link import ShardLink

log = logging.getLogger(__name__)

S = TypeVar("S")
_Item = TypeVar("_Item", AckInfo, CheckpointInfo, FinishInfo)
_Outcome = TypeVar("_Outcome", bool, FinishOutcome)
_OfItems = TypeVar("_OfItems", AckRequest, CheckpointRequest, FinishRequest)
# Divides the items of a request by shard, and finds those that no shard has.
_ByShard = Callable[
    [_OfItems, Mapping[str, ShardLink]], tuple[dict[ShardLink, _OfItems], list[str]]
]
# The most that a descriptor's local id has.
_ID_DIGITS = 19
_DELETE_AGAIN_SECONDS = 0.05
_LARGEST_I32 = 2**31 - 1
_CarryOut = Callable[[Query, Any], Coroutine[Any, Any, Result]]
_MILLIS = struct.Struct(">q")
# Ages of as many jobs are read, of each shard at once.
_RETRIED_AT_A_TIME = 2_000
# Shorter pages are full wherever there are enough jobs; of a longer one shards are asked for their
# shares, and an eighth more, since the page ends where the first of them does.
_FULL_PAGE_JOBS = 1_000
_MORE_THAN_SHARE = 8
# A part that begins then may use four fifths of what is left (shard/bulk.py), and be answered.
_USABLE_TIME = 0.5


class FanOut:
    """The methods that take several shards, each as a coroutine that returns its result."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._shards = shared.shards
        self._creating: set[str] = set()
        self._passwords = AdminPasswords()
        self._by_method: dict[Method, _CarryOut] = {
            Method.CREATE_QUEUE: self._create_queue,
            Method.DELETE_QUEUE: _logged(self._delete_queue, shared),
            Method.ACK: self.ack,
            Method.ACK_JOBS: self._ack_jobs,
            Method.CHECKPOINT: self._checkpoint,
            Method.FINISH: self._finish,
            Method.APPLY_CHECKPOINTS: self._apply_checkpoints,
            Method.LOOKUP: self._lookup,
            Method.COUNT: self._count,
            Method.QUEUE_NAMES: self._queue_names,
            Method.SCAN: self._scan,
            Method.RETRY_FAILED: _logged(self._retry_failed, shared),
            Method.DELETE_JOBS: _logged(self._delete_jobs, shared),
        }

    async def run(self, call: Call) -> None:
        """Decode `call`, carry it out and answer it."""
        method, size = call.peek.method, len(call.message)
        assert method is not None
        _, context, request = await call.decode(self._shared)
        query = Query(method, context, call.deadline, size, call.connection.peer)
        answer = await self._by_method[method](query, request)
        # Only the answers to look-ups and scans may be large.
        message = await aside(call.granted_bytes, codec.encode_reply, call.peek.head, answer)
        call.reply(message)

    # --- queues ------------------------------------------------------------------------------

    async def _create_queue(self, query: Query, request: CreateQueueRequest) -> None:
        """Create the queue on all healthy shards; others create it before they serve."""
        _check_queue_name(request.queue)
        longest = self._shards.longest_queue_name()
        if len(request.queue) > longest:
            raise QueueNameTooLong(request.queue, longest)
        self._check_room_for(request.queue)
        shards, asked = self._present(), set[ShardLink]()
        self._creating.add(request.queue)
        try:
            while shards:
                await query.ask(zip(shards, repeat(request)))
                asked.update(shards)
                # One that was welcomed meanwhile was greeted before its queue was known here.
                shards = [shard for shard in self._shards.healthy() if shard not in asked]
        finally:
            self._creating.discard(request.queue)

    def _check_room_for(self, queue: str) -> None:
        """Check the limit before any shard creates it, with the creations under way here. Several
        routers at once may exceed it by one queue each."""
        most = self._shared.settings.max_queues
        shards = self._shards
        if shards.knows_queue(queue):
            return
        new = [name for name in self._creating if not shards.knows_queue(name)]
        if shards.most_queues() + len(new) >= most:
            raise InvalidRequest(
                f"queue {queue!r} can't be created: there are {most} queues or more, as many as "
                "max_queues in etc/pinlaterd.yaml allows; delete unused ones, or raise max_queues"
            )

    async def _delete_queue(self, query: Query, request: DeleteQueueRequest) -> None:
        """Delete the queue on all shards or on none, since one that is down would bring it back."""
        if not accept_ticket(request.password, request.queue):
            stored = self._shared.settings.admin_password_hash
            address = query.peer.rpartition(":")[0]
            seconds = query.deadline - self._shared.clock.monotonic()
            await self._passwords.check(request.password, stored, address, seconds)
        _check_queue_name(request.queue)
        until, begun = self._usable_until(query.deadline), False
        while True:
            if self._shards.unhealthy():
                # Some are returning, or this fails: see that all are there before any of them acts.
                names = query._replace(method=Method.QUEUE_NAMES)
                await names.ask(zip(self._every(begun=begun), repeat(QueueNamesRequest())))
            # A shard that goes in order before it hears of it must not hear of it after it has come
            # back, as of other calls: with its welcome it has brought the queue back to the others
            # by then. So all of them are asked again, while one after the other is moved.
            asked = zip(self._every(begun=begun), repeat(request))
            replies, begun = await query.replies(asked, patient=False), True
            refused = any(
                reply.status is Status.REFUSED and (shard.returning or shard.healthy)
                for shard, reply in replies
            )
            if not refused or self._shared.clock.monotonic() >= until:
                break
            await asyncio.sleep(_DELETE_AGAIN_SECONDS)
        results_of(query.method, replies)

    async def _queue_names(self, query: Query, request: QueueNamesRequest) -> frozenset[str]:
        names = await query.ask(zip(self._present(), repeat(request)))
        return frozenset().union(*cast("list[frozenset[str]]", names))

    # --- jobs by descriptor --------------------------------------------------------------------

    async def ack(self, query: Query, request: AckRequest) -> None:
        """Send each shard its acks. Those that can go nowhere fail alone, after all the others."""
        if not self._shards.knows_queue(request.queue):
            # Let a shard say what is wrong with the queue, also when there is nothing to ack.
            await self._ask_one(query, AckRequest(request.queue))
        requests, bad = await aside(query.size, acks_by_shard, request, self._shards.by_name)
        replies = await asyncio.gather(
            *map(_ask_to_ack, requests, repeat(query), requests.values())
        )
        results_of(query.method, list(zip(requests, replies, strict=True)))
        if bad:
            raise BadDescriptors(bad, "this queue and its shards")

    async def _ack_jobs(self, query: Query, request: AckRequest) -> AckOutcomes:
        """Send each shard its acks; return their outcomes in the order of the request."""
        answers = await self._ask_each(query, request, AckRequest(request.queue), acks_by_shard)
        succeeded = [(shard, answer.succeeded) for shard, answer in answers.items()]
        failed = [(shard, answer.failed) for shard, answer in answers.items()]
        return AckOutcomes(in_order(request.succeeded, succeeded), in_order(request.failed, failed))

    async def _checkpoint(self, query: Query, request: CheckpointRequest) -> None:
        empty = request._replace(checkpoints=())
        await self._ask_each(query, request, empty, checkpoints_by_shard)

    async def _apply_checkpoints(
        self, query: Query, request: CheckpointRequest
    ) -> CheckpointOutcomes:
        """Send each shard its checkpoints; return their outcomes in the order of the request."""
        empty = request._replace(checkpoints=())
        answers = await self._ask_each(query, request, empty, checkpoints_by_shard)
        applied = [(shard, answer.applied) for shard, answer in answers.items()]
        return CheckpointOutcomes(in_order(request.checkpoints, applied))

    async def _finish(self, query: Query, request: FinishRequest) -> FinishResult:
        empty = FinishRequest(request.queue, ())
        answers = await self._ask_each(query, request, empty, finishes_by_shard)
        outcomes = [(shard, answer.outcomes) for shard, answer in answers.items()]
        return FinishResult(in_order(request.finishes, outcomes))

    async def _ask_each(
        self, query: Query, request: _OfItems, empty: _OfItems, divide: _ByShard[_OfItems]
    ) -> Mapping[str, Any]:
        """Send each shard its items; return the answers by the shard's name. Items that can go
        nowhere fail alone, after all the others."""
        if not self._shards.knows_queue(request.queue):
            # Let a shard say what is wrong with the queue, also when there is nothing to send.
            await self._ask_one(query, empty)
        requests, bad = await aside(query.size, divide, request, self._shards.by_name)
        answers = await query.ask(requests.items())
        if bad:
            raise BadDescriptors(bad, "this queue and its shards")
        return dict(zip([shard.name for shard in requests], answers, strict=True))

    async def _lookup(self, query: Query, request: LookupRequest) -> Mapping[str, JobRecord]:
        if not self._shards.by_name:
            raise NoHealthyShards  # which shards there are is not known yet
        shards = self._shards.by_name
        by_shard = await aside(query.size, lookups_by_shard, request.descriptors, shards)
        named = [
            (shard.name, 0, LookupRequest(descriptors, request.include_body))
            for shard, descriptors in by_shard.items()
        ]
        while True:
            by_key, asked = self._lookups_by_key(request), []
            for name, placement, one in (*named, *by_key):
                call = await aside(query.size, query.part, one)
                call.placement = placement
                asked.append((shards[name], call))
            replies = await ask_all(asked)
            if all(reply.status is not Status.STALE for _, reply in replies):
                break
            await self._shards.try_keys_again(query.deadline, [name for name, *_ in by_key])
        most_bytes = self._shared.settings.max_frame_bytes  # each shard sees to its own part only
        size = sum(len(reply.payload) for _, reply in replies)
        if size > most_bytes:
            raise LookupTooLarge(most_bytes)
        found: dict[str, JobRecord] = {}
        for part in await aside(size, results_of, query.method, replies):
            found.update(cast("Mapping[str, JobRecord]", part))
        return found

    def _lookups_by_key(self, request: LookupRequest) -> list[tuple[str, int, LookupRequest]]:
        """Divide keys by the shards that may hold them, and by the placement under which each is to
        answer; 0: any. Raises ShardConnectionFailed."""
        homes, found = self._shards.homes, defaultdict[tuple[str, int], list[QueueKey]](list)
        for key in dict.fromkeys(request.keys or ()):
            home = homes.of(key)
            for name in home.former:
                found[name, 0].append(key)
            if home.responsible:
                found[home.responsible, homes.placement.number].append(key)
        unknown = {name for name, _ in found} - self._shards.by_name.keys()
        if unknown:
            raise ShardConnectionFailed(
                sorted(unknown), "is not known here yet; nothing was done there"
            )
        return [(*at, LookupRequest((), request.include_body, keys)) for at, keys in found.items()]

    # --- jobs by state -------------------------------------------------------------------------

    async def _count(self, query: Query, request: CountRequest) -> int:
        counts = await query.ask(zip(self._every(), repeat(request)))
        return min(_LARGEST_I32, sum(cast("list[int]", counts)))

    async def _scan(self, query: Query, request: ScanRequest) -> ScanResult:
        if (
            request.continuation != CONTINUATION_START
            and ScanKey.parse_token(request.continuation) is None
        ):
            raise ContinuationInvalid(request.continuation)
        limit = min(request.limit, self._shared.settings.scan_limit)
        healthy = self._shards.healthy() if request.accept_partial else []
        shards = healthy or self._every()
        share = share_of_page(limit, len(shards)) if request.newest_end_first else limit
        part = request._replace(limit=share, accept_partial=False)
        # One that goes meanwhile is left out at once, but for the last one.
        replies = await query.replies(zip(shards, repeat(part)), patient=len(healthy) <= 1)
        missing: list[str] = []
        if request.accept_partial:
            replies, missing = of_available(replies, self._shards.by_name)
        merged = await _merge(replies, limit, by_end=request.newest_end_first)
        return merged._replace(missing_shards=missing) if missing else merged

    async def _retry_failed(self, query: Query, request: RetryFailedRequest) -> int:
        """Retry the oldest over all shards, a bounded number at a time, or those chosen."""
        if request.chooses:
            return await self._change_chosen(query, request)
        until = self._usable_until(query.deadline)
        retried = 0
        while True:
            wanted = min(request.limit - retried, _RETRIED_AT_A_TIME)
            shares = await self._oldest_failed(query, request, wanted, begun=retried > 0)
            done = await query.ask(
                (shard, request._replace(limit=share)) for shard, share in shares.items()
            )
            retried += sum(cast("list[int]", done))
            # After the last of them come those that have been retried by this call, and failed.
            were_all = sum(shares.values()) < wanted
            if were_all or retried >= request.limit or self._shared.clock.monotonic() >= until:
                return retried

    async def _oldest_failed(
        self, query: Query, request: RetryFailedRequest, wanted: int, *, begun: bool
    ) -> Mapping[ShardLink, int]:
        """Ask each shard how old its candidates are; return its share of the oldest."""
        asked = zip(self._every(begun=begun), repeat(request._replace(limit=wanted)))
        replies = await query.replies(asked, Op.OLDEST_FAILED)
        if any(reply.status is not Status.DONE for _, reply in replies):
            results_of(query.method, replies)  # raises why
        candidates = {
            shard: [age for (age,) in _MILLIS.iter_unpack(reply.payload)]
            for shard, reply in replies
            if self._is_known(shard)
        }
        return share_of_oldest(candidates, wanted)

    async def _delete_jobs(self, query: Query, request: DeleteJobsRequest) -> int:
        if request.chooses:
            return await self._change_chosen(query, request)
        return await self._in_equal_parts(query, request)

    async def _change_chosen(
        self, query: Query, request: RetryFailedRequest | DeleteJobsRequest
    ) -> int:
        """Have shards change the jobs that a request names, or finds; return how many."""
        choice, shards = request.options or JobChoice(), self._shards.by_name
        if choice.descriptors is None:
            if not request.dry_run:
                return await self._in_equal_parts(query, request)
            counts = await query.ask(zip(self._every(), repeat(request)))
            return min(request.limit, sum(cast("list[int]", counts)))
        named: dict[ShardLink, list[str]] = defaultdict(list)
        bad: list[str] = []
        for descriptor in dict.fromkeys(choice.descriptors):
            shard = _shard_of(descriptor, request.queue, shards)
            (bad if shard is None else named[shard]).append(descriptor)
        if bad:
            shown = ", ".join(repr(descriptor[:200]) for descriptor in bad[:10])
            raise InvalidRequest(
                f"jobDescriptors holds some of no job of queue {request.queue!r}: {shown}; nothing "
                "was changed"
            )
        if not self._shards.knows_queue(request.queue):
            await self._ask_one(query, CountRequest(request.queue, JobState.FAILED))
        asked = [
            (shard, request._replace(options=choice._replace(descriptors=part)))
            for shard, part in named.items()
        ]
        return sum(cast("list[int]", await query.ask(asked)))

    async def _in_equal_parts(
        self, query: Query, request: RetryFailedRequest | DeleteJobsRequest
    ) -> int:
        """Give each shard an equal part of what is left to do, so that together they never change
        more than the limit; then those that may have more, until all is done."""
        until = self._usable_until(query.deadline)
        shards = self._every()
        self._shared.rng.shuffle(shards)
        changed = 0
        while True:
            each, more = divmod(request.limit - changed, len(shards))
            limits = {
                shard: each + (place < more)
                for place, shard in enumerate(shards)
                if each + (place < more) > 0
            } or {shards[0]: request.limit}  # which says what is wrong with the limit
            counts = await query.ask(
                (shard, request._replace(limit=limit)) for shard, limit in limits.items()
            )
            for (shard, limit), count in zip(
                limits.items(), cast("list[int]", counts), strict=True
            ):
                changed += count
                # One that stops has done a part only; a second search would cost too much.
                if not count or (request.chooses and count < limit):
                    shards.remove(shard)
            shards = [shard for shard in shards if self._is_known(shard)]
            if not shards or changed >= request.limit:
                return changed
            if changed and self._shared.clock.monotonic() >= until:
                return changed

    def _is_known(self, shard: ShardLink) -> bool:
        """Tell whether a shard was not removed meanwhile: then it is asked nothing more."""
        return self._shards.by_name.get(shard.name) is shard

    def _usable_until(self, deadline: float) -> float:
        """Return when a call that changes many jobs begins nothing more, to be answered in time."""
        now = self._shared.clock.monotonic()
        return now + (deadline - now) * _USABLE_TIME

    # --- asking --------------------------------------------------------------------------------

    def _present(self) -> list[ShardLink]:
        present = self._shards.present()
        if not present:
            raise NoHealthyShards
        return present

    def _every(self, *, begun: bool = False) -> list[ShardLink]:
        """Return all shards; raise an error that names those that are down. `begun`: whether the
        call may have done something."""
        down = self._shards.down()
        if down:
            done = "a part of it may have been done" if begun else "nothing was done"
            raise ShardConnectionFailed(down, f"down; this call needs every shard; {done}")
        if not self._shards.by_name:
            raise NoHealthyShards
        return list(self._shards.by_name.values())

    async def _ask_one(self, query: Query, request: Request) -> None:
        await query.ask([(self._shared.rng.choice(self._present()), request)])


def _shown(value: object) -> str:
    """Escape a value for the log, a long text only as far as it is shown."""
    if isinstance(value, JobState):
        return str(value)
    if isinstance(value, JobChoice) and value.descriptors is not None:
        value = value._replace(descriptors=[f"{len(value.descriptors)} descriptors"])
    return repr(value[:200] if isinstance(value, str) else value)


def _logged(carry_out: _CarryOut, shared: Shared) -> _CarryOut:
    """Have a call that changes much leave a line in the log: what it was, whose, what it did. Jobs
    that it has changed are noted for the coordinator."""

    async def carry_out_and_log(query: Query, request: Any) -> Result:
        outcome = "given up"
        try:
            changed = await carry_out(query, request)
            outcome = "done" if changed is None else f"{changed} jobs"
            if changed and not request.dry_run:
                place = (request.queue, query.method.value)
                shared.mends[place] = shared.mends.get(place, 0) + cast("int", changed)
        except PinLaterError as error:
            outcome = "" if isinstance(error, Overloaded) else f"failed: {error.message}"
            raise
        finally:
            if outcome:  # else nothing was done, and thousands may be refused so
                fields = request._asdict()
                fields.pop("password", None)
                asked = [
                    f"{name}={_shown(value)}"
                    for name, value in fields.items()
                    if value is not None and value is not False
                ]
                who = f"{query.peer} ({_shown(query.context.source)})"
                log.warning("%s by %s: %s: %.500s", query.method, who, ", ".join(asked), outcome)
        return changed

    return carry_out_and_log


async def _ask_to_ack(shard: ShardLink, query: Query, request: AckRequest) -> ReplyEntry:
    """Send one part after the other, so that others' calls come in between.

    What is wrong with one of them is told once all are carried out.
    """
    wrong: ReplyEntry | None = None
    for part in ack_parts(request):
        reply = await shard.ask(query.part(part))
        if reply.status is Status.FAILED:
            wrong = wrong or reply
        elif reply.status is not Status.DONE:
            return reply
    return wrong or reply


def _check_queue_name(queue: str) -> None:
    if QUEUE_NAME.match(queue) is None:
        raise QueueNameInvalid(queue)


# --- splitting ------------------------------------------------------------------------------


def _shard_of(descriptor: str, queue: str, shards: Mapping[str, S]) -> S | None:
    parsed = JobDescriptor.parse(descriptor)
    return shards.get(parsed.shard) if parsed is not None and parsed.queue == queue else None


def _divide(
    items: Iterable[_Item], queue: str, shards: Mapping[str, S], by_shard: dict[S, list[_Item]]
) -> list[str]:
    """Add each item to those of its shard; returns the descriptors that name no job of these."""
    bad = []
    # Jobs that are named together mostly have all but their local ids in common: what comes before
    # those is understood once.
    known: dict[str, list[_Item]] = {}
    for item in items:
        descriptor = item.descriptor
        head, _, id_text = descriptor.rpartition(":")
        plain = id_text.isdigit() and id_text.isascii() and len(id_text) <= _ID_DIGITS
        if plain and head in known:
            known[head].append(item)
        elif (shard := _shard_of(descriptor, queue, shards)) is None:
            bad.append(descriptor)
        else:
            known[head] = by_shard.setdefault(shard, [])
            known[head].append(item)
    return bad


def acks_by_shard(
    request: AckRequest, shards: Mapping[str, S]
) -> tuple[dict[S, AckRequest], list[str]]:
    """Divide acks by shard, and return the descriptors that are malformed or name no job here."""
    succeeded: dict[S, list[AckInfo]] = {}
    failed: dict[S, list[AckInfo]] = {}
    bad = _divide(request.succeeded, request.queue, shards, succeeded)
    bad += _divide(request.failed, request.queue, shards, failed)
    return {
        shard: AckRequest(request.queue, succeeded.get(shard, ()), failed.get(shard, ()))
        for shard in {**succeeded, **failed}
    }, bad


def in_order(
    infos: Iterable[AckInfo | CheckpointInfo | FinishInfo],
    by_shard: Iterable[tuple[str, Iterable[_Outcome]]],
) -> list[_Outcome]:
    """Return the outcomes of a call's items in their order, from those of each shard in its own."""
    left = {shard: iter(outcomes) for shard, outcomes in by_shard}
    return [next(left[info.descriptor.split(":", 2)[1][1:]]) for info in infos]


def checkpoints_by_shard(
    request: CheckpointRequest, shards: Mapping[str, S]
) -> tuple[dict[S, CheckpointRequest], list[str]]:
    found: dict[S, list[CheckpointInfo]] = {}
    bad = _divide(request.checkpoints, request.queue, shards, found)
    return {shard: request._replace(checkpoints=items) for shard, items in found.items()}, bad


def finishes_by_shard(
    request: FinishRequest, shards: Mapping[str, S]
) -> tuple[dict[S, FinishRequest], list[str]]:
    found: dict[S, list[FinishInfo]] = {}
    bad = _divide(request.finishes, request.queue, shards, found)
    return {shard: FinishRequest(request.queue, items) for shard, items in found.items()}, bad


def lookups_by_shard(descriptors: Iterable[str], shards: Mapping[str, S]) -> dict[S, list[str]]:
    """Divide descriptors by shard; those of no shard of ours are left out."""
    by_shard: dict[S, list[str]] = defaultdict(list)
    for descriptor in dict.fromkeys(descriptors):
        parsed = JobDescriptor.parse(descriptor)
        if parsed is not None and parsed.shard in shards:
            by_shard[shards[parsed.shard]].append(descriptor)
    return by_shard


# --- merging --------------------------------------------------------------------------------


def share_of_oldest(candidates: Mapping[S, Sequence[int]], limit: int) -> dict[S, int]:
    """Count how many of the `limit` oldest come from each sorted list of ages, if any do."""
    tagged = ([(age, index) for age in ages] for index, ages in enumerate(candidates.values()))
    shards = list(candidates)
    shares: dict[S, int] = defaultdict(int)
    for taken, (_, index) in enumerate(heapq.merge(*tagged)):
        if taken == limit:
            break
        shares[shards[index]] += 1
    return shares


def share_of_page(limit: int, shards: int) -> int:
    """Return how many jobs of a page each shard is asked for: all that it reads beyond the merged
    page it reads again for the next one."""
    if limit <= _FULL_PAGE_JOBS:
        return limit
    share = -(-limit // shards)
    return min(limit, share + share // _MORE_THAN_SHARE)


def of_available(replies: Replies, shards: Iterable[str]) -> tuple[Replies, list[str]]:
    """Return the replies of shards that answered, or all if none did, and the names of the others.
    An error that is the caller's is an answer."""
    available = [pair for pair in replies if not _is_unavailable(pair[1])] or replies
    names = {shard.name for shard, _ in available}
    return available, [name for name in shards if name not in names]


def _is_unavailable(reply: ReplyEntry) -> bool:
    if reply.status is Status.FAILED:  # by its store
        return codec.peek_error(reply.payload) is ErrorCode.SHARD_CONNECTION_FAILED
    return reply.status is not Status.DONE


def _scan_key(job: JobRecord, *, by_end: bool) -> ScanKey:
    parsed = JobDescriptor.parse(job.descriptor)
    assert parsed is not None, job.descriptor
    time_ms = job.updated_at_ms if by_end else job.run_after_ms
    return ScanKey(time_ms, parsed.shard, parsed.priority, parsed.local_id)


async def _merge(replies: Replies, limit: int, *, by_end: bool) -> ScanResult:
    size = sum(len(reply.payload) for _, reply in replies)
    results = await aside(size, results_of, Method.SCAN, replies)
    merge = partial(merge_scans, by_end=by_end)
    return await begin_aside(merge, cast("list[ScanResult]", results), limit)


def merge_scans(results: Sequence[ScanResult], limit: int, *, by_end: bool = False) -> ScanResult:
    """Return the first `limit` of what the shards found, and where to go on. A shard that has not
    finished knows nothing of what comes behind its continuation: there the merged answer ends."""
    keyed = sorted(
        ((_scan_key(job, by_end=by_end), job) for result in results for job in result.jobs),
        key=lambda pair: pair[0].sort_key(),
    )
    ends = [key for result in results if (key := ScanKey.parse_token(result.continuation))]
    end = min(ends, key=ScanKey.sort_key, default=None)
    known = [pair for pair in keyed if end is None or pair[0].sort_key() <= end.sort_key()]
    if len(known) > limit:
        known, end = known[:limit], known[limit - 1][0]
    held = [result.in_state for result in results if result.in_state is not None]
    return ScanResult(
        [job for _, job in known],
        end.token() if end else CONTINUATION_END,
        sum(result.looked_at for result in results),
        sum(held) if len(held) == len(results) else None,
    )
