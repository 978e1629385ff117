"""The pages on which the service is mended: /mend shows a change and makes it, /op/ID shows an
operation, /audit all changes.

A GET changes nothing. A form has a nonce, so that it acts once however often it is sent, and the
conditions that its page has shown, with the cut-off: so it changes those jobs only. Each page has
the command that does the same.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from multidict import MultiMapping

from pinlaterd.access import may, may_with_all_queues
from pinlaterd.client import calls
from pinlaterd.config import layout
from pinlaterd.config.schema import UserSettings
from pinlaterd.errors import ConfigError, ConnectionFailed, ShardConnectionFailed, how_many
from pinlaterd.model import QUEUE_NAME, SHARD_NAME, JobRecord, JobState
from pinlaterd.signature import signature
from pinlaterd.web import text
from pinlaterd.web.audit import FAILED, AuditLog, Change
from pinlaterd.web.commands import OperationCalls
from pinlaterd.web.job import hidden_pattern, last_said
from pinlaterd.web.live import Cells, LiveFrame, LookedUp
from pinlaterd.web.operations import (
    ENDED,
    FIRST_JOBS,
    RESTORE,
    Operation,
    Operations,
    Phase,
    Selection,
    nonce_of_restore,
    pages,
)
from pinlaterd.web.queue import queue_in
from pinlaterd.web.refusals import (
    PageProblem,
    config_problem,
    log_refusal,
    mistake,
    whole_number,
)
from pinlaterd.web.selections import commands_of, fields_of, in_words, list_of, selection_of
from pinlaterd.web.site import ALL_QUEUES, FORM, USER, Site, own_path

_TYPED_JOBS = 1_000  # to delete more, the queue's name has to be typed
_MOST_COUNTED, _COUNT_SECONDS, _PAGE_JOBS = 10_000, 2.0, 1_000
_NOTHING_SECONDS = 8.0  # for which it is looked in addition while nothing was found
_SAMPLES, _SAID_CHARS = 5, 200
_MOST_REASON_CHARS = 200
_MOST_NONCE_CHARS = 100
_MOST_EXPECTED, _MOST_ATTEMPTS, _LEAST_PER_SECOND = 10**12, 1_000, 0.001
_MOST_DIGITS = 9  # of an operation's number
_CLEAN_SECONDS = 3_600.0
_NOT_IN_TRASH = "Its jobs are no more in the trash."
_MISTAKES = "the configuration has mistakes"
_WITHOUT_SHARD = (
    "A change by conditions needs every shard. Jobs of the others that you choose in their list "
    "can be changed meanwhile."
)
_ROWS = 100  # of the audit page


class Preview(NamedTuple):
    """The jobs of a selection, as far as they were looked for; `is_bound`: there may be more.
    `first`: those that would be tried first."""

    jobs: int
    is_bound: bool
    first: Sequence[JobRecord]

    @property
    def least(self) -> str:
        """Return what stands in front of the number of jobs."""
        return "at least " if self.is_bound else ""


class Switch(NamedTuple):
    """A setting of a queue or a shard, and the value that it is to have."""

    setting: str  # paused, limit, dequeue_only
    name: str
    value: float | None = None

    @property
    def queue(self) -> str:
        """Return the queue that it is of; "" for a shard's."""
        return "" if self.setting == "dequeue_only" else self.name

    def before(self, etc: Path) -> float | None:
        """Read the value that it has now. Raises ConfigError."""
        # Only here: what reads and edits YAML takes 1.5 MB.
        from pinlaterd.config import edit, load  # noqa: PLC0415

        if self.setting == "dequeue_only":
            shards = load.load_config(etc).shards
            if self.name not in shards:
                raise ConfigError([f"there is no shard {self.name}"])
            return shards[self.name].dequeue_only
        limit, paused = edit.limit_settings(etc, self.name)
        return paused if self.setting == "paused" else limit

    async def make(self, site: Site, by: str, reason: str) -> None:
        """Set it, and wait until a cluster has accepted it. Raises ConfigError."""
        from pinlaterd.config import edit  # noqa: PLC0415 - as above

        etc, seconds = site.etc, site.config.server.request_timeout_ms / 1000

        def change() -> edit.Edited:
            if self.setting == "dequeue_only":
                return edit.set_dequeue_only(etc, self.name, on=bool(self.value))
            if self.setting == "paused":
                paused = bool(self.value)
                return edit.set_paused(etc, self.name, paused=paused, by=by, reason=reason)
            return edit.set_limit(etc, self.name, self.value)

        name = layout.QUEUES_FILE if self.queue else layout.SHARDS_FILE
        await edit.carry_out(etc / name, change, seconds)

    @property
    def words(self) -> str:
        """Say what it does."""
        if self.setting == "paused":
            return f"{'pause' if self.value else 'resume'} {self.name}"
        if self.setting == "limit":
            shown = "no limit" if self.value is None else f"at most {self.value:.10g} jobs/s"
            return f"{shown} of {self.name}"
        return f"shard {self.name} {'takes no new jobs' if self.value else 'takes new jobs'}"

    @property
    def command(self) -> str:
        """The command that does the same."""
        if self.setting == "paused":
            words = ["queue", "pause" if self.value else "resume", self.name]
        elif self.setting == "limit":
            words = ["queue", "limit", self.name]
            words.append("none" if self.value is None else f"{self.value:.10g}")
        else:
            words = ["shard", "dequeue-only", self.name, "on" if self.value else "off"]
        return shlex.join(["pinlater-admin", *words])


