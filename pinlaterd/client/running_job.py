"""A job as its handler sees it, and the exceptions with which a handler says how it ended."""

from __future__ import annotations

from collections.abc import Callable

from pinlaterd.client.client import Client
from pinlaterd.model import CheckpointInfo, ClaimedJob


class Retry(Exception):
    """This attempt failed; try again, if an attempt is left.

    `delay_seconds`: None leaves it to the queue's retry policy. `status` is appended to the job's
    custom status.
    """

    def __init__(self, delay_seconds: float | None = None, status: str = "") -> None:
        super().__init__(status)
        self.delay_seconds = delay_seconds
        self.status = status


class Discard(Exception):
    """The job has FAILED for good, whatever attempts it has left; `reason` goes into its status."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Later(Exception):
    """Not done yet: run the job again, at no attempt's cost.

    For work that comes back (each hour, say), or goes step by step: `body` takes the place of the
    job's body, `status` goes in front of its custom status, `attempts` are allowed and remaining
    from then on (None: as they are).
    """

    def __init__(
        self,
        delay_seconds: float = 0.0,
        *,
        body: bytes | None = None,
        status: str | None = None,
        attempts: int | None = None,
    ) -> None:
        super().__init__(f"again in {delay_seconds} s")
        self.delay_seconds = delay_seconds
        self.body = body
        self.status = status
        self.attempts = attempts


class ClaimLost(Exception):
    """The job's claim is not ours any more: somebody else runs it, or has ended it."""


class RunningJob:
    """A claimed job in its handler's hands. Its methods may be called from any thread."""

    __slots__ = ("_claimed", "_client", "_on_lost", "body", "lost", "queue")

    def __init__(self, claimed: ClaimedJob, queue: str, client: Client) -> None:
        self.queue = queue
        self.body = claimed.body
        self.lost = False
        """Whether the claim is gone: what the handler still does is done by somebody else, too,
        and its result will be dropped."""
        self._claimed = claimed
        self._client = client
        self._on_lost: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"RunningJob({self.descriptor!r}, attempt {self.attempt})"

    @property
    def descriptor(self) -> str:
        return self._claimed.descriptor

    @property
    def claim_descriptor(self) -> str:
        return self._claimed.claim_descriptor

    @property
    def claim_timeout_seconds(self) -> int:
        """How long the service waits for a sign of life; the worker gives them by itself."""
        return self._claimed.claim_timeout_seconds

    @property
    def attempts_allowed(self) -> int:
        return self._claimed.attempts_allowed

    @property
    def attempts_remaining(self) -> int:
        """With this one."""
        return self._claimed.attempts_remaining

    @property
    def attempt(self) -> int:
        """1 is the first."""
        return self._claimed.attempts_allowed - self._claimed.attempts_remaining + 1

    @property
    def client(self) -> Client:
        """The worker's, to enqueue what comes next, say. It blocks: an `async def` handler calls
        it by `asyncio.to_thread`."""
        return self._client

    def save(self, body: bytes | None = None, status: str | None = None) -> None:
        """Keep progress in the service: if this attempt is cut off, the next one begins with it.

        `body` takes the place of the job's body, `status` goes in front of its custom status.
        Blocks for one call. Raises ClaimLost, or what `Client.checkpoint` raises.
        """
        self.raise_if_lost()
        self._client.checkpoint(
            self.queue,
            [
                CheckpointInfo(
                    self.descriptor,
                    new_body=body,
                    prepend_custom_status=status,
                    claim_descriptor=self.claim_descriptor,
                )
            ],
        )
        if body is not None:
            self.body = body

    def raise_if_lost(self) -> None:
        """Raise ClaimLost if the claim is gone: a long handler does well to ask now and then."""
        if self.lost:
            raise ClaimLost(f"{self.descriptor}: the claim is gone; the result will be dropped")

    def when_lost(self, tell: Callable[[], object]) -> None:
        """For executors: `tell` is called once, from another thread, when the claim is lost."""
        self._on_lost = tell

    def lose(self) -> None:
        """For the worker: the claim is gone."""
        self.lost = True
        if self._on_lost is not None:
            self._on_lost()
