"""The queues that are pushed, by the configuration, and the request that each job becomes."""

from __future__ import annotations

import asyncio
import base64
import os
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from pinlaterd.client.client import AsyncClient
from pinlaterd.client.running_job import RunningJob
from pinlaterd.config.layout import FileWatch, read_file
from pinlaterd.config.schema import (
    DOWNSTREAM_AUTH_ENVIRONMENT,
    Config,
    JobType,
    PushSettings,
    ServerSettings,
)
from pinlaterd.model import backoff_ms
from pinlaterd.push.downstream import USER_AGENT

_USER = "jobs"  # Rickover's, at its downstream
# Of one process at a time, where the queue has no limit, and in any case: jobs in progress may be
# more, as they wait for their callbacks.
_REQUESTS = 64
_MOST_REQUESTS = 1000
_LATE_SECONDS = 10.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class PushRequest(NamedTuple):
    """The request that hands a job over."""

    url: str
    body: bytes


@dataclass(frozen=True)
class Target:
    """The downstream of a queue's jobs."""

    queue: str
    url: str
    concurrency: int  # requests at a time
    timeout_seconds: float  # within which a job's end has to be reported
    headers: Mapping[str, str] = field(repr=False)
    claim_timeout_ms: int | None = None  # None: as the queue says
    type_attempts: int | None = None  # of the queue's job type, if it has one
    is_trusted = False  # whether the URL may name any host

    def backoff_ms(self, attempts_allowed: int, left: int) -> int:
        """Return the pause before the next attempt of a job: by the attempts of its job type, as
        where a callback has it tried again."""
        return backoff_ms(self.type_attempts or attempts_allowed, left)

    async def request(self, job: RunningJob) -> PushRequest:
        """Make the request for a job. Raises NotPushable, and what a look-up raises."""
        claimed, is_json = job.claimed, _is_json(job.claimed.body)
        facts = {
            "queue": self.queue,
            "descriptor": claimed.descriptor,
            "claim": claimed.claim_descriptor,
            "attempts_allowed": claimed.attempts_allowed,
            "attempts_remaining": claimed.attempts_remaining,
            # As it is written: numbers keep all digits.
            "data" if is_json else "body": msgspec.Raw(claimed.body) if is_json else claimed.body,
        }
        return PushRequest(self.url, msgspec.json.encode(facts))


@dataclass(frozen=True)
class JobTypeTarget(Target):
    """Rickover's: the downstream is told a job by its type and id, and its data."""

    ids: JobIds = field(compare=False, repr=False, kw_only=True)
    is_trusted = True

    async def request(self, job: RunningJob) -> PushRequest:
        if not _is_json(job.claimed.body):
            raise NotPushable("has a body that is no JSON")
        job_id = await self.ids.of(job.descriptor)
        if not job_id:
            raise NotPushable("has no id: it was enqueued without a key")
        if job_id in (".", ".."):  # which name another place in a path, also when they are quoted
            raise NotPushable(f"has the id {job_id}, which no URL can name")
        body = b'{"data":%b,"attempts":%d}' % (job.claimed.body, job.attempts_remaining)
        return PushRequest(f"{self.url}/{quote(job_id, safe='')}", body)


class Targets(NamedTuple):
    """The targets of the queues that are pushed, as far as their secrets can be used."""

    usable: Mapping[str, Target]
    unfit: AbstractSet[str]  # the queues whose secret can't be used
    reasons: Sequence[str]  # why not, for each file


class NotPushable(Exception):
    """A job that no attempt can push."""


class SecretUnfit(Exception):
    """A secret can't be read or sent; the message names its file, and nothing of what it holds."""


