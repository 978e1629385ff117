"""Sessions of browsers, and the users who have logged in.

Every browser has a cookie with a random secret. The token of its forms is made from that, so it
holds while the process is restarted. A session begins with the login, and a new secret; only the
hash of that is kept, in data/.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path

import msgspec
from aiohttp import web

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.schema import UserSettings

log = logging.getLogger(__name__)

_FILE = layout.DATA / "web_sessions.json"
_IDLE_MS = 3_600_000
_LIFE_MS = 12 * 3_600_000
_MOST_SESSIONS = 10_000
_SAVE_MS = 60_000  # how much of a session's use may be forgotten where the process is killed
_SECRET = web.RequestKey("web_secret", str)  # a new one, for the cookie


class _Session(msgspec.Struct):
    user: str
    password: str  # a hash of the password's, so that a new one ends the session
    began_ms: int
    used_ms: int


class Sessions:
    """The sessions of all browsers; used on the event loop."""

    def __init__(self, clock: Clock, cookie: str, file: Path = _FILE) -> None:
        """`cookie`: its name, as browsers tell apart hosts, but not ports."""
        self._clock = clock
        self._cookie = cookie
        self._file = file
        self._sessions: dict[str, _Session] = {}  # by their secret's hash, the oldest first
        self._saved_ms = clock.now_ms()
        try:
            found = file.read_bytes()
            self._sessions = msgspec.json.decode(found, type=dict[str, _Session])
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s can't be read, all have to log in again: %s", file, error)

    def user_of(
        self, request: web.Request, users: Mapping[str, UserSettings]
    ) -> UserSettings | None:
        """Return who has logged in, if that still holds. What open pages load is no use of it."""
        key = _hash(request.cookies.get(self._cookie, ""))
        session = self._sessions.get(key)
        if session is None:
            return None
        now_ms, user = self._clock.now_ms(), users.get(session.user)
        is_over = now_ms > min(session.used_ms + _IDLE_MS, session.began_ms + _LIFE_MS)
        if user is None or is_over or session.password != _hash(user.password_hash):
            self._sessions.pop(key)
            return None
        if request.path != "/live" and not request.path.endswith(".json"):
            session.used_ms = now_ms
            if now_ms > self._saved_ms + _SAVE_MS:
                self.save()
        return user

    def begin(self, request: web.Request, user: UserSettings) -> None:
        """Begin a session of `user`, in this browser."""
        now_ms = self._clock.now_ms()
        request[_SECRET] = secret = secrets.token_urlsafe(32)
        session = _Session(user.name, _hash(user.password_hash), now_ms, now_ms)
        self._sessions[_hash(secret)] = session
        if len(self._sessions) > _MOST_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        self.save()

    def end(self, request: web.Request) -> None:
        """End the session of this browser."""
        self._sessions.pop(_hash(request.cookies.get(self._cookie, "")), None)
        request[_SECRET] = secrets.token_urlsafe(32)
        self.save()

    def save(self) -> None:
        """Write all that are left to the file, so that a restart ends none."""
        self._saved_ms = self._clock.now_ms()
        try:
            layout.replace_file(self._file, msgspec.json.encode(self._sessions))
        except OSError as error:
            log.warning("%s can't be written: %s", self._file, error)

    def token(self, request: web.Request) -> str:
        """Return what the forms of this browser have to bring."""
        secret = request.get(_SECRET) or request.cookies.get(self._cookie)
        if not secret:
            request[_SECRET] = secret = secrets.token_urlsafe(32)
        made = hmac.digest(secret.encode(), b"form", "sha256")
        return base64.urlsafe_b64encode(made).decode().rstrip("=")

    def keep_cookie(self, request: web.Request, response: web.StreamResponse) -> None:
        """Give the browser its secret, if it is new."""
        secret = request.get(_SECRET)
        if secret is not None:
            response.set_cookie(
                self._cookie,
                secret,
                max_age=_LIFE_MS // 1000,
                httponly=True,
                samesite="Strict",
                secure=request.secure,
            )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
