"""The edits of configuration files that commands, `/v2` and the dashboard make, so that file and
service never disagree.

A person's file stays a person's file: all that a change does not concern stays as it is, and so do
mode and owner of the file. A change is checked by the loader before it takes the file's place, all
at once; readers find the old file or the new one. Nothing is changed where the configuration has
mistakes already, or where the file was changed by others meanwhile. All edits are safe to repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pinlaterd.config.active import active_files
from pinlaterd.config.document import DocumentError, FileReader
from pinlaterd.config.edit_text import Text, Value
from pinlaterd.config.layout import (
    BASE_FILE,
    CLUSTER_KEY_FILE,
    EDIT_LOCK,
    JOB_TYPES_FILE,
    QUEUES_FILE,
    SHARDS_FILE,
    USERS_FILE,
    lock,
    read_file,
    sync_folder,
    write_beside,
)
from pinlaterd.config.load import (
    ABANDON,
    LIMIT,
    PINLATERS_LIMIT,
    Form,
    ListedShard,
    form_of,
    load_config,
    shard_entries,
)
from pinlaterd.config.schema import (
    DEFAULT_ARCHIVE_HOURS,
    PAUSE_NOTE,
    Address,
    Config,
    JobType,
)
from pinlaterd.errors import ConfigError

KEPT = ".yours-"  # in the name of an edit that came second
_TRIES = 30  # with three servers at it all the time, each is the first in one of three
_LOCK_TRIES, _LOOK_SECONDS = 100, 0.05
# What an edit has made of a file, even if that was replaced since; None if it made no difference.
Edited = bytes | None


class AcceptedFiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files of etc/ that a cluster has accepted, which all its servers share. `by`: the server
    they were edited on."""

    number: int = 0
    files: Mapping[str, str] = {}
    by: str = ""

    def text(self, name: str) -> bytes:
        return self.files.get(name, "").encode()


def edit_file(etc: Path, name: str, change: Callable[[bytes, Config], bytes]) -> Edited:
    """Have `change` make what the file `name` of `etc` should hold of what it holds, and of what
    all files together mean.

    Raises ConfigError, with nothing changed, if there are mistakes in the configuration before or
    after, or if the file can't be written. An optional file that is missing holds b""; one that
    said something, and has gone or is empty by now, is not written."""
    path = etc / name
    with _locked(etc):
        config = load_config(etc)
        before = _read(path) if name in config.files else _read_if_there(path)
        if not before.strip() and name in active_files(etc.parent):
            problem = "the file is gone or empty, and what it said stays active"
            cure = "put it back first, or write a comment into it if it is to say nothing"
            raise ConfigError([f"{path}: {problem}; {cure}"])
        after = change(before, config)
        if after == before:
            return None
        load_config(etc, lambda read: after if read == path else read_file(read))
        _replace(path, before, after)
    return after


def take_over(etc: Path, name: str, base: bytes, theirs: bytes) -> Path | None:
    """Have the file hold `theirs`, which another server made of `base`; one that `theirs` left as
    it was stays as it is. Returns where an edit is kept that this replaced. Raises ConfigError."""
    path = etc / name
    with _locked(etc):
        mine = _read_if_there(path)
        if theirs in (mine, base):
            return None
        kept = None
        if mine != base:
            kept = path.with_name(f"{name}{KEPT}{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}")
            _replace(kept, b"", mine)
        _replace(path, mine, theirs)
        return kept


def drop_lost(path: Path, mine: Edited) -> bool:
    """Remove what is kept of `mine`, an edit of ours, if it came second; return whether it did."""
    for kept in path.parent.glob(f"{path.name}{KEPT}*"):
        with contextlib.suppress(FileNotFoundError):  # a person may remove it
            if kept.read_bytes() == mine:
                kept.unlink()
                return True
    return False


def attempts(path: Path, change: Callable[[], Edited]) -> Iterator[Edited]:
    """Make an edit of a file, and yield it for the caller to wait until it is decided whether it
    came first in the cluster. While it came second, make it again, to the new file. Raises
    ConfigError."""
    for _ in range(_TRIES):
        mine = change()
        yield mine
        if not drop_lost(path, mine):
            return
    raise ConfigError([f"{path}: edits on other servers came first {_TRIES} times; try again"])