class JobIds:
    """Looks up the ids of jobs, their keys; those that are asked for at a time, in one call."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._asked: dict[str, asyncio.Future[str]] = {}
        self._lookups: set[asyncio.Task[None]] = set()

    async def of(self, descriptor: str) -> str:
        """Return the id of a job, "" if it has none. Raises what a look-up raises."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            task = loop.create_task(self._look_up())
            self._lookups.add(task)
            task.add_done_callback(self._lookups.discard)
        found: asyncio.Future[str] = loop.create_future()
        self._asked[descriptor] = found
        return await found

    async def _look_up(self) -> None:
        await asyncio.sleep(0)  # others ask in this turn of the loop
        asked, self._asked = self._asked, {}
        try:
            records = await self._client.lookup(list(asked))
        except Exception as error:  # noqa: BLE001 - each that asked is told
            for future in asked.values():
                future.set_exception(error)
            return
        for descriptor, future in asked.items():
            record = records.get(descriptor)
            options = None if record is None else record.options
            future.set_result((options.key or "") if options is not None else "")


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body.decode(), type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def targets_of(config: Config, ids: JobIds) -> Targets:
    """Return the target of each queue that is pushed, and the queues whose secret is unfit."""
    usable: dict[str, Target] = {}
    unfit: set[str] = set()
    reasons: set[str] = set()
    for queue, push in config.pushes.items():
        try:
            usable[queue] = _target(queue, push, config)
        except SecretUnfit as error:
            unfit.add(queue)
            reasons.add(str(error))
    if config.server.downstream_url:
        types = [one for queue, one in config.job_types.items() if queue not in config.pushes]
        try:
            headers = {"User-Agent": USER_AGENT, **_downstream_authorization(config.server)}
            usable |= {one.queue: _type_target(one, config, headers, ids) for one in types}
        except SecretUnfit as error:
            unfit |= {one.queue for one in types}
            reasons.add(str(error))
    return Targets(usable, unfit, sorted(reasons))


def _type_target(
    job_type: JobType, config: Config, headers: Mapping[str, str], ids: JobIds
) -> JobTypeTarget:
    return JobTypeTarget(
        job_type.queue,
        f"{config.server.downstream_url.rstrip('/')}/v1/jobs/{quote(job_type.name, safe='')}",
        _requests_at_a_time(job_type.queue, config),
        config.server.push_timeout_seconds,
        headers,
        type_attempts=job_type.attempts,
        ids=ids,
    )


def _downstream_authorization(server: ServerSettings) -> Mapping[str, str]:
    password = os.environ.get(DOWNSTREAM_AUTH_ENVIRONMENT, "")
    if server.downstream_auth_file:
        password = _secret(server.downstream_auth_file)
    return {"Authorization": _authorization(f"{_USER}:{password}")}


def _requests_at_a_time(queue: str, config: Config) -> int:
    in_progress = config.queue(queue).max_in_progress
    return _REQUESTS if in_progress is None else max(1, min(in_progress, _MOST_REQUESTS))


def _target(queue: str, push: PushSettings, config: Config) -> Target:
    headers = {**push.headers, "User-Agent": USER_AGENT}
    if push.auth_file:
        headers["Authorization"] = _authorization(_secret(push.auth_file))
    timeout_seconds = min(push.timeout_seconds, push.callback_seconds)
    requests = _requests_at_a_time(queue, config)
    # Time-outs are looked for now and then; a claim that ends before that costs the backoff.
    claim_seconds = max(push.callback_seconds, timeout_seconds + _LATE_SECONDS)
    claim_ms = round(claim_seconds * 1000)
    job_type = config.job_types.get(queue)
    attempts = None if job_type is None else job_type.attempts
    return Target(queue, push.url, requests, timeout_seconds, headers, claim_ms, attempts)


def watched_secrets(config: Config) -> FileWatch[bool]:
    """Watch the files that hold secrets; it gives True once they have changed."""
    named = {config.server.downstream_auth_file, *(one.auth_file for one in config.pushes.values())}
    return FileWatch([Path(name) for name in sorted(named) if name], lambda: True)


def _authorization(secret: str) -> str:
    if ":" not in secret:
        return f"Bearer {secret}"
    # Of the environment, which need not be UTF-8: as it is there.
    return f"Basic {base64.b64encode(secret.encode(errors='surrogateescape')).decode()}"


def _secret(path: str) -> str:
    """Read a secret. Raises SecretUnfit if a header can't hold it, since every request would
    fail."""
    try:
        secret = read_file(Path(path)).decode().strip("\r\n")
    except OSError as error:
        raise SecretUnfit(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SecretUnfit(f"{path} is not valid UTF-8") from error
    if not secret or _CONTROL.search(secret):
        raise SecretUnfit(f"{path}: expected one line without control characters")
    return secret
