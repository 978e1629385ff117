"""The admin password, kept as a salted scrypt hash: `scrypt$N$R$P$SALT$HASH`, in base64.

One check costs about 50 ms of one core and 16 MiB (N = 2**14, R = 8), so that a stolen hash is
slow to guess from; callers do it off their event loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
from weakref import WeakValueDictionary

from pinlaterd.errors import Overloaded, PasswordInvalid

_N = 2**14
_R = 8
_P = 1
_SALT_BYTES = 16
_HASH_BYTES = 32
_MAX_COST = 2**20  # N * R * P: more would let a hash in a file take gigabytes
_WRONG_PASSWORD_SECONDS = 1.0


class AdminPasswords:
    """Checks the admin passwords that one event loop is given, from whatever address."""

    def __init__(self) -> None:
        # By address, as long as somebody waits or has to.
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def check(self, password: str, stored: str, address: str, seconds: float) -> None:
        """Raise PasswordInvalid if it is not the one whose hash is `stored`; of an address, one a
        second after that, and Overloaded if its turn does not come within `seconds`."""
        if not stored:
            raise PasswordInvalid(
                "deleteQueue is refused: no admin password is set; make one with "
                "`pinlater-admin hash-password` and set admin_password_hash"
            )
        turn = self._turns.setdefault(address, asyncio.Lock())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                await turn.acquire()
        except TimeoutError:
            raise Overloaded("a wrong password came from the same address before") from None
        right = False
        try:
            # The hash is slow by design; it must not hold up the loop.
            right = await loop.run_in_executor(None, verify_password, password, stored)
        finally:
            loop.call_later(0 if right else _WRONG_PASSWORD_SECONDS, turn.release)
        if not right:
            raise PasswordInvalid("the password is not the admin password")


def hash_password(password: str) -> str:
    """Make a new hash of `password`, with a salt of its own."""
    salt = os.urandom(_SALT_BYTES)
    digest = _scrypt(password, salt, _N, _R, _P, _HASH_BYTES)
    return f"scrypt${_N}${_R}${_P}${_encode(salt)}${_encode(digest)}"


def verify_password(password: str, password_hash: str) -> bool:
    """Tell whether `password` is the one; False for "" and anything else that is no hash."""
    parsed = _parse(password_hash)
    if parsed is None:
        return False
    n, r, p, salt, digest = parsed
    return hmac.compare_digest(_scrypt(password, salt, n, r, p, len(digest)), digest)


def is_hash(text: str) -> bool:
    return _parse(text) is not None


def _scrypt(password: str, salt: bytes, n: int, r: int, p: int, length: int) -> bytes:
    return hashlib.scrypt(
        password.encode("utf-8", "surrogateescape"),
        salt=salt,
        n=n,
        r=r,
        p=p,
        dklen=length,
        maxmem=256 * n * r * p,
    )


def _parse(text: str) -> tuple[int, int, int, bytes, bytes] | None:
    parts = text.split("$")
    if len(parts) != 6 or parts[0] != "scrypt":
        return None
    try:
        n, r, p = (int(part) for part in parts[1:4])
        salt = base64.b64decode(parts[4], validate=True)
        digest = base64.b64decode(parts[5], validate=True)
    except (ValueError, binascii.Error):
        return None
    power_of_two = n > 1 and n & (n - 1) == 0
    if not power_of_two or min(r, p) < 1 or n * r * p > _MAX_COST or not salt or len(digest) < 16:
        return None
    return n, r, p, salt, digest


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
