"""Private MariaDB servers for tests: each in a folder of its own, on a free port of 127.0.0.1.

Nothing of the machine's own server is used: no configuration file, socket, port or data. A server
ends with the process that started it, however that ends.
"""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pymysql

HOST = "127.0.0.1"
USER, PASSWD = "pinlater", "it's a \\ secret"
START_SECONDS = END_SECONDS = 120.0
DEBIAN_PACKAGE = "mariadb-server"

_SMALL = (
    "--innodb-buffer-pool-size=48M",
    "--innodb-log-file-size=24M",
    "--innodb-log-buffer-size=2M",
    "--key-buffer-size=1M",
    "--aria-pagecache-buffer-size=2M",
    "--performance-schema=OFF",
    "--max-connections=60",
    "--table-open-cache=400",
    "--skip-name-resolve",
)


class MariaDB:
    """One server. `folder` must not exist yet; its path has to be short, for there is a socket."""

    host = HOST
    users_host = HOST  # where its user may come from

    def __init__(self, folder: Path, port: int, *options: str) -> None:
        self.folder = folder
        self.port = port
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "tmp").mkdir(parents=True)
        self._log = folder / "server.log"
        self._install()
        self.start()
        with self.connect("root", "") as root:
            root.cursor().execute(
                f"CREATE USER '{USER}'@%s IDENTIFIED BY %s", (self.users_host, PASSWD)
            )
            root.cursor().execute(f"GRANT ALL ON *.* TO '{USER}'@%s", (self.users_host,))

    def _install(self) -> None:
        done = subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                f"--datadir={self.folder / 'data'}",
                f"--tmpdir={self.folder / 'tmp'}",
                f"--user={getpass.getuser()}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                "--skip-name-resolve",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 0, done.stdout.decode(errors="replace")

    def start(self, *options: str) -> None:
        """Returns once it takes connections."""
        with self._log.open("ab") as log:
            self._process = self._launch(
                [
                    shutil.which("mariadbd") or "/usr/sbin/mariadbd",
                    "--no-defaults",
                    f"--datadir={self.folder / 'data'}",
                    # Not a shared one: a server that starts removes what it takes for its own.
                    f"--tmpdir={self.folder / 'tmp'}",
                    f"--socket={self.folder / 's'}",
                    f"--pid-file={self.folder / 'pid'}",
                    f"--port={self.port}",
                    f"--bind-address={self.host}",
                    f"--user={getpass.getuser()}",
                    *_SMALL,
                    *self._options,
                    *options,
                ],
                log,
            )
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.connect("root", "").close()
                return
            except pymysql.MySQLError:
                said = self._log.read_text(errors="replace")
                assert self._process.poll() is None, said
                assert time.monotonic() < deadline, said
                time.sleep(0.02)

    def _launch(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
        )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """By itself: it aborts, for one, when it can write nowhere."""
        return self._process is not None and self._process.poll() is not None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def connect(self, user: str = USER, passwd: str = PASSWD, **options: Any) -> Any:
        """A connection of a stranger, who knows nothing of owners."""
        return pymysql.connect(
            host=self.host, port=self.port, user=user, password=passwd, autocommit=True, **options
        )

    def kill(self) -> None:
        """As a power cut does to a process."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In order. Safe to repeat."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            os.kill(process.pid, signal.SIGCONT)
            process.send_signal(how)
            process.wait(END_SECONDS)


def start_mariadb(
    program_path: Callable[..., str], folder: Path, port: int, *options: str
) -> MariaDB:
    """`program_path` is the fixture: without the programs the test is skipped."""
    require_mariadb(program_path)
    return MariaDB(folder, port, *options)


def require_mariadb(program_path: Callable[..., str]) -> None:
    for program in ("mariadbd", "mariadb-install-db"):
        program_path(program, debian_package=DEBIAN_PACKAGE)
