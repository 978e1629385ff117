"""The search of job bodies: RE2, the same in every engine, linear in the size of the body.

A body is bytes of any kind, so the pattern is matched byte by byte: its own text stands for its
UTF-8 bytes, `.` for one byte, and a class such as `[a-z]` holds single bytes. May rely on
google-re2 and the errors only.
"""

from __future__ import annotations

from collections.abc import Callable

import re2

from pinlaterd.errors import InvalidRequest

# Bounds what a hostile pattern may take, compiled program and search cache together.
_MAX_PATTERN_MEMORY_BYTES = 8 << 20
_MAX_REASON_CHARS = 200  # RE2 repeats the pattern in it


def compile_body_regex(pattern: str) -> Callable[[bytes], bool]:
    """A function that says whether a body has a match anywhere.

    Raises InvalidRequest for a pattern that RE2 does not take.
    """
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = _MAX_PATTERN_MEMORY_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        search = re2.compile(pattern.encode(), options).search
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        if isinstance(reason, bytes):
            reason = reason.decode(errors="replace")
        raise InvalidRequest(
            f"bodyRegexToMatch is no RE2 pattern: {reason[:_MAX_REASON_CHARS]}; see https://github.com/google/re2/wiki/Syntax"
        ) from error
    return lambda body: search(body) is not None