class _JobsFacts(msgspec.Struct):
    """The facts of an operation that the audit page reads."""

    queue: str
    expected: int = 0
    reason: str = ""
    selection: Selection | None = None


class _SwitchFacts(msgspec.Struct):
    """The facts of a setting's change that the audit page reads."""

    setting: Literal["paused", "limit", "dequeue_only"]
    name: str
    value: bool | float | None
    before: bool | float | None
    reason: str = ""


class MendPages:
    """The handlers of these pages."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._audit = AuditLog(layout.DATA / "audit.jsonl", site.clock)
        self._operations = Operations(site.client, layout.DATA, self._audit, site.clock)
        self._operations.settle()
        self._heads = LookedUp("op headline")  # by the operation's number
        site.live.add("op", self._cells)
        site.commands += [*OperationCalls(self._operations).routes(), web.get("/audit", self._rows)]
        self._clean_trash()

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the pages and of their forms."""
        site = self._site
        return [
            site.page("/mend", self._preview),
            site.action("/mend", self._act),
            site.page(r"/op/{number:\d{1,9}}", self._show),
            # What goes on may be stopped, also where nothing else may be changed any more.
            site.action(r"/op/{number:\d{1,9}}", self._steer, writes=False),
            site.page("/audit", self._list),
            site.action("/audit", self._undo),
        ]

    def _clean_trash(self) -> None:
        """Remove what is too old in the trash, now and each hour."""
        loop = asyncio.get_running_loop()
        loop.run_in_executor(None, self._operations.trash.clean)
        loop.call_later(_CLEAN_SECONDS, self._clean_trash)

    # --- retry, delete -------------------------------------------------------------------------

    async def _preview(self, request: web.Request) -> web.StreamResponse:
        given = request.query
        what = given.get("action", "retry")
        if what not in ("retry", "delete"):
            return await self._preview_switch(request, switch_of(given))
        selection = self._selected(request, given, what, self._site.clock.now_ms(), "view")
        try:
            found = await _look(self._site, selection)
        except ShardConnectionFailed as error:
            said = f"{str(error)[:1].upper()}{str(error)[1:]}"
            raise PageProblem(HTTPStatus.SERVICE_UNAVAILABLE, said, _WITHOUT_SHARD) from None
        number = f"{found.least}{found.jobs:,}"
        return self._site.render(
            request,
            "mend.html",
            queue=selection.queue,
            what=what,
            title=f"{what.capitalize()} {_jobs(found, selection)} of {selection.queue}?",
            words=in_words(selection, self._site.clock.now_ms()),
            effect=await _effect(self._site, what, selection.queue, found.jobs),
            found=found,
            samples=self._samples(request, found),
            fields=[*fields_of(selection), ("expected", found.jobs), ("bound", +found.is_bound)],
            first_jobs=FIRST_JOBS,
            typed=selection.queue if what == "delete" and _is_large(found) else "",
            commands=commands_of(what, selection, [job.descriptor for job in found.first]),
            button=f"{what.capitalize()} {min(found.jobs, FIRST_JOBS)} of {number}",
            button_of_all=f"{what.capitalize()} {number}",
            nonce=secrets.token_hex(16),
            cancel=_page_before(request) or list_of(selection),
        )

    def _selected(
        self, request: web.Request, given: MultiMapping[str], what: str, now_ms: int, role: str
    ) -> Selection:
        """Return the jobs that a query or a form chooses. Raises PageProblem, also if its user has
        not this role for them, or would learn what is hidden by how many match."""
        selection = selection_of(given, now_ms)
        if what == "retry" and selection.job_state is not JobState.FAILED:
            raise mistake("Only failed jobs can be retried.")
        self._site.check_right(request, role, selection.queue)
        is_search = selection.body_regex is not None or selection.choice.status_regex is not None
        if is_search and hidden_pattern(self._site, request):
            what = "Bodies and statuses have parts that you may not see, so you can't search them."
            cure = "An operator can give you the role `bodies`."
            raise PageProblem(HTTPStatus.FORBIDDEN, what, cure)
        return selection

    def _samples(self, request: web.Request, found: Preview) -> Sequence[JobRecord]:
        """Return the samples with what their last attempts had to say, as far as this user may see
        that."""
        pattern = hidden_pattern(self._site, request)
        # Redacted before it is cut: half a secret matches no pattern.
        return [
            job._replace(custom_status=last_said(job, pattern)[-_SAID_CHARS:])
            for job in found.first[:_SAMPLES]
        ]

    async def _act(self, request: web.Request) -> web.StreamResponse:
        form = request[FORM]
        what, nonce = form.get("action", ""), f"form {form.get('nonce', '')}"
        if not form.get("nonce") or len(nonce) > _MOST_NONCE_CHARS:
            raise mistake("The form has no nonce.")
        if what not in ("retry", "delete"):
            return await self._set(request, switch_of(form), nonce)
        selection = self._selected(request, form, what, 0, "operate")
        if not (selection.choice.ended_before_ms or selection.unchanged_since_ms):
            raise mistake("The form has no cut-off.")
        expected, is_bound = (
            whole_number(form, "expected", 0, 0, _MOST_EXPECTED),
            form.get("bound") == "1",
        )
        is_large = what == "delete" and (is_bound or expected > _TYPED_JOBS)
        if is_large and form.get("typed", "").strip() != selection.queue:
            raise mistake(f"Type the queue's name, {selection.queue}, to delete so many jobs.")
        mode = form.get("mode", "first")
        operation = Operation(
            what,
            self._who(request),
            nonce,
            selection,
            attempts=whole_number(form, "attempts", 1, 1, _MOST_ATTEMPTS),
            per_second=_spread_rate(form.get("per_second", "")) if mode == "spread" else 0.0,
            reason=_reason_of(form),
            expected=expected,
            is_bound=is_bound,
            first_jobs=FIRST_JOBS if mode == "first" else 0,
        )
        number = self._sent_before(request, operation.nonce)
        number = number or (await self._operations.begin(operation)).number
        raise web.HTTPSeeOther(f"/op/{number}")

    def _sent_before(self, request: web.Request, nonce: str) -> int | None:
        """Return the number of the change that a form has made before, which is logged; None: it
        makes one now."""
        number = self._audit.number_of(nonce)
        if number is not None:
            why = f"its form was sent before, for change {number}"
            log_refusal(request, why, self._who(request))
        return number

    # --- operations ----------------------------------------------------------------------------

    async def _show(self, request: web.Request) -> web.StreamResponse:
        operation = self._find(request, "view")
        selection, buttons = operation.selection, []
        hidden = hidden_pattern(self._site, request)
        left = max(0, operation.expected - operation.seen)
        is_restored = _is_restored(self._operations, operation)
        if operation.phase is not Phase.DONE:
            more = "" if operation.is_bound or not left else f" with {left:,}"
            if operation.phase is not Phase.RUNNING and not is_restored:
                buttons.append(("go_on", f"Go on{more}"))
            if operation.phase is not Phase.STOPPED:
                buttons.append(("stop", "Stop"))
        if not is_restored and self._operations.can_restore(operation):
            buttons.append((RESTORE, "Put back"))
        if not may(request.get(USER), "operate", selection.queue):
            buttons.clear()
        return self._site.render(
            request,
            "op.html",
            op=operation,
            headline=await self._heads.now(operation.number, partial(self._headline, operation)),
            words=in_words(selection, self._site.clock.now_ms(), hidden),
            jobs_path=f"/q/{selection.queue}" if hidden else list_of(selection),
            seen=operation.seen,
            buttons=buttons,
            queue=selection.queue,
        )

    def _cells(self, _frame: LiveFrame, name: str, user: UserSettings | None) -> Cells:
        is_number = name.isdecimal() and len(name) <= _MOST_DIGITS
        operation = self._operations.get(int(name)) if is_number else None
        if operation is None or not may(user, "view", operation.selection.queue):
            return {}
        return {
            "op phase": operation.phase,
            "op outcome": operation.outcome,
            "op seen": text.number(operation.seen),
            **self._heads.get(operation.number, partial(self._headline, operation)),
        }

    async def _headline(self, operation: Operation) -> str:
        """Say how an operation stands; while it asks, how its first jobs went."""
        if operation.phase is not Phase.ASKING or operation.what != "retry":
            return operation.outcome
        found = await self._site.client.run(calls.lookup(operation.tried))
        states = Counter(job.state for job in found.values())
        says = operation.selection.choice.message
        failed = [
            signature(job.custom_status, failed=True).message
            for job in found.values()
            if job.state is JobState.FAILED
        ]
        # An attempt after a retry says what it says right behind the last one before it.
        alike = [message for message in failed if says and message.endswith(says)]
        parts = [f"{len(operation.tried)} tried", f"{states[JobState.SUCCEEDED]} succeeded"]
        if alike:
            parts.append(f"{len(alike)} failed alike")
        if len(failed) > len(alike):
            parts.append(f"{len(failed) - len(alike)} failed")
        if waiting := states[JobState.PENDING] + states[JobState.IN_PROGRESS]:
            parts.append(f"{waiting} not yet")
        return ", ".join(parts)

    async def _steer(self, request: web.Request) -> web.StreamResponse:
        operation, wanted = self._find(request, "operate"), request[FORM].get("do")
        if wanted != "stop":
            self._site.check_writes(request)
        if wanted == "go_on" and self._operations.is_restored(operation):
            raise mistake("Its jobs were enqueued again: begin another delete.")
        if wanted in ("go_on", "stop"):
            await self._operations.steer(operation, wanted, self._who(request))
        elif wanted == RESTORE:
            raise web.HTTPSeeOther(f"/op/{await self._restore(request, operation)}")
        else:
            raise mistake("The form does not say what to do.")
        raise web.HTTPSeeOther(f"/op/{operation.number}")

    async def _restore(self, request: web.Request, deleted: Operation) -> int:
        """Begin to enqueue again what an operation has deleted, once; return the number."""
        number = self._sent_before(request, nonce_of_restore(deleted.number))
        if number is None and not self._operations.can_restore(deleted):
            is_gone = deleted.phase in ENDED
            raise mistake(_NOT_IN_TRASH if is_gone else "It has not ended yet: stop it first.")
        return number or (await self._operations.restore(deleted, self._who(request))).number

    def _find(self, request: web.Request, role: str) -> Operation:
        operation = self._operations.get(int(request.match_info["number"]))
        if operation is None:
            cure = "The audit page lists all changes."
            raise PageProblem(HTTPStatus.NOT_FOUND, "There is no such operation.", cure)
        self._site.check_right(request, role, operation.selection.queue)
        return operation

    # --- settings ------------------------------------------------------------------------------

    async def _preview_switch(self, request: web.Request, switch: Switch) -> web.StreamResponse:
        self._site.check_right(request, "view", switch.queue)
        before = await asyncio.to_thread(switch.before, self._site.etc)
        asked = "value" not in request.query and switch.setting == "limit"
        words = switch.words if not asked else f"limit {switch.name}"
        fields = [("action", switch.setting), ("name", switch.name)]
        if not asked:
            fields.append(("value", _shown(switch.value)))
        return self._site.render(
            request,
            "mend.html",
            queue=switch.queue or ALL_QUEUES,
            what=switch.setting,
            title=f"{words[:1].upper()}{words[1:]}?",
            words=f"Now: {switch._replace(value=before).words}. It can be undone.",
            effect="",
            found=None,
            fields=fields,
            asked=_shown(before) if asked else None,
            typed=switch.name if switch.setting == "dequeue_only" else "",
            commands={"set": switch.command},
            button=words[:1].upper() + words[1:],
            nonce=secrets.token_hex(16),
            cancel=_page_before(request) or (f"/q/{switch.name}" if switch.queue else "/system"),
        )

    async def _set(self, request: web.Request, switch: Switch, nonce: str) -> web.StreamResponse:
        """Set something once, with who and why; go to the audit page."""
        self._check_switch(request, switch)
        form = request[FORM]
        if switch.setting == "dequeue_only" and form.get("typed", "").strip() != switch.name:
            raise mistake(f"Type the shard's name, {switch.name}.")
        await self._make(request, switch, nonce, _reason_of(form, switch))
        raise web.HTTPSeeOther("/audit")

    def _check_switch(self, request: web.Request, switch: Switch) -> None:
        """Check that a user may set this; a shard has jobs of all queues. Raises PageProblem."""
        if switch.queue:
            self._site.check_right(request, "operate", switch.queue)
        else:
            self._site.check_right_to_all_queues(request, "operate")

    async def _make(self, request: web.Request, switch: Switch, nonce: str, reason: str) -> None:
        """Set something, unless a form with this nonce has done so before."""
        if self._sent_before(request, nonce):
            return
        etc, who, is_noted = self._site.etc, self._who(request), False
        number = self._audit.next_number(nonce)
        try:
            before = await asyncio.to_thread(switch.before, etc)
            facts = {**switch._asdict(), "before": before, "reason": reason, "nonce": nonce}
            await asyncio.to_thread(self._audit.begin, number, who, "set", facts)
            is_noted = True
            await switch.make(self._site, who, reason)
        except (ConfigError, OSError) as error:
            self._audit.forget(nonce)
            if is_noted:
                # All who may view this queue read it, and mistakes may name any queue.
                why = _MISTAKES if isinstance(error, ConfigError) else error
                await asyncio.to_thread(self._audit.end, number, f"{FAILED}: {why}")
            raise config_problem(error, request.get(USER)) from None
        await asyncio.to_thread(self._audit.end, number, "done")

    # --- /audit --------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        most = 10**_MOST_DIGITS
        before = whole_number(request.query, "before", most, 1, most)
        changes = await asyncio.to_thread(self._audit.changes, before, _ROWS + 1)
        user, older = request.get(USER), len(changes) > _ROWS
        shown = [
            self._row(change, user)
            for change in filter(_is_whole, changes[:_ROWS])
            if self._may(user, "view", change)
        ]
        return self._site.render(
            request,
            "audit.html",
            changes=shown,
            is_first=before == most,
            older=f"/audit?before={changes[_ROWS - 1].number}" if older else "",
        )

    async def _rows(self, _request: web.Request) -> web.Response:
        """Answer `pinlater-admin audit` with the rows of the page, of all queues."""
        changes = await asyncio.to_thread(self._audit.changes)
        return web.json_response([self._row(one, None) for one in filter(_is_whole, changes)])

    def _row(self, change: Change, user: UserSettings | None) -> Mapping[str, Any]:
        facts, operation = change.facts, self._operations.get(change.number)
        asked_for = msgspec.convert(facts, _JobsFacts) if change.what != "set" else None
        words = f"{change.what} jobs of {facts.get('queue', '')}"
        if asked_for is not None and asked_for.expected:
            words += f", {asked_for.expected:,} previewed"
        if asked_for is not None and asked_for.selection is not None:
            hidden = self._site.hidden_from(user)
            chosen = in_words(asked_for.selection, self._site.clock.now_ms(), hidden)
            words += f": {asked_for.selection.state.replace('_', ' ')}, {chosen}"
        can_undo = change.what == "delete" and self._operations.can_restore(operation)
        if change.what == "set":
            is_undone = self._audit.number_of(_nonce_of_undo(change.number)) is not None
            words, can_undo = _switch_in(facts).words, change.outcome == "done" and not is_undone
        outcome = operation.outcome if operation is not None else change.outcome
        return {
            **change._asdict(),
            "words": words,
            "outcome": outcome,
            "page": "" if operation is None else f"/op/{change.number}",
            "reason": facts.get("reason", ""),
            "can_undo": can_undo and self._may(user, "operate", change),
            "undo": _undo_of(change) if can_undo else "",
        }

    def _may(self, user: UserSettings | None, role: str, change: Change) -> bool:
        """Return whether a user may do with a change what a role is for."""
        queue = _switch_in(change.facts).queue if change.what == "set" else change.facts["queue"]
        if not queue and role != "view":  # a shard's, which has jobs of all queues
            return may_with_all_queues(user, role)
        return may(user, role, queue)

    async def _undo(self, request: web.Request) -> web.StreamResponse:
        """Set the value that a change has replaced, or enqueue again what it has deleted."""
        form = request[FORM]
        number = whole_number(form, RESTORE, 0, 1, 10**_MOST_DIGITS - 1)
        changes = await asyncio.to_thread(self._audit.changes, number + 1, 1)
        change = changes[0] if changes else None
        if change is None or change.number != number or not _is_whole(change):
            raise mistake("There is no such change.")
        if change.what == "set":
            switch = _switch_in(change.facts)._replace(value=change.facts["before"])
            self._check_switch(request, switch)
            nonce = _nonce_of_undo(number)
            await self._make(request, switch, nonce, f"undoes change {number}")
            raise web.HTTPSeeOther("/audit")
        operation = self._operations.get(number)
        if operation is None:
            raise mistake(_NOT_IN_TRASH)
        self._site.check_right(request, "operate", operation.selection.queue)
        raise web.HTTPSeeOther(f"/op/{await self._restore(request, operation)}")

    def _who(self, request: web.Request) -> str:
        user = request.get(USER)
        return user.name if user is not None else "somebody"


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of the pages and of their forms."""
    return MendPages(site).routes()


def _is_restored(operations: Operations, operation: Operation) -> bool:
    """Return whether a page offers nothing more for the jobs of an operation: they were enqueued
    again, or the audit log can't be read."""
    try:
        return operations.is_restored(operation)
    except OSError:
        return True


