"""Every error pinlaterd raises on purpose, and its Thrift code.

PinLaterError               500  UNKNOWN
  RequestError                   the caller can mend it; never retried
    InvalidRequest          500  message starts `invalid request: `
      LookupTooLarge
      BadDescriptors
    EnqueueRejected         430  the same, found in an enqueue
    ContinuationInvalid     400
    PasswordInvalid         403
    QueueNameInvalid        410
    QueueNameTooLong        411
    QueueNotFound           413
    PriorityNotSupported    416
    DequeueRateLimited      429
  Overloaded                500  a bounded queue is full; try again later
  NoHealthyShards           501
  ShardConnectionFailed     502  the outcome is unknown, or jobs are out of reach
    EnqueuedInPart               some jobs of one enqueue are stored, and others are not
  StorageError                   raised by engines only; the shard turns it into 502
    StorageNotCommitted          known to have changed nothing: another shard may serve
      StorageFull                the store has no room for it
      QueueGone                  somebody else has removed the queue from it
      StorageLocked              another connection has locked a queue's tables, or the store
    ShardOwned                   another process owns this shard's store
      Superseded                 by a later term: this process can't own it any more
    StorageCorrupt               the stored data is not what this version can read
ProtocolError                    bytes that are no Thrift message; the connection is closed
ConfigError                      never crosses the wire; knows file, line and key
DeploymentError                  ends a command; what is wrong with a deployment, and its cure
ConnectionFailed                 raised by clients only: the call was not carried out
  OutcomeUnknown                 it was sent, and no answer came: it may have been
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum


class ErrorCode(IntEnum):
    """The codes of the Thrift interface. None is ever added: old clients could not read it."""

    CONTINUATION_INVALID = 400
    PASSWORD_INVALID = 403
    QUEUE_NAME_INVALID = 410
    QUEUE_NAME_TOO_LONG = 411
    QUEUE_NOT_FOUND = 413
    PRIORITY_NOT_SUPPORTED = 416
    DEQUEUE_RATE_LIMITED = 429
    ENQUEUE_REJECTED = 430
    UNKNOWN = 500
    NO_HEALTHY_SHARDS = 501
    SHARD_CONNECTION_FAILED = 502


class PinLaterError(Exception):
    """An error with a Thrift code and a message fit for the caller."""

    code = ErrorCode.UNKNOWN

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(PinLaterError):
    """The caller's mistake; repeating the call changes nothing."""


class InvalidRequest(RequestError):
    """A mistake that no code names. `problem` says what, where and what would be right."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"invalid request: {problem}")


class LookupTooLarge(InvalidRequest):
    def __init__(self, most_bytes: int) -> None:
        super().__init__(
            f"the answer would have more than {most_bytes} bytes; look up fewer jobs at a time"
        )


class BadDescriptors(InvalidRequest):
    """Some of a call's descriptors name no job of `place`, where all others were carried out.

    The message names as many of them as fit into MOST_BYTES, each cut at 200 characters."""

    MOST_BYTES = 16 << 10

    def __init__(self, descriptors: Sequence[str], place: str) -> None:
        shown: list[str] = []
        left = self.MOST_BYTES
        for descriptor in descriptors:
            name = repr(descriptor[:200])
            left -= len(name.encode()) + len(", ")
            if left < 0:
                break
            shown.append(name)
        more = len(descriptors) - len(shown)
        super().__init__(
            f"not job descriptors of {place}: {', '.join(shown)}"
            f"{f' and {more} more' if more else ''}; the other jobs of the call were carried out"
        )


class EnqueueRejected(RequestError):
    code = ErrorCode.ENQUEUE_REJECTED


class QueueFull(EnqueueRejected):
    """The queue has as many PENDING jobs as its max_pending allows."""

    def __init__(self, queue: str, retry_after_ms: int) -> None:
        super().__init__(
            f"overloaded: queue {queue!r} holds as many pending jobs as its max_pending allows; "
            f"retry after {retry_after_ms} ms"
        )


class InvalidEnqueue(EnqueueRejected):
    """InvalidRequest, found in an enqueue."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"invalid request: {problem}")


class ContinuationInvalid(RequestError):
    code = ErrorCode.CONTINUATION_INVALID

    def __init__(self, token: str) -> None:
        super().__init__(
            f"continuation {token[:80]!r} is not one that scanJobs returned; start again with '0'"
        )


class PasswordInvalid(RequestError):
    code = ErrorCode.PASSWORD_INVALID


class QueueNameInvalid(RequestError):
    code = ErrorCode.QUEUE_NAME_INVALID

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"queue name {queue[:80]!r} is not valid; use letters, digits and underscores only"
        )


