"""The coordinator's pages, for programs: over its Unix socket, or over HTTP.

pinlaterd.status tells what samples show.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from pinlaterd.config.layout import ETC, SHARDS_FILE, STATS_SOCKET
from pinlaterd.errors import ConnectionFailed
from pinlaterd.stats import StatsSnapshot
from pinlaterd.status import Facts, Sample

ALL_SERVERS = "?servers=all"
_TIMEOUT_SECONDS = 5.0


class CoordinatorAway(ConnectionFailed):
    """The coordinator does not answer. `cure`: what to do about that."""

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.cure = cure


class UnixConnection(http.client.HTTPConnection):
    """HTTP to a socket in a deployment's folder, by default DIR/run/stats.sock. The paths of Unix
    sockets hold 107 bytes, DIR may hold more."""

    def __init__(self, directory: Path, path: Path = STATS_SOCKET) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_SECONDS)
        self._directory = directory
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        # By a descriptor: other threads share the current folder.
        directory = os.open(self._directory, os.O_PATH | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{directory}/{self._path}")
        finally:
            os.close(directory)


def take_sample(directory: Path, url: str | None = None) -> Sample:
    """Ask the coordinator of a deployment's `directory`, or at `url`, for the status and figures of
    all servers. Raises ConnectionFailed."""
    status, stats = (
        fetch_json(f"/{page}.json{ALL_SERVERS}", directory=directory, url=url)
        for page in ("status", "snapshot")
    )
    figures = msgspec.convert(stats, Mapping[str, StatsSnapshot], str_keys=True)
    return Sample(status, figures, time.monotonic())


def take_frame(directory: Path, url: str | None = None) -> Facts:
    """Ask for what has happened on all servers in the last seconds. Raises ConnectionFailed."""
    found: Facts = fetch_json(f"/frame.json{ALL_SERVERS}", directory=directory, url=url)
    if "queues" not in found:
        raise ConnectionFailed("the coordinator is of an earlier release: restart it")
    return found


def fetch_json(path: str, *, directory: Path, url: str | None) -> Any:
    """Fetch the coordinator's page at `path`. Raises CoordinatorAway, or ConnectionFailed if what
    answers is no coordinator."""
    connection, prefix, where = _connection(directory, url)
    with contextlib.closing(connection):
        try:
            connection.request("GET", prefix + path)
            response = connection.getresponse()
            body = response.read()
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # or no host's name
            reason = (getattr(error, "strerror", None) or str(error)).lower()
            cure = _cure(directory, url)
            if isinstance(error, TimeoutError):
                reason, cure = f"none within {_TIMEOUT_SECONDS:g} s", "it may be slow: try again"
            raise CoordinatorAway(
                f"no answer from the coordinator at {where}: {reason}", cure
            ) from error
    try:
        # /health and /status.json answer 503 with their facts when something is unwell.
        return json.loads(body)
    except ValueError as error:
        raise ConnectionFailed(
            f"{where}{path} answered {response.status}, not JSON; is it pinlaterd's?"
        ) from error


def _cure(directory: Path, url: str | None) -> str:
    if url is None and not (directory / ETC / SHARDS_FILE).exists():
        return (
            f"{directory.absolute()} is no deployment (no {ETC / SHARDS_FILE}): give --dir, or "
            "--stats-url"
        )
    return "is it running? `pinlaterd up` starts it, --dir or --stats-url choose it"


def _connection(directory: Path, url: str | None) -> tuple[http.client.HTTPConnection, str, str]:
    if url is None:
        return UnixConnection(directory), "", str(directory / STATS_SOCKET)
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    made = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = made(parts.hostname or "localhost", parts.port, timeout=_TIMEOUT_SECONDS)
    return connection, parts.path.rstrip("/"), url