# --- previews --------------------------------------------------------------------------------


async def _look(site: Site, selection: Selection) -> Preview:
    """Count the jobs of a selection, for some time, and take some of them as samples."""
    clock, count = site.clock, 0
    until = clock.monotonic() + _COUNT_SECONDS
    if selection.choice.descriptors is not None:
        named = await site.client.run(calls.lookup(selection.choice.descriptors))
        there = (named[one] for one in selection.choice.descriptors if one in named)
        found = list(filter(selection.may_have, there))
        return Preview(len(found), False, found[:FIRST_JOBS])
    first: list[JobRecord] = []
    part_ms = round(_COUNT_SECONDS * 1000)
    async for page in pages(site.client, selection, "", _PAGE_JOBS, part_ms):
        count += len(page.found)
        first += page.found[: FIRST_JOBS - len(first)]
        patience = 0.0 if count else _NOTHING_SECONDS
        if count >= _MOST_COUNTED or clock.monotonic() >= until + patience:
            return Preview(count, bool(page.place_behind), first)
    return Preview(count, False, first)


async def _effect(site: Site, what: str, queue: str, count: int) -> str:
    """Say how long so many jobs take that are retried, and what goes first."""
    if what != "retry":
        return ""
    try:
        facts = (await site.frames.now()).facts
    except ConnectionFailed:
        return "How busy the queue is, is not known now."
    found = queue_in(facts, queue)
    if found is None or found["pending"] is None:
        return ""
    ready, rate = found["pending"], found["dequeues_per_second"]
    first = f"{how_many(ready, 'ready job goes', 'ready jobs go')} first"
    if not rate:
        return f"No job is handed out now; {first}."
    seconds = (ready + count) / rate
    takes = text.duration(seconds * 1000)
    return f"At {text.rate(rate)} jobs/s this takes about {takes}; {first}."


