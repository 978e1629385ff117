"""A private MariaDB or Redis for the quickstart, from Debian's packages.

It runs under the deployment's own supervisord as the program `store`, so that `pinlaterd up` and
`down` start and stop it with the rest. It listens on loopback only, with a password of its own in
DIR/etc/store.passwd, and keeps its data in DIR/data.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

USER = "pinlater"
_LOOPBACK = "127.0.0.1"
_MORE_FOLDERS = "/usr/sbin:/usr/local/sbin:/sbin"  # servers are not on everybody's path


class StoreMissing(Exception):
    """A program that the store needs is not there; the message says how to get it."""


class Store(NamedTuple):
    """A server that shards may use: where it listens, and who they are there."""

    engine: str
    host: str
    port: int
    user: str
    passwd_line: str  # of shards.yaml; "" if it takes none


def add_private_store(directory: Path, engine: str, program: str = "store") -> Store:
    """Set up a server of `engine`, as `program` of supervisord's, in a deployment that was just
    written and does not run yet.

    Raises StoreMissing, OSError, subprocess.CalledProcessError."""
    port = _free_port()
    password = secrets.token_urlsafe(24)
    _write_secret(directory / password_file(program), password + "\n")
    command = _SERVERS[engine](directory.resolve(), port, password)
    with (directory / "etc" / "supervisord.conf").open("a", encoding="utf-8") as file:
        file.write(
            "\n; The quickstart's private server.\n"
            f"[program:{program}]\n"
            f"command = {shlex.join(command).replace('%', '%%')}\n"
            "priority = 1\n"
            "autorestart = true\n"
            "stopwaitsecs = 60\n"
            "redirect_stderr = true\n"
            f"stdout_logfile = %(here)s/../run/log/{program}.log\n"
        )
    user = USER if engine == "mysql" else ""
    return Store(engine, _LOOPBACK, port, user, f"passwd_file: {password_file(program)}")


def password_file(program: str) -> str:
    """In the deployment."""
    return f"etc/{program}.passwd"


def shards_text(store: Store, shards: int, first: int = 1) -> str:
    """shards.yaml with all shards on one server, numbered from `first` on."""
    lines = ["# Written by tools/quickstart; `pinlaterd init` explains all keys.", "shards:"]
    for number in range(first, first + shards):
        lines += [
            f"  {number}:",
            f"    engine: {store.engine}",
            f"    master: {{host: {store.host}, port: {store.port}}}",
        ]
        lines += [f"    user: {store.user}"] if store.user else []
        lines += [f"    {store.passwd_line}"] if store.passwd_line else []
    return "\n".join(lines) + "\n"


def _mariadb(directory: Path, port: int, password: str) -> list[str]:
    data = directory / "data" / "mariadb"
    temporary = directory / "data" / "mariadb-tmp"  # a shared one is swept by whoever starts
    temporary.mkdir(parents=True, exist_ok=True)
    as_root = ["--user=root"] if os.geteuid() == 0 else []
    install = _program("mariadb-install-db", "mariadb-server")
    subprocess.run(
        [
            install,
            "--no-defaults",
            f"--datadir={data}",
            f"--tmpdir={temporary}",
            "--skip-test-db",
            *as_root,
        ],
        check=True,
        capture_output=True,
    )
    # Done anew at every start; the password is of letters, digits, - and _.
    first = directory / "etc" / "store.sql"
    _write_secret(
        first,
        f"CREATE USER IF NOT EXISTS '{USER}'@'{_LOOPBACK}';\n"
        f"ALTER USER '{USER}'@'{_LOOPBACK}' IDENTIFIED BY '{password}';\n"
        f"GRANT ALL PRIVILEGES ON *.* TO '{USER}'@'{_LOOPBACK}';\n",
    )
    return [
        _program("mariadbd", "mariadb-server"),
        "--no-defaults",
        f"--datadir={data}",
        f"--tmpdir={temporary}",
        f"--socket={data}/server.sock",
        f"--pid-file={data}/server.pid",
        f"--bind-address={_LOOPBACK}",
        f"--port={port}",
        "--skip-name-resolve",
        f"--init-file={first}",
        *as_root,
    ]


def _redis(directory: Path, port: int, password: str) -> list[str]:
    data = directory / "data" / "redis"
    data.mkdir(parents=True, exist_ok=True)
    settings = directory / "etc" / "store.conf"
    _write_secret(
        settings,
        f"bind {_LOOPBACK}\nport {port}\ndir {shlex.quote(os.fspath(data))}\n"
        f'requirepass {password}\nappendonly yes\nappendfsync everysec\nsave ""\n',
    )
    return [_program("redis-server", "redis-server"), os.fspath(settings)]


_SERVERS: Mapping[str, Callable[[Path, int, str], list[str]]] = {
    "mysql": _mariadb,
    "redis": _redis,
}


def _program(name: str, package: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{_MORE_FOLDERS}")
    if found is None:
        raise StoreMissing(
            f"{name} is not installed; on Debian: apt-get install --no-install-recommends "
            f"{package}. Or name a server of yours: --server HOST:PORT"
        )
    return found


def _write_secret(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
