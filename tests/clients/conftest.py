"""The service that clients of other makes talk to, and those clients, made once each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.clients.languages import LANGUAGES, Program, Workshop
from tests.conftest import ProgramPath

ProgramOf = Callable[[str], Program]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory, program_path: ProgramPath) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("clients"), program_path)


@pytest.fixture(scope="session")
def program_of(workshop: Workshop) -> ProgramOf:
    """The program of a language, ready to run."""
    made: dict[str, Program] = {}

    def make(language: str) -> Program:
        if language not in made:
            made[language] = LANGUAGES[language](workshop)
        return made[language]

    return make
