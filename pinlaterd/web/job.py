"""The page of a job: what has happened to it, its body, and what its attempts had to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import urlencode

from aiohttp import web

from pinlaterd.client import calls
from pinlaterd.config.schema import Config
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.model import (
    CONTINUATION_END,
    EXPIRED,
    JobChoice,
    JobDescriptor,
    JobRecord,
    JobState,
    claim_source,
)
from pinlaterd.signature import attempts_of, signature
from pinlaterd.web import text
from pinlaterd.web.bodies import redact, redacted_text, view_of
from pinlaterd.web.refusals import PageProblem, whole_number
from pinlaterd.web.site import USER, Site

_AT_ONCE_MS = 1000  # a run-after within this of the enqueue asks for no delay
_HOUR_MS = 3_600_000
_MOST_BYTES = 1 << 40  # of a body
_MOST_ALIKE, _ALIKE_MS = 1_000, 200  # of a search for jobs that failed alike
_SUFFIXES = {"json": "json", "text": "txt", "hex": "bin"}


class JobLook(NamedTuple):
    """A state as pages show it: its mark's state, and its word."""

    state: str
    word: str


class LifeStep(NamedTuple):
    """Something that happened to a job, or is to happen. `at_ms`: None if no store keeps it."""

    state: str
    title: str
    at_ms: int | None
    detail: str = ""


def look_of(job: JobRecord, now_ms: int) -> JobLook:
    """Return how pages show a job's state."""
    match job.state:
        case JobState.FAILED:
            return JobLook("failing", "Expired" if job.end_reason == EXPIRED else "Failed")
        case JobState.SUCCEEDED:
            return JobLook("well", "Succeeded")
        case JobState.IN_PROGRESS:
            return JobLook("well", "Running")
    return JobLook("idle", "Scheduled" if job.run_after_ms > now_ms else "Ready")


def holder_of(job: JobRecord) -> str:
    """Return the source that claimed a job last; "" if none is known."""
    return claim_source(job.claim_descriptor or "") or ""


def steps_of(job: JobRecord) -> Sequence[LifeStep]:
    """Return what is known of a job's life, in order."""
    failed = max(0, job.attempts_allowed - job.attempts_remaining)
    holder = holder_of(job)
    last_failed_ms = job.updated_at_ms if job.state is JobState.PENDING else None
    steps = [LifeStep("idle", "enqueued", job.created_at_ms)]
    earlier = failed - 1 if job.state is JobState.FAILED else failed
    if earlier > 1:
        steps.append(LifeStep("failing", f"attempts 1 to {earlier} failed", last_failed_ms))
    elif earlier == 1:
        steps.append(LifeStep("failing", "attempt 1 failed", last_failed_ms))
    delay_ms = job.run_after_ms - job.created_at_ms
    if earlier > 0 or delay_ms >= _AT_ONCE_MS or job.state is JobState.PENDING:
        due = "due again" if earlier > 0 else "due"
        steps.append(LifeStep("idle", due, job.run_after_ms, f"after {text.duration(delay_ms)}"))
    took = f"after {text.duration(max(0, job.updated_at_ms - job.run_after_ms))}"
    detail = ", ".join(filter(None, [holder, took]))
    match job.state:
        case JobState.FAILED if job.end_reason == EXPIRED:
            steps.append(LifeStep("failing", "expired", job.updated_at_ms))
        case JobState.FAILED:
            steps.append(LifeStep("failing", f"attempt {failed} failed", job.updated_at_ms, detail))
        case JobState.SUCCEEDED:
            title = f"attempt {failed + 1} succeeded"
            steps.append(LifeStep("well", title, job.updated_at_ms, detail))
        case JobState.IN_PROGRESS:
            title = f"attempt {failed + 1} runs; claimed or last renewed"
            steps.append(LifeStep("well", title, job.updated_at_ms, holder))
    return steps