def lock_edits(etc: Path, *, patient: bool) -> AbstractContextManager[object]:
    """Keep other edits out until an edit is decided, as edits of two together would be lost
    together; on a server of its own there is no need. Raises BlockingIOError unless `patient`."""
    if not (etc / CLUSTER_KEY_FILE).exists():
        return contextlib.nullcontext()
    return lock(etc.parent / EDIT_LOCK, patient=patient)


async def carry_out(path: Path, change: Callable[[], Edited], seconds: float) -> Edited:
    """Make an edit of a file by `attempts`, and wait until it is decided, but no longer than
    `seconds`: it is in the file by then. A caller that is cancelled does not end it. Return None if
    it makes no difference. Raises ConfigError."""
    return await asyncio.shield(_carry_out(path, change, seconds))


async def _carry_out(path: Path, change: Callable[[], Edited], seconds: float) -> Edited:
    until = asyncio.get_running_loop().time() + seconds
    alone = await _lock_soon(path.parent)
    if alone is None:  # what is kept may be of several edits, whose makers are to be warned
        return await asyncio.to_thread(change)
    made, last = attempts(path, change), None
    with alone:
        while (mine := await asyncio.to_thread(next, made, None)) is not None:
            last = mine
            while not _is_decided(path) and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
    return last


async def _lock_soon(etc: Path) -> AbstractContextManager[object] | None:
    """Lock edits, or return None if that can't be done soon: who has the lock may hang, and an edit
    be urgent."""
    for _ in range(_LOCK_TRIES):
        try:
            return lock_edits(etc, patient=False)
        except BlockingIOError:
            await asyncio.sleep(_LOOK_SECONDS)
        except OSError:  # such as of a lock that root has made
            break
    return None


def _is_decided(path: Path) -> bool:
    """Return whether the cluster has accepted what a file says, or replaced it."""
    if not path.with_name(CLUSTER_KEY_FILE).exists():
        return True
    try:
        base = (path.parent.parent / BASE_FILE).read_bytes()
        accepted = msgspec.json.decode(base, type=AcceptedFiles)
        return accepted.text(path.name) == path.read_bytes()
    except (OSError, ValueError):
        return False


def _edit_tree(etc: Path, name: str, change: Callable[[Text, Config], None]) -> Edited:
    """Edit a file by `change`, which turns the tree of its text into what it should be."""

    def changed(before: bytes, config: Config) -> bytes:
        text = Text(before)
        change(text, config)
        after = text.render()
        with contextlib.suppress(DocumentError):
            if Text(after).tree == text.tree:
                return after
        raise ConfigError([f"{etc / name}: can't be edited by a program; change it by hand"])

    return edit_file(etc, name, changed)


# --- shards.yaml ------------------------------------------------------------------------------


def _entries(path: Path, text: Text, databases: int) -> Iterator[ListedShard]:
    assert text.root is not None, "the loader found shards in it"
    return shard_entries(FileReader(path), text.root, databases)


def _texts(text: Text, key: str, inner: str = "") -> Sequence[str]:
    """Return the items of a list as they are written, or what each says at `inner`: a name may look
    like a number."""
    listed = text.root.get(key) if text.root is not None else None
    items = (listed.items or ()) if listed is not None else ()
    found = [item.get(inner) if inner else item for item in items]
    return [item.text if item is not None else "" for item in found]


def shards_alike(etc: Path, shard: str) -> Sequence[str]:
    """Return the shards whose settings are one entry with those of `shard`, it among them.

    Raises ConfigError if there is no such shard."""
    config = load_config(etc)
    path = etc / SHARDS_FILE
    if shard not in config.shards:
        names = ", ".join(config.shards)
        raise ConfigError([f"{path}: there is no shard {shard!r}; there are: {names}"])
    entries = _entries(path, Text(path.read_bytes()), config.server.mysql_num_db_per_queue)
    return next((entry.names for entry in entries if shard in entry.names), [shard])