# --- what a form says -------------------------------------------------------------------------


def _page_before(request: web.Request) -> str:
    """Return the path of the page that led here, with its filter; "" if it is not known."""
    page = urlsplit(request.headers.get("Referer", ""))
    is_ours = page.netloc == request.host and page.path not in ("/mend", "/login")
    return own_path(page._replace(scheme="", netloc="").geturl()) if is_ours else ""


_SETTINGS = {"pause": ("paused", True), "resume": ("paused", False)}


def switch_of(given: MultiMapping[str]) -> Switch:
    """Return the setting that a query or a form is for. Raises PageProblem."""
    what, value = given.get("action", ""), given.get("value", "")
    name = given.get("name") or given.get("queue") or given.get("shard") or ""
    if not (SHARD_NAME if what == "dequeue_only" else QUEUE_NAME).match(name):
        raise mistake("The link names no queue or shard.")
    if what in _SETTINGS:
        setting, paused = _SETTINGS[what]
        return Switch(setting, name, paused)
    if not name or what not in ("paused", "limit", "dequeue_only"):
        raise mistake("The link does not say what to change.")
    if what != "limit":
        return Switch(what, name, value in ("on", "True"))
    return Switch(what, name, _rate(value))


def _nonce_of_undo(number: int) -> str:
    return f"undo {number}"


