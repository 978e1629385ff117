"""Access over HTTP: identifies the user of a request, and checks its rights (etc/users.yaml).

Without users every request is allowed: the interface listens on this machine only. With users each
needs Basic credentials or a Bearer token. A password costs 50 ms to check (scrypt), so two are
checked at a time, off the loop, and one that was right is remembered for its address by a hash that
only this process can make, as long as it runs. An address with five failures in a minute has only
tokens, and passwords that are remembered, let in until that is over. A function of the deployment's
own (`http_authorizer`) may say in place of all this who makes a request over HTTP.
Every refusal is logged, with who and what, and never with a credential.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import importlib
import logging
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum, auto
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from aiohttp import web

from pinlaterd.clock import Clock
from pinlaterd.config.password import hash_password, verify_password
from pinlaterd.config.schema import UserSettings
from pinlaterd.errors import ConfigError

log = logging.getLogger(__name__)

_CHECKS_AT_A_TIME = 2
_FAILURES = 5
FAILURES_SECONDS = 60
_MOST_ADDRESSES = 10_000
_MOST_REMEMBERED = 10_000
_ADMIN, _VIEW = "admin", "view"

# Takes the headers and the address of a request; returns who makes it, None for nobody.
Authorizer = Callable[[Mapping[str, str], str], Awaitable[UserSettings | None]]

USER = web.RequestKey("user", UserSettings)  # who makes the request, where there are users


class Refusal(Enum):
    """A reason why no user could be identified."""

    NO_CREDENTIALS = auto()
    NO_NAME = auto()
    UNKNOWN_USER = auto()
    WRONG_PASSWORD = auto()
    WRONG_TOKEN = auto()
    TOO_MANY_FAILURES = auto()


class NotIdentified(Exception):
    """The request is nobody's. `user`: whose it says it is; "" if it names none."""

    def __init__(self, why: Refusal, user: str = "") -> None:
        super().__init__(why.name)
        self.why = why
        self.user = user


class AuthorizerFailed(Exception):
    """The deployment's own function has not said who makes a request: it is refused."""


class Forbidden(Exception):
    """A user has no role for what a request asks."""

    def __init__(self, user: str, role: str, queue: str) -> None:
        of_queue = f" for queue {queue!r}" if queue else ""
        super().__init__(f"user {user!r} has no role {role!r}{of_queue}")


class _TokenOwner(NamedTuple):
    user: UserSettings
    expires_at_ms: int | None


def may(user: UserSettings | None, role: str, queue: str = "") -> bool:
    """Return whether `user` may do what `role` is for with `queue`, or at all. None: anybody."""
    if user is None:
        return True
    has_role = role in (_VIEW, *user.roles) or _ADMIN in user.roles
    return has_role and (not queue or any(fnmatchcase(queue, glob) for glob in user.queues))


def may_with_all_queues(user: UserSettings | None, role: str) -> bool:
    """Return whether `user` may do what `role` is for with every queue. None: anybody."""
    return user is None or ("*" in user.queues and may(user, role))


