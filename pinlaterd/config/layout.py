"""The files of a deployment: where they lie, relative to its folder DIR, and how they are shared.

Every process makes DIR its current folder first (`enter`), so that the paths of Unix sockets
stay short: the kernel allows them 107 bytes. Files in run/ that several processes use are locked,
or replaced at once. The kernel releases a lock (flock) when its holder ends, however that happens;
lock files stay where they are, or two processes could lock two files of one name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from pinlaterd.errors import DeploymentError

T = TypeVar("T")

ETC = Path("etc")
RUN = Path("run")
DATA = Path("data")

SERVER_FILE = "pinlaterd.yaml"
SHARDS_FILE = "shards.yaml"
QUEUES_FILE = "queues.yaml"
USERS_FILE = "users.yaml"
JOB_TYPES_FILE = "job_types.yaml"
LOCAL_FILE = "local.yaml"
CLUSTER_KEY_FILE = "cluster.key"
SUPERVISORD_FILE = "supervisord.conf"
# The same on all servers of a cluster.
SHARED_FILES = (SERVER_FILE, SHARDS_FILE, QUEUES_FILE, USERS_FILE, JOB_TYPES_FILE)
CONFIG_FILES = (*SHARED_FILES, LOCAL_FILE)

LOGS = RUN / "log"
SHARD_PROGRAMS = RUN / "supervisord.d"
STATS_SOCKET = RUN / "stats.sock"
WEB_SOCKET = RUN / "web.sock"
SUPERVISOR_SOCKET = RUN / "supervisor.sock"
SUPERVISOR_PID_FILE = RUN / "supervisord.pid"
COORDINATOR_LOCK = RUN / "coordinator.lock"
BASE_FILE = RUN / "shared_config.json"  # of a cluster: what etc/ was made of last
SNAPSHOT_FILE = RUN / "snapshot.json"
CONFIG_FILE = RUN / "config.json"
CONFIG_LOCK = RUN / "config.lock"
EDIT_LOCK = RUN / "edit.lock"
PROGRAMS_LOCK = RUN / "programs.lock"
PROGRAMS_DUE = RUN / "programs.due"
RATES_FILE = RUN / "rates.json"
PERMITS_FILE = RUN / "permits.json"
HISTORY_FILE = DATA / "history"
KEY_PLACEMENT_FILE = DATA / "key_placement.json"
SERVER_SET_COPY = RUN / "server_set"
LEAVING = RUN / "leaving"  # while it is there, this server's shards go to others
ZOOKEEPER_SESSION = RUN / "zookeeper.session"

COORDINATOR = "coordinator"  # the program

COORDINATOR_ENDPOINT = f"ipc://{RUN}/coordinator.ipc"


def listener_socket(program: str) -> Path:
    """Locate the Unix socket at which a process hands out its listening sockets."""
    return RUN / f"{program}.listener"


def shard_endpoint(shard: str) -> str:
    """Return the ZeroMQ address at which a shard's owner takes calls."""
    return f"ipc://{RUN}/shard-{shard}.ipc"


def clock_file(shard: str) -> Path:
    """Locate the file in which a shard notes the time each second, for its successor."""
    return RUN / f"{shard_program(shard)}.clock"


def move_lock(shard: str) -> Path:
    """Return the file that the command which moves a shard's jobs locks."""
    return RUN / f"move-{shard}.lock"


def program_name(kind: str, member: str = "") -> str:
    """Return the name of a process in supervisord and in reports, by its kind (config.kinds)."""
    return f"{kind}-{member}" if member else kind


def shard_program(shard: str) -> str:
    return program_name("shard", shard)


def enter(etc: Path) -> Path:
    """Make the deployment that `etc` (DIR/etc) belongs to the current folder.

    Returns what `etc` is called from there. Creates DIR/run and DIR/data, for their owner only.
    Raises DeploymentError if others could change what runs there."""
    etc = Path(os.path.abspath(etc))  # noqa: PTH100  (resolve() would follow a linked etc away)
    os.chdir(etc.parent)
    # After chdir no one who may rename DIR can put another folder in its place.
    check_folders(Path())
    for folder in (RUN, DATA):
        folder.mkdir(mode=0o700, exist_ok=True)
    return Path(etc.name)


def check_folders(directory: Path) -> None:
    """Check that nobody else can change what runs in the deployment `directory`, or its jobs.

    Each of its folders that exists has to be a real one, of this user or root, and no other may
    write to it: who can puts another supervisord.conf there, and so runs programs as this user. The
    same holds for that file, for modules in etc/, and for configuration, which a group may share.
    Raises DeploymentError with all that is wrong, and the cures."""
    modules = sorted(path.name for path in (directory / ETC).glob("*.py"))
    files = [ETC / name for name in (SUPERVISORD_FILE, *CONFIG_FILES, *modules)]
    checked = (Path(), ETC, *files, RUN, LOGS, SHARD_PROGRAMS, DATA)
    problems = [problem for name in checked if (problem := _open_to_others(directory, name))]
    if problems:
        raise DeploymentError("\n".join(problems))


