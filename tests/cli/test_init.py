"""`pinlaterd init`: a deployment that works as it is, and no file overwritten."""

from __future__ import annotations

import os
import socket
import stat

import pytest

from pinlaterd.config.load import load_config
from pinlaterd.config.schema import ENGINES, ServerSettings, settings_of
from pinlaterd.deployment.files import (
    local_text,
    queues_text,
    server_text,
    write_deployment,
)
from pinlaterd.errors import DeploymentError
from tests.cli.program import ROOT


def make_a_link(path):
    target = path.with_name("target")
    path.rename(target)
    path.symlink_to(target)


def test_a_deployment_with_ports_of_its_own_has_one_for_http_too(tmp_path):
    """So that it runs beside one with the usual ports."""
    write_deployment(tmp_path / "a", "sqlite", 1, {"port": 9020, "stats_port": 9023})
    write_deployment(tmp_path / "b", "sqlite", 1, {"stats_port": 9021})

    ports = [load_config(tmp_path / name / "etc").server.http_port for name in "ab"]
    assert ports == [9024, 9013]


def test_the_port_for_http_is_one_that_nobody_has(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] - 3
        write_deployment(tmp_path / "a", "sqlite", 1, {"port": port, "stats_port": port + 1})

        assert load_config(tmp_path / "a" / "etc").server.http_port > port + 3


def test_what_it_writes_is_a_valid_configuration(operator):
    done = operator.init("--shards", 2, "--web-port", 4711)

    assert done.returncode == 0, done.stderr
    assert f"wrote {operator.folder}/etc/shards.yaml" in done.stdout
    assert f"pinlaterd up {operator.folder}" in done.stdout
    config = load_config(operator.folder / "etc")
    assert config.server == ServerSettings(
        port=operator.port,
        stats_port=operator.stats_port,
        http_port=0,
        web_port=4711,
    )
    assert list(config.shards) == ["1", "2"]
    folders = [operator.folder / name for name in ("etc", "run", "data")]
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    files = (operator.folder / "etc").iterdir()
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert (operator.folder / "data").is_dir()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_gets_a_configuration(operator, engine):
    assert operator.init("--engine", engine, "--shards", 3).returncode == 0

    shards = load_config(operator.folder / "etc").shards

    assert [shard.engine for shard in shards.values()] == [engine] * 3


@pytest.mark.parametrize("others", [lambda path: path.chmod(0o777), make_a_link])
@pytest.mark.parametrize("name", [".", "etc", "run", "data"])
def test_folders_that_others_may_change_are_refused_and_nothing_is_written(operator, name, others):
    path = operator.folder / name
    path.mkdir(parents=True)
    others(path)

    done = operator.init()

    assert done.returncode == 1
    assert f"{path}: " in done.stderr
    assert "Traceback" not in done.stderr
    assert [found for found in operator.folder.rglob("*") if found.is_file()] == []


def test_with_a_umask_that_gives_all_to_the_group_the_deployment_is_the_owners(operator):
    before = os.umask(0o002)
    try:
        assert operator.init("--shards", 1).returncode == 0
        assert operator.up().returncode == 0
    finally:
        os.umask(before)
        operator.down()


def test_it_never_overwrites_and_leaves_nothing_half_written(operator):
    (operator.folder / "etc").mkdir(parents=True)
    operator.write("queues.yaml", "queues: {mail: }\n")

    done = operator.init()

    assert done.returncode == 1
    assert f"{operator.folder}/etc/queues.yaml: there already" in done.stderr
    assert [path.name for path in (operator.folder / "etc").iterdir()] == ["queues.yaml"]
    assert (operator.folder / "etc" / "queues.yaml").read_text() == "queues: {mail: }\n"


def test_a_folder_too_deep_for_sockets_is_refused_at_once(tmp_path):
    deep = tmp_path / ("d" * 100)

    with pytest.raises(DeploymentError, match=r"at most \d\d bytes"):
        write_deployment(deep, "sqlite", 1, {})

    assert not deep.exists()


def test_every_setting_is_explained_and_the_defaults_are_the_schemas(tmp_path):
    text, local = server_text({}), local_text({})
    for name, setting in settings_of(ServerSettings).items():
        assert (f"\n#{name}:" in text) == (not setting.only_local)
        assert (f"\n#{name}:" in local) == setting.machine

    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "shards.yaml").write_text("shards: {1: }")
    shown = [line[1:] for line in text.splitlines() if line.startswith("#") and line[1] != " "]
    given = "\n".join(line for line in shown if not line.endswith(":"))
    (tmp_path / "etc" / "pinlaterd.yaml").write_text(given)
    queues = [line.removeprefix("# ") for line in queues_text().splitlines()[2:-1]]
    (tmp_path / "etc" / "queues.yaml").write_text("\n".join(queues))

    config = load_config(tmp_path / "etc")

    assert config.server == ServerSettings()
    assert config.queue("mail").max_jobs_per_second == 100


def test_the_repository_is_a_deployment_as_init_writes_it(tmp_path):
    write_deployment(tmp_path / "d", "sqlite", 3, {})

    for path in (tmp_path / "d" / "etc").iterdir():
        assert (ROOT / "etc" / path.name).read_text() == path.read_text()
