"""What runs of the checker need on the machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import ProgramPath
from tests.servers.mariadb import DEBIAN_PACKAGE

_SERVERS = {
    "mysql": ("mariadbd", DEBIAN_PACKAGE),
    "redis": ("redis-server", "redis-server"),
    "redis-always": ("redis-server", "redis-server"),
}


@pytest.fixture
def needs(program_path: ProgramPath) -> Callable[[str], None]:
    """Called with an engine: skips the test, or fails it in CI, if a program for it is missing."""

    def check(engine: str) -> None:
        program_path("cc", debian_package="g++")
        if engine in _SERVERS:
            program, package = _SERVERS[engine]
            program_path(program, debian_package=package)

    return check
