"""What a Redis server or the way to it may answer, in words.

An answer that is an error comes before the server has done anything, but for errors in the midst of
a script. A fault of the connection leaves open what the server did.
"""

from __future__ import annotations

import hiredis


class Answer(Exception):
    """An error that the server answered, in its words: the connection is still good."""


CONNECTION_FAULTS = (Answer, hiredis.ProtocolError, OSError)
PACKING_FAULTS = (UnicodeError, OverflowError, TypeError, ValueError)

CLUSTER_WORDS = (
    "is part of a Redis Cluster, which can't hold a shard; name a server that stands alone as"
    " `master` in shards.yaml"
)
_LET_IN = (
    "refuses the user or the password; correct `user` and `passwd` of the shard in shards.yaml"
)
REPLICA_WORDS = (
    "is a replica, which can't be written to; name its master as `master` in shards.yaml (Sentinels"
    " do that by themselves, once they have agreed)"
)
_TEXTS = {
    "OOM": (
        "is full (maxmemory) and takes no new jobs until there is room, while dequeues and acks"
        " go on; raise maxmemory, or let workers catch up"
    ),
    "LOADING": "is loading its data; it is asked again until it has",
    "READONLY": REPLICA_WORDS,
    "MASTERDOWN": REPLICA_WORDS,
    "MOVED": CLUSTER_WORDS,
    "ASK": CLUSTER_WORDS,
    "TRYAGAIN": CLUSTER_WORDS,
    "CLUSTERDOWN": CLUSTER_WORDS,
    "CROSSSLOT": CLUSTER_WORDS,
    "WRONGPASS": _LET_IN,
    "NOAUTH": _LET_IN,
    "NOPERM": (
        "does not let this user do that; give it the right to all commands on keys `pl*`"
        " (ACL SETUSER … ~pl* +@all)"
    ),
    "MISCONF": (
        "takes no writes because it can't write to its disk; its log says why: make room there,"
        " or mend it"
    ),
    "BUSY": (
        "is busy with a script that runs longer than its busy-reply-threshold, and answers again"
        " when that ends; SCRIPT KILL ends only a script that has written nothing"
    ),
}
# What errors that a script ends with say, of release 7 and of those before.
_WITHIN_A_SCRIPT = ("@user_script", "Error running script")
_SCRIPT_NOT_PERMITTED = "The user executing the script"  # which comes without a code


def is_unknown_script(fault: BaseException) -> bool:
    return isinstance(fault, Answer) and str(fault).startswith("NOSCRIPT")


def is_permission_denied(fault: BaseException | None) -> bool:
    """Also where a hosted server has taken a command away, which is then unknown."""
    text = str(fault)
    return text.startswith("NOPERM") or "unknown command" in text


def is_refusal(fault: BaseException) -> bool:
    """Whether the server answered before it did anything: not from within a script."""
    text = str(fault)
    return (
        isinstance(fault, Answer)
        and _code_in(text) in _TEXTS
        and not any(mark in text for mark in _WITHIN_A_SCRIPT)
    )


def is_full(text: str) -> bool:
    """Whether an answer, or an error that a script passed on, says that there is no room."""
    return _code_in(text) == "OOM"


def words(fault: BaseException) -> str:
    """What follows the server's name in a message."""
    text = str(fault)
    if isinstance(fault, TimeoutError):
        return f"did not answer in time ({text}); see whether it is overloaded or cut off"
    if not isinstance(fault, Answer):
        return (
            f"can't be reached ({text}); start it, or correct `master` of the shard in shards.yaml"
        )
    return refusal_words(text)


def refusal_words(text: str) -> str:
    """The same for an error that a script met and passed on."""
    known = _TEXTS.get(_code_in(text))
    return f"answers: {text}" if known is None else f"{known} ({text})"


def _code_in(text: str) -> str:
    """The code is the first word; releases before 7 put words of their own in front."""
    if _SCRIPT_NOT_PERMITTED in text:
        return "NOPERM"
    words_ = text.replace("-", " ").split()
    return next((word for word in words_ if word in _TEXTS), "")
