"""A deployment's folder: the files that `init` writes, and the lock of the command at work there.

Explanations and defaults come from the configuration's schema.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from pinlaterd.config import layout
from pinlaterd.config.allowed import Between
from pinlaterd.config.schema import (
    MAX_PORT,
    PAUSE_NOTE,
    QueueSettings,
    ServerSettings,
    Setting,
    default_file,
    settings_of,
)
from pinlaterd.errors import DeploymentError

T = TypeVar("T")

_WIDTH = 100
_COMMAND_LOCK = layout.RUN / "command.lock"

# A Unix socket's path holds 107 bytes; supervisorctl connects to DIR/run/supervisor.sock
_LONGEST_DIRECTORY = 107 - len(f"/{layout.SUPERVISOR_SOCKET}")


def check_depth(directory: Path) -> None:
    """Refuse a folder whose sockets could not be reached."""
    length = len(os.fsencode(directory.absolute()))
    if length > _LONGEST_DIRECTORY:
        raise DeploymentError(
            f"{directory.absolute()}: the path has {length} bytes, sockets in it would be longer "
            f"than the system allows; choose a folder of at most {_LONGEST_DIRECTORY} bytes"
        )


def write_deployment(
    directory: Path, engine: str, shards: int, ports: Mapping[str, int]
) -> list[Path]:
    """Write DIR/etc, DIR/run and DIR/data; returns the files. `ports`: by key of pinlaterd.yaml.

    Never overwrites: if one is there already, or can't be written, none is left."""
    check_depth(directory)
    etc = directory / layout.ETC
    texts = {
        etc / layout.SERVER_FILE: server_text(with_http_ports(ports)),
        etc / layout.SHARDS_FILE: shards_text(engine, shards),
        etc / layout.QUEUES_FILE: queues_text(),
        etc / layout.SUPERVISORD_FILE: resources_text(layout.SUPERVISORD_FILE),
    }
    there = [path for path in texts if os.path.lexists(path)]
    if there:
        names = ", ".join(str(path) for path in there)
        raise DeploymentError(f"{names}: there already, and nothing is ever overwritten")
    written: list[Path] = []
    try:
        make_folders(directory)
        for path, text in texts.items():
            path.touch(mode=0o600, exist_ok=False)
            written.append(path)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise DeploymentError(f"{error.filename or directory}: {error.strerror}") from error
    return written


def make_folders(directory: Path) -> None:
    """Make what is missing of the folders; raise DeploymentError if others may write to one."""
    # Not by default: a umask of 002 would let the group write to it.
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    layout.check_folders(directory)
    for folder in (layout.ETC, layout.RUN, layout.DATA):
        (directory / folder).mkdir(mode=0o700, exist_ok=True)


def with_http_ports(given: Mapping[str, T]) -> Mapping[str, T | int]:
    """Return the settings that a deployment is given, with ports of its own for HTTP and for the
    dashboard where only other ports are given: as far from the Thrift port as by default, or the
    next that is not among them and that nobody has. So several deployments of a machine get on with
    each other."""
    port, defaults = given.get("port"), ServerSettings()
    found: dict[str, T | int] = {**given}
    if isinstance(port, int):
        for name in ("http_port", "web_port"):
            first, taken = port + getattr(defaults, name) - defaults.port, set(found.values())
            candidates = (each for each in range(first, MAX_PORT + 1) if each not in taken)
            found.setdefault(name, next(filter(_is_free, candidates), 0))
    return found


