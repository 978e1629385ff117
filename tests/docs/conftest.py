"""The service that the documentation's examples are run against, made as README.md says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment import PATIENT, Deployment
from tests.docs.pages import README, ReadersShell, commands, section


@pytest.fixture(scope="package")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("readme"))
    init, up, status, down = commands(section(README, "The service"))
    shell = ReadersShell(deployment.folder.parent, deployment)
    try:
        shell.run(init)
        with (deployment.folder / "etc/pinlaterd.yaml").open("a") as file:
            file.writelines(f"{name}: {value}\n" for name, value in PATIENT.items())
        shell.run(up)
        assert "healthy" in shell.run(status)
        yield deployment
        shell.run(down)
        assert not deployment.processes()
    finally:
        deployment.destroy()


@pytest.fixture
def shell(service: Deployment) -> ReadersShell:
    """In the service's folder, as the quickstart's reader is."""
    return ReadersShell(service.folder, service)


@pytest.fixture
def examples_shell(service: Deployment, tmp_path: Path) -> ReadersShell:
    """In a folder with the examples."""
    for example in (README.parent / "examples").glob("*.py"):
        (tmp_path / example.name).write_text(example.read_text("utf-8"))
    return ReadersShell(tmp_path, service)
