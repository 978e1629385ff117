"""Thrift libraries of other makes do the whole life of a job: all say the same of it.

Each program is what a user of that language would write, and an example of docs/clients.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import pytest

from pinlaterd.client import JobState
from tests.clients.languages import LANGUAGES, SOURCES, Program, Workshop
from tests.conftest import ProgramPath
from tests.deployment import Deployment

pytestmark = pytest.mark.service

TRANSCRIPT = """\
created
claimed 00ff0a80 2 of 2 attempts 600 s
claimed 6772c3bcc39f652c20e4b896e7958c 5 of 5 attempts 600 s
claimed 737465702031 2 of 2 attempts 600 s
claimed again step 2
found SUCCEEDED 2 left 00ff0a80 sent ✓
found PENDING 4 left 6772c3bcc39f652c20e4b896e7958c né; später
found SUCCEEDED 2 left 737465702032 ½
delayed 3600000 ms
scanned 2
counted 1
refused 413 queue 'nowhere' does not exist; create it first
refused 403 the password is not the admin password
"""

EVERYWHERE = ("framed binary", "unframed binary", "framed compact")
SPOKEN = {
    "python": (*EVERYWHERE, "framed binary-accelerated", "framed compact-accelerated"),
    "nodejs": EVERYWHERE,
    "java": EVERYWHERE,
    "perl": ("framed binary", "unframed binary"),
    "cpp": EVERYWHERE,
}


ProgramOf = Callable[[str], Program]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, program_path: ProgramPath) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("clients"), program_path)


@pytest.fixture(scope="module")
def program_of(workshop: Workshop) -> ProgramOf:
    """The program of a language, made once."""
    return functools.cache(lambda language: LANGUAGES[language](workshop))


@pytest.mark.parametrize(
    ("language", "form"), [(language, form) for language, forms in SPOKEN.items() for form in forms]
)
def test_the_whole_life_of_a_job(service: Deployment, program_of: ProgramOf, language, form):
    queue = f"{language}_{form}".replace(" ", "_").replace("-", "_")

    printed = program_of(language).run(str(service.port), queue, *form.split())

    assert printed == TRANSCRIPT
    with service.client() as other:
        [waiting] = other.scan(queue, JobState.PENDING, future=True)
        waiting = other.lookup([waiting.descriptor], include_body=True)[waiting.descriptor]
        assert waiting.body == "grüße, 世界".encode()
        assert waiting.custom_status == "né; später"
        assert other.count(queue, JobState.SUCCEEDED) == 2


def test_the_accelerated_protocols_are_compiled():
    """Without the compiled part they would silently be the plain ones, tried twice."""
    assert pytest.importorskip("thrift.protocol.fastbinary").decode_compact


def test_pinlaters_own_interface_works_unchanged(service: Deployment, workshop: Workshop):
    """Its clients know none of our fields, neither those they could send nor those they get."""
    stubs = workshop.generate("py", pinlaters=True)
    program = Program(
        (sys.executable, str(SOURCES / "python/pinlaters.py")), {"PYTHONPATH": str(stubs)}
    )

    printed = program.run(str(service.port), "pinlaters_queue")

    assert printed == (
        "PinLaterDequeueRequest 5 PinLaterDequeueMetadata 2 PinLaterJobAckInfo 3 "
        "PinLaterCheckpointJobRequest 6\n"
        "claimed step 1, 2 of 2 attempts\n"
        "claimed step 2, 2 of 2 attempts\n"
        "SUCCEEDED 'half done' claimed by pinlaters:python\n"
    )