class QueueNameTooLong(RequestError):
    code = ErrorCode.QUEUE_NAME_TOO_LONG

    def __init__(self, queue: str, longest: int) -> None:
        super().__init__(
            f"queue name {queue[:80]!r} has {len(queue)} characters, {len(queue) - longest} more "
            f"than the {longest} that this deployment's shards allow"
        )


class QueueNotFound(RequestError):
    code = ErrorCode.QUEUE_NOT_FOUND

    def __init__(self, queue: str) -> None:
        super().__init__(f"queue {queue[:80]!r} does not exist; create it first")


class PriorityNotSupported(RequestError):
    code = ErrorCode.PRIORITY_NOT_SUPPORTED

    def __init__(self, priority: int, levels: int) -> None:
        super().__init__(f"priority {priority} is not supported; choose from 1 to {levels}")


class DequeueRateLimited(RequestError):
    code = ErrorCode.DEQUEUE_RATE_LIMITED


class Overloaded(PinLaterError):
    """A bounded queue is full. In an enqueue it is reported as ENQUEUE_REJECTED."""

    def __init__(self, what: str) -> None:
        super().__init__(f"overloaded: {what}; try again later")


class NoHealthyShards(PinLaterError):
    code = ErrorCode.NO_HEALTHY_SHARDS

    def __init__(self) -> None:
        super().__init__("no shard is healthy; see `pinlater-admin status`")


class ShardConnectionFailed(PinLaterError):
    code = ErrorCode.SHARD_CONNECTION_FAILED

    def __init__(self, shards: Iterable[str], why: str) -> None:
        self.shards = tuple(shards)
        names = ", ".join(self.shards)
        super().__init__(f"shard {names}: {why}")


class EnqueuedInPart(ShardConnectionFailed):
    """An enqueue too large for one transaction, of which not all is stored.

    `descriptors`: in the order of the jobs, the descriptor of each that is stored, NOT_STORED for
    one that certainly is not, MAY_BE_STORED for one of unknown outcome."""

    NOT_STORED = ""
    MAY_BE_STORED = "?"

    def __init__(self, descriptors: Sequence[str], why: str) -> None:
        not_stored = descriptors.count(self.NOT_STORED)
        unknown = descriptors.count(self.MAY_BE_STORED)
        PinLaterError.__init__(
            self,
            f"{len(descriptors) - not_stored - unknown} of the {len(descriptors)} jobs are stored, "
            f"{not_stored} are not, {unknown} may be; jobDescriptors of this error says which: "
            f"{why}",
        )
        self.shards = ()
        self.descriptors = descriptors


class StorageError(PinLaterError):
    """The store failed, and whether the last batch was committed is not known."""

    code = ErrorCode.SHARD_CONNECTION_FAILED


class StorageNotCommitted(StorageError):
    """The store failed, and nothing of the batch was kept."""


class StorageFull(StorageNotCommitted):
    """The store has no room for the batch. `why`, which callers read, names the store and the cure;
    no text of theirs or statement of ours is in it."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the store is full: {why}")


class QueueGone(StorageNotCommitted):
    """Somebody else has removed a queue from the store; nothing of the batch was kept."""

    def __init__(self, queue: str, why: str) -> None:
        super().__init__(why)
        self.queue = queue


class StorageLocked(StorageNotCommitted):
    """Another connection to the store has locked what the batch needs: `queue`, or, where that is
    "", all of the store. Nothing of the batch was kept."""

    def __init__(self, queue: str, why: str) -> None:
        super().__init__(why)
        self.queue = queue


class ShardOwned(StorageError):
    """Another process owns this shard's store; this one may wait as a standby."""


class Superseded(ShardOwned):
    """The shard's store was owned by `server` in `epoch`, which is later than the term it was to be
    opened in, or the same on another server."""

    def __init__(self, message: str, server: str, epoch: int) -> None:
        super().__init__(message)
        self.server = server
        self.epoch = epoch


class StorageCorrupt(StorageError):
    """The stored data is damaged, or of a version that this release cannot read."""


class ProtocolError(Exception):
    """Bytes that are no Thrift message; nothing more can be read from that connection."""


class ConfigError(Exception):
    """Mistakes in the configuration, each as `file:line: key: what is wrong; what is allowed`."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class DeploymentError(Exception):
    """A mistake in a deployment, whose message names the cure. Ends a command with exit 1."""


class ConnectionFailed(Exception):
    """The service could not be reached, and the call was not carried out."""


class OutcomeUnknown(ConnectionFailed):
    """The call was sent, but no answer came: it may have been carried out, or may yet be."""


def how_many(number: int, singular: str, plural: str | None = None) -> str:
    """Write a number in a message: `1 job`, `2,000 jobs`. `plural`: what is not the singular and an
    s (`job is`, `jobs are`)."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"


def address_of(host: str, port: int) -> str:
    """Return `host:port` as it stands in a URL: with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