def last_said(job: JobRecord, pattern: str) -> str:
    """Return what a job's last attempt had to say, without what `pattern` hides; "": nothing."""
    said = attempts_of(redacted_text(job.custom_status, pattern))
    return said[-1] if said else ""


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of the page, and of the body as a file."""

    async def show(request: web.Request) -> web.StreamResponse:
        job, named, body = await _find(site, request)
        now_ms = site.clock.now_ms()
        at = whole_number(request.query, "at", 0, 0, _MOST_BYTES)
        view = view_of(body, request.query.get("as", ""), at)
        pattern = hidden_pattern(site, request)
        alike = _alike(job, named.queue, pattern)
        return site.render(
            request,
            "job.html",
            job=job,
            queue=named.queue,
            look=look_of(job, now_ms),
            summary=_summary(job, site.config, named.queue),
            steps=steps_of(job),
            view=view,
            said=attempts_of(redacted_text(job.custom_status, pattern)),
            facts=_facts(job, named, site.config),
            alike=alike,
            count_alike=await _count_alike(site, job, named.queue) if alike else "",
            command=f"pinlater-admin job lookup {job.descriptor}",
        )

    async def save(request: web.Request) -> web.StreamResponse:
        job, _, body = await _find(site, request)
        suffix = _SUFFIXES[view_of(body).form]
        name = f"{job.descriptor.replace(':', '-')}.{suffix}"
        disposition = {"Content-Disposition": f'attachment; filename="{name}"'}
        kind = "application/octet-stream"
        return web.Response(body=body, content_type=kind, headers=disposition)

    return [site.page("/j/{descriptor}", show), site.page("/j/{descriptor}/body", save)]


async def _find(site: Site, request: web.Request) -> tuple[JobRecord, JobDescriptor, bytes]:
    """Return the job of a request, and its body as its user may see it. Raises PageProblem."""
    descriptor = request.match_info["descriptor"]
    named = JobDescriptor.parse(descriptor)
    if named is not None:
        site.check_right(request, "view", named.queue)
        found = await site.client.run(calls.lookup([descriptor], include_body=True))
        if job := found.get(descriptor):
            return job, named, redact(job.body or b"", hidden_pattern(site, request))
    cure = "Jobs that have ended are kept for a time, then deleted; find one by its key or text."
    raise PageProblem(HTTPStatus.NOT_FOUND, f"There is no job {descriptor[:200]}.", cure)


def hidden_pattern(site: Site, request: web.Request) -> str:
    """Return the pattern of what this user may not see of bodies and statuses; "": sees all."""
    return site.hidden_from(request.get(USER))


def _summary(job: JobRecord, config: Config, queue: str) -> str:
    used = max(0, job.attempts_allowed - job.attempts_remaining)
    attempts = f"{used} of {text.many(job.attempts_allowed, 'attempt')}"
    settings = config.queue(queue)
    hours = {
        JobState.FAILED: settings.job_failed_ttl_hours,
        JobState.SUCCEEDED: settings.job_succeeded_ttl_hours,
    }.get(job.state)
    if hours is None:
        return f"{attempts} failed"
    until_ms = job.updated_at_ms + hours * _HOUR_MS
    failed = "" if job.state is JobState.FAILED else " failed"
    return f"{attempts}{failed}; kept until {text.exact(until_ms)}"


def _facts(job: JobRecord, named: JobDescriptor, config: Config) -> Mapping[str, str]:
    """Return what else is known of a job, without what is not."""
    shard = config.shards.get(named.shard)
    options = job.options
    facts = {
        "priority": str(named.priority),
        "shard": f"{named.shard}, {shard.engine}" if shard else named.shard,
        "key": options.key if options is not None else None,
        "key of": "all queues" if options is not None and options.key_of_all_queues else None,
        "last claim": holder_of(job),
        "run after": text.exact(job.run_after_ms),
        "expires": text.exact(options.expires_at_ms) if options and options.expires_at_ms else None,
        "changed": text.exact(job.updated_at_ms),
    }
    return {name: value for name, value in facts.items() if value}


def _alike(job: JobRecord, queue: str, pattern: str) -> str:
    """Return the path of the list of jobs that failed as this one did; "" if it did not fail, or if
    the path would tell what is hidden."""
    status = job.custom_status
    if job.state is not JobState.FAILED or redacted_text(status, pattern) != status:
        return ""
    message = signature(status, failed=True).message
    return f"/q/{queue}?{urlencode({'state': 'failed', 'message': message})}#jobs"


async def _count_alike(site: Site, job: JobRecord, queue: str) -> str:
    """Say how many other jobs failed as this one did, as far as they are found at once."""
    call = calls.scan(
        queue,
        JobState.FAILED,
        newest_end_first=True,
        page_size=_MOST_ALIKE,
        max_ms=_ALIKE_MS,
        choice=JobChoice(message=signature(job.custom_status, failed=True).message),
    )
    try:
        page = await site.client.run(call)
    except (ConnectionFailed, PinLaterError):
        return "jobs that failed alike"
    others = sum(each.descriptor != job.descriptor for each in page.jobs)
    least = "" if page.continuation == CONTINUATION_END else "at least "
    return f"{least}{others:,} failed alike"
