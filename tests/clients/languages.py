"""How the program of each language is made and run.

Every one of them generates its stubs from thrift/pinlater.thrift with Debian's Thrift compiler,
and speaks through the Thrift library of its language; tools/test installs what they need.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.conftest import ProgramPath

SOURCES: Final = Path(__file__).parent
REPOSITORY: Final = SOURCES.parents[1]
INTERFACE: Final = REPOSITORY / "thrift" / "pinlater.thrift"
OUR_FIELD: Final = re.compile(r"^ *1\d\d: .*\n", re.MULTILINE)
NODE_MODULES: Final = REPOSITORY / "build" / "clients" / "nodejs" / "node_modules"
JAVA_LIBRARIES: Final = Path("/usr/share/java")
MAKE_SECONDS: Final = 250.0
RUN_SECONDS: Final = 60.0


class Program(NamedTuple):
    command: Sequence[str]
    environment: Mapping[str, str] = {}

    def run(self, *arguments: str) -> str:
        """What it prints; AssertionError if it fails."""
        done = subprocess.run(
            [*self.command, *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=RUN_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Workshop:
    """Where programs are made: a folder, and what the machine has."""

    def __init__(self, folder: Path, program_path: ProgramPath) -> None:
        self._folder = folder
        self.program = program_path

    def folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir()
        return folder

    def generate(self, generator: str, *, pinlaters: bool = False) -> Path:
        """The folder with what the Thrift compiler makes of the interface, or of it as PinLater has
        it: without our fields."""
        compiler = self.program("thrift", debian_package="thrift-compiler")
        folder = self.folder(
            f"gen{'-pinlaters' if pinlaters else ''}-{generator.partition(':')[0]}"
        )
        interface = folder / INTERFACE.name
        text = INTERFACE.read_text()
        interface.write_text(OUR_FIELD.sub("", text) if pinlaters else text)
        make(compiler, "--gen", generator, "-out", str(folder), str(interface))
        return folder

    def file(self, path: Path, *, cure: str) -> str:
        if not path.exists():
            pytest.skip(f"{path} is missing; {cure}")
        return str(path)


def make(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=MAKE_SECONDS, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"


def _debian(package: str) -> str:
    return f"on Debian: apt-get install {package}"


def python(workshop: Workshop) -> Program:
    stubs = workshop.generate("py")
    return Program((sys.executable, str(SOURCES / "python/life.py")), {"PYTHONPATH": str(stubs)})


def nodejs(workshop: Workshop) -> Program:
    node = workshop.program("node", debian_package="nodejs")
    workshop.file(NODE_MODULES / "thrift", cure="tools/test installs it")
    stubs = workshop.generate("js:node,es6")
    return Program(
        (node, str(SOURCES / "nodejs/life.js")), {"NODE_PATH": f"{stubs}:{NODE_MODULES}"}
    )


def java(workshop: Workshop) -> Program:
    compiler = workshop.program("javac", debian_package="default-jdk-headless")
    libraries = [
        workshop.file(JAVA_LIBRARIES / jar, cure=_debian("libthrift-java libslf4j-java"))
        for jar in ("thrift.jar", "slf4j-api.jar", "slf4j-nop.jar")
    ]
    stubs = workshop.generate("java:generated_annotations=suppress")
    classes = workshop.folder("java")
    class_path = ":".join([str(classes), *libraries])
    sources = [*map(str, stubs.rglob("*.java")), str(SOURCES / "java/Life.java")]
    options = ("-nowarn", "-encoding", "UTF-8", "-cp", class_path, "-d", str(classes))
    make(compiler, *options, *sources)
    java = workshop.program("java", debian_package="default-jre-headless")
    return Program((java, "-cp", class_path, "Life"))


def perl(workshop: Workshop) -> Program:
    interpreter = workshop.program("perl", debian_package="perl")
    packages = "libthrift-perl libbit-vector-perl libclass-accessor-perl"
    workshop.file(Path("/usr/share/perl5/Thrift.pm"), cure=_debian(packages))
    stubs = workshop.generate("perl")
    return Program((interpreter, "-I", str(stubs), str(SOURCES / "perl/life.pl")))


def cpp(workshop: Workshop) -> Program:
    compiler = workshop.program("g++", debian_package="g++")
    workshop.file(Path("/usr/include/thrift/Thrift.h"), cure=_debian("libthrift-dev libboost-dev"))
    stubs = workshop.generate("cpp:no_skeleton")
    program = str(workshop.folder("cpp") / "life")
    sources = [str(SOURCES / "cpp/life.cpp"), *map(str, stubs.glob("*.cpp"))]
    make(compiler, "-std=c++17", "-I", str(stubs), "-o", program, *sources, "-lthrift")
    return Program((program,))


LANGUAGES: Final[Mapping[str, Callable[[Workshop], Program]]] = {
    "python": python,
    "nodejs": nodejs,
    "java": java,
    "perl": perl,
    "cpp": cpp,
}
