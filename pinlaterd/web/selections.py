"""The jobs that a mend is for: read from a query or a form, and written as a form's fields, a path,
words and commands."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

from multidict import MultiMapping

from pinlaterd.errors import how_many
from pinlaterd.model import QUEUE_NAME, JobChoice, JobState
from pinlaterd.web import text
from pinlaterd.web.bodies import redacted_message, redacted_text
from pinlaterd.web.operations import Selection
from pinlaterd.web.queue import MOST_PRIORITY, body_regex_of, choice_of, time_of
from pinlaterd.web.refusals import mistake, whole_number

# As queries and forms call the fields of a choice.
_FIELDS = {
    "message": "message",
    "place": "place",
    "worker": "worker",
    "status": "status_regex",
    "since": "ended_since_ms",
    "before": "ended_before_ms",
}
_OF_JOBS = {*_FIELDS, "queue", "state", "priority", "body", "by", "descriptor"}
_OF_FORMS = {"action", "token", "nonce", "expected", "bound", "mode", "reason", "typed"}
_OF_FORMS |= {"attempts", "per_second"}


def selection_of(given: MultiMapping[str], now_ms: int) -> Selection:
    """Return the jobs that a query or a form chooses; those that end or change from `now_ms` on are
    left, unless it says a time. What it says beyond that would choose other jobs than it means.
    Raises PageProblem."""
    queue, state = given.get("queue", ""), given.get("state", "failed")
    for name in given:
        if name not in _OF_JOBS | _OF_FORMS:
            raise mistake(f"There is no condition {name[:40]!r} for jobs.")
        if name != "descriptor" and len(given.getall(name)) > 1:
            raise mistake(f"The condition {name} is given twice.")
    if not QUEUE_NAME.match(queue):
        raise mistake("The link names no queue.")
    if state.upper() not in JobState.__members__:
        raise mistake(f"There is no state {state[:40]!r}.")
    if given.get("by", "text") not in ("text", "RE2"):
        raise mistake("A body is searched by text or RE2.")
    selection = Selection(queue, state)
    before_ms = time_of(given, "before") or now_ms or None
    unchanged_since_ms = None if selection.has_ended else before_ms
    if "descriptor" in given:
        descriptors = list(filter(None, given.getall("descriptor")))
        if not descriptors:
            raise mistake("No job was chosen.")
        if not all(each.startswith(f"{queue}:") for each in descriptors):
            raise mistake(f"Some of these are no jobs of {queue}.")
        choice = JobChoice(descriptors, before_ms if selection.has_ended else None)
        return Selection(queue, state, choice, unchanged_since_ms=unchanged_since_ms)
    choice = choice_of(given, before_ms, has_ended=selection.has_ended)
    priority = whole_number(given, "priority", 0, 1, MOST_PRIORITY) or None
    return Selection(queue, state, choice, body_regex_of(given), unchanged_since_ms, priority)


def fields_of(selection: Selection) -> list[tuple[str, object]]:
    """Return the hidden fields of a form for a selection."""
    choice = selection.choice
    fields: list[tuple[str, object]] = [("queue", selection.queue), ("state", selection.state)]
    if selection.priority is not None:
        fields.append(("priority", selection.priority))
    for name, field in _FIELDS.items():
        if (value := getattr(choice, field)) is not None:
            fields.append((name, value))
    fields += [("descriptor", each) for each in choice.descriptors or ()]
    if selection.unchanged_since_ms is not None:
        fields.append(("before", selection.unchanged_since_ms))
    if selection.body_regex is not None:
        fields += [("body", selection.body_regex), ("by", "RE2")]
    return fields


def list_of(selection: Selection) -> str:
    """Return the path of the list of a selection's jobs, as far as there are any left."""
    fields = [one for one in fields_of(selection) if one[0] not in ("queue", "descriptor")]
    filters = f"?{urlencode(fields)}#jobs" if selection.has_ended else ""
    return f"/q/{selection.queue}{filters}"


def in_words(selection: Selection, now_ms: int, hidden: str = "") -> str:
    """Say which jobs a selection is for, without what the pattern `hidden` hides."""
    choice, parts = selection.choice, []
    if choice.message is not None:
        parts.append(f"“{redacted_message(choice.message, hidden)}”")
    for what, value in (
        ("in", choice.place),
        ("claimed by", choice.worker),
        ("of priority", selection.priority),
    ):
        if value is not None:
            parts.append(f"{what} {value}")
    if choice.status_regex is not None:
        parts.append(f"with {choice.status_regex!r} in the status")
    if selection.body_regex is not None:
        parts.append(f"with {selection.body_regex!r} in the body")
    if choice.descriptors is not None:
        parts.append(f"{how_many(len(choice.descriptors), 'job')} by name")
    if choice.ended_since_ms is not None:
        parts.append(f"since {text.clock_time(choice.ended_since_ms, now_ms)} UTC")
    if choice.ended_before_ms is not None:
        ended = "failed" if selection.job_state is JobState.FAILED else "ended"
        before = text.clock_time(choice.ended_before_ms, now_ms)
        parts.append(f"{ended} before {before} UTC; later ones stay")
    if selection.unchanged_since_ms is not None:
        since = text.clock_time(selection.unchanged_since_ms, now_ms)
        parts.append(f"unchanged since {since} UTC; later ones stay")
    return redacted_text(", ".join(parts), hidden)


def commands_of(what: str, selection: Selection, first: Sequence[str]) -> Mapping[str, str]:
    """Return the command that does the same for each mode of the form, without what it says of
    attempts and rates. `first`: the descriptors of the jobs that are tried first."""
    by_name = JobChoice(first, selection.choice.ended_before_ms)
    tried = Selection(
        *(selection.queue, selection.state, by_name),
        unchanged_since_ms=selection.unchanged_since_ms,
    )
    whole = _command_of(what, selection)
    commands = {"first": _command_of(what, tried)} if first else {}
    return commands | ({"all": whole, "spread": whole} if what == "retry" else {"all": whole})


def _command_of(what: str, selection: Selection) -> str:
    choice = selection.choice
    words = ["pinlater-admin", "job", what, selection.queue]
    words += [selection.state] if what == "delete" else []
    words += choice.descriptors or ()
    times = {
        "--since": choice.ended_since_ms,
        "--before": choice.ended_before_ms,
        "--unchanged-since": selection.unchanged_since_ms,
    }
    options = {
        "--priority": selection.priority and str(selection.priority),
        "--message": choice.message,
        "--place": choice.place,
        "--worker": choice.worker,
        "--status-regex": choice.status_regex,
        "--body-regex": selection.body_regex,
        **{name: at_ms and text.iso_ms(at_ms) for name, at_ms in times.items()},
    }
    for name, value in options.items():
        words += [name, value] if value else []
    return shlex.join(words)