def _open_to_others(directory: Path, name: Path) -> str | None:
    path = directory / name
    user, shown, shared = os.geteuid(), path.absolute(), name.name in CONFIG_FILES
    quoted, target = shlex.quote(str(shown)), shlex.quote(os.path.realpath(path))
    # Configuration may be linked, file by file: in etc/ nobody else can turn the link.
    if path.is_symlink() and name.parent != ETC:
        cure = f"`rm {quoted}{f' && mv {target} {quoted}' if path.exists() else ''}`"
        cure = cure if name.name else f"give {target} as DIR"
        return f"{shown}: a link, which others may turn elsewhere; {cure}"
    if not path.exists():
        return None
    found = path.stat()
    if found.st_uid not in (0, user):
        why = f"another user (uid {found.st_uid}; is this to run as that one?) owns it and may"
        cure = f"chown -R {user} {quoted}"
    elif found.st_mode & (stat.S_IWOTH if shared else stat.S_IWGRP | stat.S_IWOTH):
        why = f"other users may write to it (mode {stat.S_IMODE(found.st_mode):04o}) and"
        cure = f"chmod {'o' if shared else 'go'}-w {quoted}"
    else:
        return None
    return f"{shown}: {why} change what runs there; look through it, then `{cure}`"


# --- files ------------------------------------------------------------------------------------


def read_file(path: Path, most_bytes: int = -1) -> bytes:
    """Read a file that others put there, or its first bytes. Raises OSError, also for what might
    block a reader for ever, or have no end: a pipe, a device."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, "rb", opener=opener) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file", str(path))
        return file.read(most_bytes)


def lock(path: Path, *, patient: bool) -> BinaryIO:
    """Lock the file `path`, which is made if need be, until what this returns is closed.

    Raises BlockingIOError if another process has it and this is not `patient`; OSError, with the
    file's name, if it can't be had at all."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


def replace_file(path: Path, data: bytes, *, durably: bool = False) -> None:
    """Replace the file at once, for its owner only: readers see the old or the new one.

    `durably`: a machine that loses its power leaves no empty file behind."""
    write_beside(path, data, durably=durably).replace(path)


def write_beside(
    path: Path, data: bytes, *, durably: bool = False, like: os.stat_result | None = None
) -> Path:
    """Write a file in the same folder, to be renamed; of the mode and owner of `like`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(data)
            if like is not None:
                os.fchmod(file.fileno(), like.st_mode & 0o7777)
                if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), like.st_uid, like.st_gid)
            if durably:
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def sync_folder(folder: Path) -> None:
    """Make the entries of new and renamed files durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_out_of_files(error: OSError) -> bool:
    """Return whether it says nothing of the file that could not be opened."""
    return error.errno in {errno.EMFILE, errno.ENFILE}


class FileWatch(Generic[T]):
    """Sees when files that people write have changed, once their author is done: they count when
    they are the same at two looks. Edited in place, replaced, a link turned elsewhere, deleted and
    restored: all the same."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._paths = paths
        self._read = read
        self._seen: Sequence[tuple[int, ...]] | None = None
        self._given: Sequence[tuple[int, ...]] | None = None

    def look(self) -> T | None:
        """Read the files if they have changed since the last result and have been still for one
        look; else return None. Raises what `read` raises, and reads again at the next look."""
        marks = self._marks()
        before, self._seen = self._seen, marks
        if marks == self._given or marks != before:
            return None
        found = self._read()
        if self._marks() != marks:
            self._seen = None  # written to while we read
            return None
        self._given = marks
        return found

    @property
    def rests(self) -> bool:
        """Whether the files have not changed, by the last look, since they were given."""
        return self._seen == self._given

    def _marks(self) -> Sequence[tuple[int, ...]]:
        return [_file_mark(path) for path in self._paths]


def _file_mark(path: Path) -> tuple[int, ...]:
    """Return what changes with the file's content: also ctime, which no tool can set back."""
    try:
        found = os.stat(path)  # noqa: PTH116  (the cheapest, several times a second)
    except OSError as error:
        return (error.errno or 0,)
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_dev, found.st_ino, found.st_size, *times)


class ConfigFiles:
    """The files of `etc` as they were at one time."""

    def __init__(self, etc: Path) -> None:
        self._etc = etc
        self._contents: dict[Path, bytes | OSError] = {}
        for name in CONFIG_FILES:
            path = etc / name
            try:
                self._contents[path] = read_file(path)
            except OSError as error:
                if is_out_of_files(error):
                    raise
                self._contents[path] = error

    @property
    def digest(self) -> str:
        """The same for the same contents, in every process that reads them."""
        hashed = hashlib.sha256()
        for content in self._contents.values():
            data = b"" if isinstance(content, OSError) else content
            hashed.update(len(data).to_bytes(8, "big") + data)
        return hashed.hexdigest()[:16]

    def read(self, path: Path) -> bytes:
        """Read a file for `load_config`. Raises OSError, as reading the file did."""
        content = self._contents[path]
        if isinstance(content, OSError):
            raise content
        return content

    def content(self, name: str) -> bytes:
        """b"" if it is not there."""
        content = self._contents[self._etc / name]
        return b"" if isinstance(content, OSError) else content