class Access:
    """The users of a deployment, as a process of one event loop checks their credentials."""

    def __init__(
        self,
        users: Mapping[str, UserSettings],
        clock: Clock,
        authorizer: Authorizer | None = None,
        *,
        most_remembered: int = _MOST_REMEMBERED,
    ) -> None:
        """Know these users; `authorizer` takes their place for requests over HTTP.
        `most_remembered`: passwords that are not checked each time."""
        self._clock = clock
        self._most_remembered = most_remembered
        self._authorizer = authorizer
        self._key = os.urandom(32)
        self._unknown = hash_password("")  # checked for unknown names, so that time tells nothing
        self._checks = asyncio.Semaphore(_CHECKS_AT_A_TIME)
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()  # times, by address
        # Hashes in users.yaml that credentials were right for, by our own hash of those and of the
        # address: others could guess without a limit.
        self._remembered: OrderedDict[bytes, str] = OrderedDict()
        self.follow(users)

    def follow(self, users: Mapping[str, UserSettings]) -> None:
        """Know these users from now on: they were changed in etc/users.yaml."""
        self._users = users
        self._tokens = {
            token.sha256: _TokenOwner(user, token.expires_at_ms)
            for user in users.values()
            for token in user.tokens
        }

    async def identify_sender(self, request: web.Request) -> UserSettings | None:
        """Return who makes a request; None where there are no users. Raises NotIdentified,
        AuthorizerFailed."""
        headers, address = request.headers, request.remote or ""
        if self._authorizer is None:
            return await self.identify(headers.get("Authorization"), address)
        self._check_failures(address)
        user = await _ask(self._authorizer, headers, address)
        if user is None and "Authorization" not in headers:
            raise NotIdentified(Refusal.NO_CREDENTIALS)
        if user is None:
            raise self._failure(address, Refusal.UNKNOWN_USER)
        return user

    async def identify(self, authorization: str | None, address: str) -> UserSettings | None:
        """Return who makes a request with this header; None where there are no users at all.
        Raises NotIdentified."""
        if not self._users:
            return None
        kind, _, credentials = (authorization or "").partition(" ")
        if kind.lower() == "bearer":
            return self._by_token(credentials.strip(), address)
        if kind.lower() == "basic":
            return await self._by_password(credentials.strip(), address)
        raise NotIdentified(Refusal.NO_CREDENTIALS)

    def _by_token(self, token: str, address: str) -> UserSettings:
        owner = self._tokens.get(hashlib.sha256(_bytes(token)).hexdigest())
        if owner is not None:
            if owner.expires_at_ms is None or self._clock.now_ms() < owner.expires_at_ms:
                return owner.user
            raise self._failure(address, Refusal.WRONG_TOKEN, owner.user.name)
        self._check_failures(address)
        raise self._failure(address, Refusal.WRONG_TOKEN)

    async def _by_password(self, credentials: str, address: str) -> UserSettings:
        try:
            # A password is what bytes it is, in whatever encoding it was set and is sent.
            pair = base64.b64decode(credentials, validate=True).decode(errors="surrogateescape")
        except ValueError:
            raise NotIdentified(Refusal.NO_CREDENTIALS) from None
        name, colon, password = pair.partition(":")
        if not colon:
            raise NotIdentified(Refusal.NO_CREDENTIALS)
        if not name:
            raise NotIdentified(Refusal.NO_NAME)
        user = self._users.get(name)
        hashed = user.password_hash if user is not None else ""
        ours = hmac.digest(self._key, _bytes(f"{address} {pair}"), "sha256")
        if user is not None and hashed and self._remembered.get(ours) == hashed:
            return user
        why = Refusal.WRONG_PASSWORD if hashed else Refusal.UNKNOWN_USER
        # A client that goes away neither frees its place for a further check nor is let off.
        check = self._check(password, hashed or self._unknown, NotIdentified(why, name), address)
        refused = await asyncio.shield(asyncio.ensure_future(check))
        if refused is not None:
            raise refused
        if user is None or not hashed:
            raise self._failure(address, why, name)
        self._remembered[ours] = hashed
        if len(self._remembered) > self._most_remembered:
            self._remembered.popitem(last=False)
        return user

    async def _check(
        self, password: str, hashed: str, refused: NotIdentified, address: str
    ) -> NotIdentified | None:
        """Return `refused`, noted as a failure, unless the password is right; or that the address
        has failed too often."""
        async with self._checks:
            try:
                # Others of this address were checked meanwhile.
                self._check_failures(address, refused.user)
            except NotIdentified as error:
                return error
            if await asyncio.to_thread(verify_password, password, hashed):
                return None
        return self._failure(address, refused.why, refused.user)

    def _check_failures(self, address: str, user: str = "") -> None:
        """Raise NotIdentified if the address has failed too often in the last minute. `user`: whom
        its request names."""
        failed = self._failures.get(address)
        since = self._clock.monotonic() - FAILURES_SECONDS
        while failed and failed[0] < since:
            failed.popleft()
        if failed and len(failed) >= _FAILURES:
            raise NotIdentified(Refusal.TOO_MANY_FAILURES, user)

    def _failure(self, address: str, why: Refusal, user: str = "") -> NotIdentified:
        """Note a failure of the address; return the refusal, to be raised."""
        self._failures.setdefault(address, deque(maxlen=_FAILURES)).append(self._clock.monotonic())
        self._failures.move_to_end(address)
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)
        return NotIdentified(why, user)


def _bytes(sent: str) -> bytes:
    """Return a part of a header as the client sent it, which need not be UTF-8."""
    return sent.encode(errors="surrogateescape")


async def _ask(
    authorizer: Authorizer, headers: Mapping[str, str], address: str
) -> UserSettings | None:
    """Call an authorizer. If it raises anything, log that and raise AuthorizerFailed: SystemExit
    and the like would end the connection without an answer, or the whole process."""
    try:
        user = await authorizer(headers, address)
        if user is not None and not isinstance(user, UserSettings):
            raise TypeError(f"expected UserSettings or None, got {user!r}")
    except BaseException as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # the client has gone
            raise
        log.exception("http_authorizer failed; the request from %s is refused", address)
        raise AuthorizerFailed("http_authorizer failed; the log says more") from error
    return user


def load_authorizer(named: str, etc: Path) -> Authorizer | None:
    """Return the function that `named`, MODULE:NAME, stands for, in a module that is installed or
    in `etc`; None if it is empty. Raises ConfigError."""
    if not named:
        return None
    module, _, name = named.partition(":")
    sys.path.append(str(etc.resolve()))
    try:
        found: Authorizer = getattr(importlib.import_module(module), name)
    except BaseException as error:  # the module is the deployment's own, and may even call sys.exit
        raise ConfigError([f"http_authorizer: {named}: {type(error).__name__}: {error}"]) from error
    return found


# --- requests ------------------------------------------------------------------------------


async def identify(request: web.Request, access: Access) -> None:
    """Note in a request who makes it. Raises NotIdentified, which is logged."""
    try:
        user = await access.identify_sender(request)
    except NotIdentified as refused:
        _log_refusal(request, refused.user, refused.why.name.lower())
        raise
    if user is not None:
        request[USER] = user


def check(request: web.Request, role: str, queue: str = "") -> None:
    """Check that the request's user has `role` for `queue`. Raises Forbidden, which is logged."""
    user = request.get(USER)
    if user is not None and not may(user, role, queue):
        _log_refusal(request, user.name, f"no role {role}")
        raise Forbidden(user.name, role, queue)


def _log_refusal(request: web.Request, user: str, why: str) -> None:
    method, path = request.method, request.path
    log.warning("refused: %s %s from %s as %r: %s", method, path, request.remote, user, why)
