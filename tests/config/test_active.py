"""run/config.json: what was accepted last."""

from __future__ import annotations

import pytest

from pinlaterd.config.active import (
    NO_VERSION,
    ConfigSuperseded,
    activate,
    environment_of,
    load_active,
    read_active,
)
from pinlaterd.config.layout import CONFIG_FILE
from pinlaterd.config.load import load_config
from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import HASH_ENVIRONMENT
from pinlaterd.errors import ConfigError

SHARDS = """
shards:
  1: {file: one.sqlite, dequeue_only: true}
  2:
    engine: mysql
    master: {host: db, port: 3306}
    slave: {host: other, port: 3307}
    user: u
    passwd: plain
  3:
    engine: redis
    master: {host: db, port: 6379}
    passwd_env: PINLATERD_TEST_SECRET
  5:
    engine: redis
    sentinel:
      service: jobs
      addresses: [{host: s1, port: 26379}, {host: s2, port: 26380}]
      passwd_env: PINLATERD_TEST_SECRET
abandon: [4]
"""
SECRET = "hush"


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PINLATERD_TEST_SECRET", SECRET)
    (tmp_path / "run").mkdir()
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "shards.yaml").write_text(SHARDS)
    (etc / "pinlaterd.yaml").write_text("port: 1234\nlog_level: debug\n")
    (etc / "queues.yaml").write_text("queues: {mail: {max_jobs_per_second: 0.5}}\n")
    return load_config(etc)


def test_it_comes_back_as_it_was(config, tmp_path):
    written = activate(config)

    assert written.version > NO_VERSION
    assert load_active(tmp_path / "etc") == read_active() == written
    assert written.config == config
    assert CONFIG_FILE.stat().st_mode & 0o077 == 0


def test_what_comes_from_the_environment_stays_there(config, tmp_path, monkeypatch):
    stored = hash_password("open")
    monkeypatch.setenv(HASH_ENVIRONMENT, stored)

    activate(load_config(tmp_path / "etc"))

    text = CONFIG_FILE.read_text()
    assert SECRET not in text
    assert stored not in text
    assert environment_of(config) == {"PINLATERD_TEST_SECRET"}
    found = read_active()
    assert found is not None
    assert found.config.server.admin_password_hash == stored
    monkeypatch.delenv("PINLATERD_TEST_SECRET")
    with pytest.raises(ConfigError, match="the environment has no PINLATERD_TEST_SECRET"):
        read_active()


def test_it_counts_whatever_etc_says_by_then(config, tmp_path):
    activate(config)
    (tmp_path / "etc" / "shards.yaml").write_text("{broken")

    assert load_active(tmp_path / "etc").config == config


def test_versions_grow_whatever_the_clock_says(config, monkeypatch):
    first = activate(config)
    monkeypatch.setattr("time.time_ns", lambda: 0)

    assert activate(config).version == first.version + 1


def test_only_after_the_active_one(config):
    first = activate(config)
    second = activate(config, after=first.version)

    with pytest.raises(ConfigSuperseded):
        activate(config, after=first.version)
    assert read_active() == second


@pytest.mark.parametrize("text", ["", "{", "{}", '{"version": 1, "server": []}'])
def test_a_damaged_file_counts_as_none(config, tmp_path, text):
    CONFIG_FILE.write_text(text)

    assert read_active() is None
    assert load_active(tmp_path / "etc").version == NO_VERSION


def test_what_another_version_wrote_is_left_out_or_has_its_default(config):
    activate(config)
    text = CONFIG_FILE.read_text().replace('"port": 1234', '"unheard_of": 1')
    CONFIG_FILE.write_text(text)

    found = read_active()

    assert found is not None
    assert found.config.server.port == 9010