def _is_free(port: int) -> bool:
    """Return whether a server of this machine could listen at `port` now."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


_SERVER_HEAD = (
    "# The server's settings. Each line that is commented out shows the default.",
    "# `pinlater-admin config check` lists mistakes. Changes act at once, or `pinlaterd",
    "# status` lists them, and `pinlaterd up` restarts what they concern.",
)
_LOCAL_HEAD = (
    "# The settings of this machine alone; they go before those of pinlaterd.yaml, which all",
    "# servers of the cluster have in common.",
)


def server_text(ports: Mapping[str, int]) -> str:
    """Write pinlaterd.yaml: every key, explained; those with their default are commented out."""
    settings = settings_of(ServerSettings).items()
    shared = {name: setting for name, setting in settings if not setting.only_local}
    return _settings_text(_SERVER_HEAD, shared, ports)


def local_text(given: Mapping[str, object]) -> str:
    """Write local.yaml, likewise."""
    given = with_http_ports(given)
    settings = settings_of(ServerSettings).items()
    own = {name: setting for name, setting in settings if setting.machine}
    return _settings_text(_LOCAL_HEAD, own, given)


def _settings_text(
    head: Sequence[str], settings: Mapping[str, Setting], given: Mapping[str, object]
) -> str:
    lines = [*head]
    defaults = ServerSettings()
    for name, setting in settings.items():
        lines += ["", *_explanation(setting)]
        if name in given:
            lines.append(f"{name}: {json.dumps(given[name])}")
        elif setting.secret or setting.default_of_machine:
            lines.append(f"#{name}:")
        else:
            default = getattr(defaults, name)
            shown = str(default).lower() if isinstance(default, bool) else default
            lines.append(f"#{name}: {shown}".rstrip())
    return "\n".join(lines) + "\n"


# of settings that only queues have
_QUEUE_EXAMPLES = {
    "max_jobs_per_second": "100",
    "paused": "false",
    "max_in_progress": "10",
    "max_pending": "1000000",
    "default_attempts": "2",
    "default_priority": "1",
}


def queues_text() -> str:
    settings = {**settings_of(ServerSettings), **settings_of(QueueSettings)}
    lines = [
        "# Settings of single queues, which override those for all (pinlaterd.yaml).",
        "#",
        "# queues:",
        "#   mail:",
    ]
    for field in dataclasses.fields(QueueSettings):
        if field.name in PAUSE_NOTE:
            continue
        default = _QUEUE_EXAMPLES.get(field.name) or getattr(ServerSettings(), field.name)
        lines += [f"#     {line}" for line in _explanation(settings[field.name])]
        lines.append(f"#     {field.name}: {default}")
    return "\n".join([*lines, "queues: {}"]) + "\n"


def shards_text(engine: str, shards: int) -> str:
    """Write shards.yaml with `shards` shards of `engine`, named 1, 2, …"""
    text = resources_text("shards.yaml") + "shards:\n"
    for name in map(str, range(1, shards + 1)):
        lines = (f"engine: {engine}", *_SHARD_LINES[engine])
        text += f"  {name}:\n" + "".join(f"    {line}\n" for line in lines).replace("NAME", name)
    return text


def resources_text(name: str) -> str:
    """Read a file of this package."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _explanation(setting: Setting) -> list[str]:
    allowed = setting.allowed
    within = f" ({allowed.low} to {allowed.high})" if isinstance(allowed, Between) else ""
    text = setting.doc[0].upper() + setting.doc[1:] + within
    return textwrap.wrap(text, _WIDTH - 4, initial_indent="# ", subsequent_indent="# ")


def _on_server(port: int, *account: str) -> Sequence[str]:
    return (
        f"master: {{host: 127.0.0.1, port: {port}}}",
        f"#slave: {{host: 127.0.0.1, port: {port + 1}}}",
        *account,
    )


# The settings of a shard named NAME, by its engine.
_SHARD_LINES: Mapping[str, Sequence[str]] = {
    "sqlite": (f"file: {default_file('NAME')}",),
    "mysql": _on_server(3306, "user: pinlater", "#passwd_env: PINLATERD_MYSQL_PASSWORD"),
    "redis": _on_server(6379, "#passwd_env: PINLATERD_REDIS_PASSWORD"),
}


# --- the folder ---------------------------------------------------------------------------


@contextlib.contextmanager
def at_work_in(directory: Path) -> Iterator[None]:
    """Make the deployment the current folder, and keep other commands out of it meanwhile."""
    check_depth(directory)
    with contextlib.chdir(directory):
        layout.enter(layout.ETC)
        layout.LOGS.mkdir(mode=0o700, exist_ok=True)
        try:
            sole = layout.lock(_COMMAND_LOCK, patient=False)
        except BlockingIOError as error:
            raise DeploymentError(
                f"another `pinlaterd up`, `down` or `pinlater-admin restart` works in {directory}; "
                "wait until it is done"
            ) from error
        with sole:
            yield