def _is_whole(change: Change) -> bool:
    """Return whether a change in the audit log has the facts that the page reads."""
    try:
        msgspec.convert(change.facts, _SwitchFacts if change.what == "set" else _JobsFacts)
    except msgspec.ValidationError:
        return False
    return True


def _undo_of(change: Change) -> str:
    """Return the command that does the same as the button which undoes a change."""
    if change.what == "set":
        return _switch_in(change.facts)._replace(value=change.facts["before"]).command
    return f"pinlater-admin job restore {change.number}"


def _switch_in(facts: Mapping[str, Any]) -> Switch:
    """Return the setting of a change in the audit log."""
    return Switch(facts["setting"], facts["name"], facts["value"])


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}" if isinstance(value, float) else str(value)


def _rate(given: str) -> float | None:
    """Read a number of jobs per second; None for none. Raises PageProblem."""
    if given in ("", "none"):
        return None
    try:
        rate = float(given)
    except ValueError:
        rate = -1
    if not 0 <= rate <= 1e9:
        raise mistake(f"{given[:20]} is no number of jobs per second.")
    return rate


def _spread_rate(given: str) -> float:
    """Read the rate of a spread. Raises PageProblem."""
    rate = _rate(given)
    if rate is None or rate < _LEAST_PER_SECOND:
        raise mistake(f"{given[:20]} is no rate: give at least {_LEAST_PER_SECOND:g} jobs/s.")
    return rate


def _jobs(found: Preview, selection: Selection) -> str:
    return found.least + how_many(found.jobs, f"{selection.state.replace('_', ' ')} job")


def _is_large(found: Preview) -> bool:
    return found.is_bound or found.jobs > _TYPED_JOBS


def _reason_of(form: Mapping[str, str], switch: Switch | None = None) -> str:
    """Return why something is to be done. Raises PageProblem if it is a pause, whose reason is
    kept in a file of settings, and that can't hold it."""
    reason = form.get("reason", "")[:_MOST_REASON_CHARS]
    is_pause = switch is not None and switch.setting == "paused" and switch.value
    if is_pause and not reason.isprintable():
        raise mistake("Give the reason for a pause in characters that can be seen.")
    return reason
