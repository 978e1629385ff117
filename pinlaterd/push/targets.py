"""The queues that are pushed, by the configuration, and the request that each job becomes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from pinlaterd.client.running_job import RunningJob
from pinlaterd.config.schema import Config, PushSettings
from pinlaterd.push.downstream import USER_AGENT


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

    def request(self, job: RunningJob) -> PushRequest:
        claimed = job.claimed
        facts = {
            "queue": self.queue,
            "descriptor": claimed.descriptor,
            "claim": claimed.claim_descriptor,
            "attempts_allowed": claimed.attempts_allowed,
            "attempts_remaining": claimed.attempts_remaining,
            **_content(claimed.body),
        }
        return PushRequest(self.url, msgspec.json.encode(facts))


def _content(body: bytes) -> Mapping[str, object]:
    """Return a body as JSON, as it is written, or as bytes if it is no JSON."""
    try:
        msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {"body": base64.b64encode(body).decode()}
    return {"data": msgspec.Raw(body)}


def targets_of(config: Config) -> Mapping[str, Target]:
    """Return the target of each queue that is pushed. Raises OSError, with the file's name, if a
    file with a secret can't be read."""
    return {queue: _target(queue, push) for queue, push in config.pushes.items()}


def _target(queue: str, push: PushSettings) -> Target:
    headers = {**push.headers, "User-Agent": USER_AGENT}
    if push.auth_file:
        headers["Authorization"] = _authorization(_secret(push.auth_file))
    timeout_seconds = min(push.timeout_seconds, push.callback_seconds)
    return Target(queue, push.url, push.max_in_progress, timeout_seconds, headers)


def _authorization(secret: str) -> str:
    if ":" not in secret:
        return f"Bearer {secret}"
    return f"Basic {base64.b64encode(secret.encode()).decode()}"


def _secret(path: str) -> str:
    return Path(path).read_text(encoding="utf-8").strip("\r\n")