def set_servers(etc: Path, shards: Collection[str], *, master: Address, slave: Address) -> Edited:
    """Give shards other servers."""
    servers = {"master": master, "slave": slave}

    def changed(settings: Mapping[str, Any], _key: str) -> Mapping[str, Any]:
        found = {key: {**(settings.get(key) or {}), **servers[key]._asdict()} for key in servers}
        return {**settings, **found}

    return _edit_entries(etc, shards, changed)


def set_dequeue_only(etc: Path, shard: str, *, on: bool) -> Edited:
    """Set `dequeue_only` of a shard, and of all others that its entry in the file defines."""

    def changed(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        if key in settings:
            return {**settings, key: on}
        return {key: on, **settings} if on else settings

    return _edit_entries(etc, [shard], changed)


def _edit_entries(
    etc: Path,
    shards: Collection[str],
    changed: Callable[[Mapping[str, Any], str], Mapping[str, Any]],
) -> Edited:
    """Put what `changed` makes of them in the place of the settings of any of `shards`."""

    def change(text: Text, config: Config) -> None:
        for entry in _entries(etc / SHARDS_FILE, text, config.server.mysql_num_db_per_queue):
            if not set(entry.names).isdisjoint(shards):
                *above, key = entry.settings.path
                owner = reduce(getitem, above, text.tree)
                owner[key] = changed(owner.get(key) or {}, entry.keys.dequeue_only) or owner[key]

    return _edit_tree(etc, SHARDS_FILE, change)


def add_shard(etc: Path, shard: str, settings: Mapping[str, Value]) -> Edited:
    """Add a shard at the end of the file, unless it is there with just these settings."""
    path = etc / SHARDS_FILE

    def change(text: Text, config: Config) -> None:
        shards = _in_our_form(path, text)
        if shards.get(shard) == settings:
            return
        if shard in config.shards:
            raise ConfigError(
                [f"{path}: shard {shard!r} is there already; change it there, or choose another"]
            )
        _forget_abandoned(text, shard)
        shards[shard] = settings

    return _edit_tree(etc, SHARDS_FILE, change)


def remove_shard(etc: Path, shard: str, *, abandon: bool) -> Edited:
    """Remove a shard; `abandon`: with the jobs that it holds."""
    path = etc / SHARDS_FILE

    def change(text: Text, config: Config) -> None:
        shards = _in_our_form(path, text)
        if shard in shards:
            if len(config.shards) == 1:
                raise ConfigError([f"{path}: {shard!r} is the only shard; add another one first"])
            del shards[shard]
        if abandon and shard not in _texts(text, ABANDON):
            text.tree[ABANDON] = [*(text.tree.get(ABANDON) or ()), shard]

    return _edit_tree(etc, SHARDS_FILE, change)


def forget_abandoned(etc: Path, shard: str) -> Edited:
    """Remove a shard that has gone from `abandon`, which need not name it any more."""
    return _edit_tree(etc, SHARDS_FILE, lambda text, _config: _forget_abandoned(text, shard))


def _in_our_form(path: Path, text: Text) -> dict[str, Any]:
    """Return the settings of shards, by name."""
    assert text.root is not None, "the loader found shards in it"
    form = form_of(text.root)
    if form is not Form.OURS:
        raise ConfigError(
            [f"{path}: has {form.value} form; add and remove shards there by hand, it acts soon"]
        )
    shards: dict[str, Any] = text.tree["shards"]
    return shards


def _forget_abandoned(text: Text, shard: str) -> None:
    names = _texts(text, ABANDON)
    if names == [shard]:
        del text.tree[ABANDON]
    elif shard in names:
        del text.tree[ABANDON][names.index(shard)]


# --- queues.yaml ------------------------------------------------------------------------------


class LimitSettings(NamedTuple):
    """The rate settings of one queue in queues.yaml."""

    max_jobs_per_second: float | None
    paused: bool


def limit_settings(etc: Path, queue: str) -> LimitSettings:
    """Read a queue's rate settings; the limit is the one that holds while it is not paused."""
    path = etc / QUEUES_FILE
    try:
        text = Text(_read_if_there(path))
    except DocumentError as error:
        raise ConfigError([f"{path}:{error.line}: {error.problem}"]) from error
    settings = _queue_settings(text, queue)
    return LimitSettings(settings.get(_key_of(text, LIMIT)), bool(settings.get("paused")))


def set_limit(etc: Path, queue: str, jobs_per_second: float | None) -> Edited:
    """Set the limit of a queue; None: no limit. Raises ConfigError."""
    return set_limits(etc, queue, {LIMIT: jobs_per_second})


def set_limits(etc: Path, queue: str, limits: Mapping[str, float | None]) -> Edited:
    """Set limits and defaults of a queue, named as in queues.yaml; None removes one. Raises
    ConfigError."""

    def written(text: Text) -> Mapping[str, float | None]:
        return {_key_of(text, name): _plain(value) for name, value in limits.items()}

    return _edit_queue(etc, queue, written)


def _plain(value: float | None) -> float | None:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def set_paused(etc: Path, queue: str, *, paused: bool, by: str = "", reason: str = "") -> Edited:
    """Pause or resume a queue; note who has paused it, when and why. The limit stays in the file,
    and holds again when the queue is resumed. Raises ConfigError."""

    def written(text: Text) -> Mapping[str, Value | None]:
        if not paused:
            return dict.fromkeys(("paused", *PAUSE_NOTE))
        note = {"paused_by": by or None, "pause_reason": reason or None}
        before = _queue_settings(text, queue)
        if before.get("paused") and all(before.get(key) == value for key, value in note.items()):
            return {}
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        return {"paused": True, "paused_at": now if by or reason else None, **note}

    return _edit_queue(etc, queue, written)


def _edit_queue(
    etc: Path, queue: str, values_of: Callable[[Text], Mapping[str, Value | None]]
) -> Edited:
    """Set settings of a queue; None removes a setting, and the queue if it has no other."""

    def change(text: Text, _config: Config) -> None:
        values, before = values_of(text), _queue_settings(text, queue)
        given = {key: value for key, value in values.items() if value is not None}
        after = {**given, **before} | given
        after = {key: value for key, value in after.items() if key in given or key not in values}
        if after != before:
            _put_queue(text, queue, after)

    return _edit_tree(etc, QUEUES_FILE, change)


def _is_pinlaters(text: Text) -> bool:
    return isinstance(text.tree.get("queues"), list)


def _key_of(text: Text, setting: str) -> str:
    """Return the key of a queue's setting in this form of the file."""
    return PINLATERS_LIMIT if setting == LIMIT and _is_pinlaters(text) else setting


def _queue_settings(text: Text, queue: str) -> Mapping[str, Any]:
    listed = text.tree.get("queues") or {}
    if not _is_pinlaters(text):
        return listed.get(queue) or {}
    items = zip(_texts(text, "queues", "name"), listed, strict=True)
    return next((item.get("queueConfig") or {} for name, item in items if name == queue), {})


def _put_queue(text: Text, queue: str, settings: Mapping[str, Any]) -> None:
    """Write the settings of a queue; remove it if there are none."""
    listed: Any = text.tree.get("queues")
    if not _is_pinlaters(text):
        queues = {**(listed or {}), queue: settings}
        text.tree["queues"] = {name: one for name, one in queues.items() if name != queue or one}
        return
    names = _texts(text, "queues", "name")
    if queue not in names:
        listed.append({"name": queue, "queueConfig": settings})
    elif settings:
        listed[names.index(queue)]["queueConfig"] = settings
    else:
        del listed[names.index(queue)]


# --- users.yaml -------------------------------------------------------------------------------


def add_user(etc: Path, user: str, settings: Mapping[str, Value]) -> Edited:
    """Add a user at the end of the file. Raises ConfigError if there is one of that name."""

    def change(text: Text, config: Config) -> None:
        if user in config.users:
            path = etc / USERS_FILE
            raise ConfigError([f"{path}: user {user!r} is there already; remove it first"])
        text.tree["users"] = {**(text.tree.get("users") or {}), user: settings}

    return _edit_tree(etc, USERS_FILE, change)


def remove_user(etc: Path, user: str) -> Edited:
    """Remove a user with all its tokens, if there is one of that name."""

    def change(text: Text, config: Config) -> None:
        if user in config.users:
            users = text.tree["users"]
            text.tree["users"] = {name: users[name] for name in users if name != user}

    return _edit_tree(etc, USERS_FILE, change)


def add_token(etc: Path, user: str, token: Mapping[str, Value]) -> Edited:
    """Give a user one more token. Raises ConfigError if there is no such user."""

    def change(text: Text, config: Config) -> None:
        if user not in config.users:
            names = ", ".join(config.users) or "none"
            raise ConfigError([f"{etc / USERS_FILE}: no user {user!r}; there are: {names}"])
        settings = text.tree["users"][user]
        tokens = [*(settings.get("tokens") or ()), token]
        text.tree["users"][user] = {**settings, "tokens": tokens}

    return _edit_tree(etc, USERS_FILE, change)


# --- job_types.yaml ---------------------------------------------------------------------------


def add_job_type(etc: Path, made: JobType) -> Edited:
    """Add a job type at the end of the file, unless there is one of its name or queue."""

    def change(text: Text, config: Config) -> None:
        others = config.job_types
        if made.queue not in others and made.name not in {one.name for one in others.values()}:
            settings: dict[str, object] = {
                "name": made.name,
                "delivery_strategy": made.delivery_strategy,
                "attempts": made.attempts,
                "concurrency": made.concurrency,
                "created_at": made.created_at.isoformat(),
            }
            if made.archive_hours != DEFAULT_ARCHIVE_HOURS:
                settings["archive_hours"] = made.archive_hours
            text.tree["job_types"] = {**(text.tree.get("job_types") or {}), made.queue: settings}

    return _edit_tree(etc, JOB_TYPES_FILE, change)


def set_job_type(etc: Path, name: str, settings: Mapping[str, float | None]) -> Edited:
    """Change settings of a job type; None: the default. Raises ConfigError if there is none."""

    def change(text: Text, config: Config) -> None:
        queue = _queue_of_type(etc, name, config)
        merged = {**text.tree["job_types"][queue], **settings}
        text.tree["job_types"][queue] = {k: v for k, v in merged.items() if v is not None}

    return _edit_tree(etc, JOB_TYPES_FILE, change)


def remove_job_type(etc: Path, name: str) -> Edited:
    """Remove a job type; its queue and jobs stay. Raises ConfigError if there is none."""

    def change(text: Text, config: Config) -> None:
        queue, types = _queue_of_type(etc, name, config), text.tree["job_types"]
        text.tree["job_types"] = {key: types[key] for key in types if key != queue}

    return _edit_tree(etc, JOB_TYPES_FILE, change)


def _queue_of_type(etc: Path, name: str, config: Config) -> str:
    found = next((one.queue for one in config.job_types.values() if one.name == name), None)
    if found is None:
        names = ", ".join(one.name for one in config.job_types.values()) or "none"
        raise ConfigError([f"{etc / JOB_TYPES_FILE}: no job type {name!r}; there are: {names}"])
    return found


# --- files ------------------------------------------------------------------------------------


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other commands that edit out of the folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise ConfigError([f"{path}: can't be read: {error.strerror}"]) from error


def _read_if_there(path: Path) -> bytes:
    return _read(path) if path.exists() else b""


def _replace(path: Path, before: bytes, after: bytes) -> None:
    """Put `after` in the file's place, durably. A link stays one: what it names is replaced. A file
    that was missing is made for its owner only."""
    target = path.resolve()
    try:
        status = target.stat() if target.exists() else None
        temporary = write_beside(target, after, durably=True, like=status)
        try:
            if _read_if_there(target) != before:
                raise ConfigError([f"{path}: was changed by somebody else meanwhile; try again"])
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
        sync_folder(target.parent)
    except OSError as error:
        raise ConfigError([f"{path}: can't be written: {error.strerror}"]) from error
