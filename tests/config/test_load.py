"""Configuration files: what is accepted, and how mistakes are told."""

from __future__ import annotations

import dataclasses
import os

import pytest

from pinlaterd.config.load import load_config
from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import HTTP_URL, Address, SentinelSettings, ServerSettings, follow
from pinlaterd.errors import ConfigError

ONE_SHARD = "shards: {1: {engine: sqlite}}"


@pytest.fixture
def etc(tmp_path, monkeypatch):
    """DIR/etc with one shard, DIR being the current folder, so that messages say etc/…"""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "shards.yaml").write_text(ONE_SHARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PINLATERD_ADMIN_PASSWORD_HASH", raising=False)
    return (tmp_path / "etc").relative_to(tmp_path)


def problems(etc):
    with pytest.raises(ConfigError) as caught:
        load_config(etc)
    return list(caught.value.problems)


def test_only_shards_are_needed(etc):
    config = load_config(etc)

    assert config.server == ServerSettings()
    assert list(config.shards) == ["1"]
    assert config.shards["1"].file == "data/shard-1.sqlite"
    assert config.queue("mail").job_claimed_timeout_seconds == 600


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "jobs.example"])
def test_http_beyond_this_machine_needs_users_or_a_word_that_it_is_meant(etc, host):
    server = etc / "pinlaterd.yaml"
    server.write_text(f"http_host: '{host}'\n")
    refused = problems(etc)
    server.write_text(f"http_host: '{host}'\ninsecure: true\n")
    meant = load_config(etc)
    server.write_text(f"http_host: '{host}'\n")
    token = "{sha256: " + 64 * "a" + "}"
    (etc / "users.yaml").write_text("users:\n  ada: {roles: [view], tokens: [" + token + "]}\n")

    [problem] = refused
    assert problem.startswith(
        f"etc/pinlaterd.yaml: http_host: {host!r} reaches beyond this machine"
    )
    assert "`pinlater-admin user add` first, or set `insecure: true`" in problem
    assert meant.server.http_host == host
    assert list(load_config(etc).users) == ["ada"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_http_on_this_machine_needs_no_users(etc, host):
    (etc / "pinlaterd.yaml").write_text(f"http_host: '{host}'\n")

    assert load_config(etc).users == {}


def test_the_environment_gives_the_http_port_that_no_file_gives(etc, monkeypatch):
    monkeypatch.setenv("PORT", "9090")
    from_environment = load_config(etc).server.http_port
    (etc / "pinlaterd.yaml").write_text("http_port: 9013\n")

    assert from_environment == 9090
    assert load_config(etc).server.http_port == 9013


def test_every_mistake_of_every_file_is_told_at_once(etc):
    (etc / "pinlaterd.yaml").write_text("prt: 9010\nport: 99999\nhost: [a]\nport: 1\n")
    (etc / "shards.yaml").write_text("shards:\n  1:\n    engine: mysqll\n  a_b: {}\n")
    (etc / "queues.yaml").write_text("queues:\n  mail: {max_jobs_per_second: -1}\n")

    assert problems(etc) == [
        "etc/pinlaterd.yaml:1: prt: unknown key; did you mean 'port'?",
        "etc/pinlaterd.yaml:2: port: 99999 is out of range; choose from 1 to 65_535",
        "etc/pinlaterd.yaml:3: host: expected text, got a list",
        "etc/pinlaterd.yaml:4: port: given twice, first in line 2; keep one of them",
        (
            "etc/shards.yaml:3: shards.1.engine: unknown engine 'mysqll'; "
            "choose from sqlite, mysql, redis"
        ),
        (
            "etc/shards.yaml:4: shards.a_b: 'a_b' is no shard name; "
            "use 1 to 16 letters, digits and hyphens"
        ),
        (
            "etc/queues.yaml:2: queues.mail.max_jobs_per_second: -1 is out of range; "
            "choose from 0 to 1_000_000_000"
        ),
    ]


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("port: '9010'", "expected a whole number, got the text '9010'"),
        ("port: 9010.5", "expected a whole number, got the number 9010.5"),
        ("port: true", "expected a whole number, got the boolean true"),
        ("port:", "expected a whole number, got nothing"),
        ("port: 0", "0 is out of range"),
        pytest.param(f"port: {'9' * 5_000}", "expected a whole number", id="digits"),
        ("max_frame_bytes: 1", "1 is out of range; choose from 1_024"),
        ("job_succeeded_ttl_hours: .nan", "expected a number"),
        ("job_succeeded_ttl_hours: .inf", ".inf is out of range"),
        ("job_failed_ttl_hours: -1", "-1 is out of range"),
        ("owner_lease_seconds: 2", "2 is out of range; choose from 3 to 3_600"),
        ("num_priority_levels: 128", "128 is out of range; choose from 1 to 127"),
        ("log_level: loud", "unknown value 'loud'; choose from debug, info, warning, error"),
        ("advertised_host: 'a:b'", "no ':' in it"),
        ("advertised_host: ''", "expected 1 to 36 characters"),
        ("host: 1", "expected text, got the number 1; put it in quotes"),
        ("admin_password_hash: open sesame", "not a hash"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_allowed(etc, setting, what):
    (etc / "pinlaterd.yaml").write_text(f"# a comment\n{setting}\n")

    [problem] = problems(etc)

    key = setting.partition(":")[0]
    assert problem.startswith(f"etc/pinlaterd.yaml:2: {key}: ")
    assert what in problem


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"", "etc/shards.yaml:1: shards: the file is empty"),
        (b"# nothing\n", "the file is empty"),
        (b"shards:\n", "no shard is named; name at least one"),
        (b"shards: {}\n", "no shard is named; name at least one"),
        (b"shards: 3\n", "shards: expected a mapping, got the number 3"),
        (b"- 1\n", "expected a mapping, got a list"),
        (b"\nshards: \xff\n", "etc/shards.yaml:2: not valid UTF-8"),
        (b"shards: {1: {}\n", "not valid YAML"),
        (b"a: &a [1]\nshards: *a\n", "etc/shards.yaml:2: not valid YAML: aliases"),
        (b"shards: {1: !!python/name:os.system x}", "tag tag:yaml.org,2002:python/name:os.system"),
        (b"[" * 100_000, "nested too deeply"),
        (b"a:\n" + b"".join(b" " * n + b"a:\n" for n in range(1, 30)), "nested too deeply"),
        (b'{"shards": ' + b"[" * 100_000, "nested too deeply"),
        (b" " * 5_000_000, "at most"),
        (b"shards: {1: {file: a}, 2: {file: ./a}}", "shard '1' has the file './a' already"),
        (b"shards: {1: {file: data/shard-2.sqlite}, 2: }", "2.file: shard '1' has the file"),
        (b"shards: {1: {fil: a}}", "shards.1.fil: unknown key; did you mean 'file'?"),
        (b"shards: {1: {dequeue_only: 1}}", "expected true or false, got the number 1"),
        (b"shards: {1: {}, '1': {}}", "shards.1: given twice"),
        (b"shards: {12345678901234567: {}}", "is no shard name"),
        (b"shards: {1: {engine: mysql}}", "shards.1.master: missing; mysql shards need it"),
        (b"shards: {1: {engine: redis, master: {host: x}}}", "shards.1.master.port: missing"),
        (b"shards: {1: {passwd: x}}", "shards.1.passwd: unknown key"),
        (
            b'shards: {1: {engine: redis, master: {host: h, port: 1},\n  passwd_env: "\\ud800"}}',
            "etc/shards.yaml:2: a text holds half of a surrogate pair",
        ),
        (b'{"shards": {"1":\n {"\\ud800": 1}}}', "yaml:2: a text holds half of a surrogate pair"),
    ],
)
def test_a_shards_file_that_can_not_be_used(etc, text, what):
    (etc / "shards.yaml").write_bytes(text)

    assert what in "\n".join(problems(etc))


def test_missing_files(etc, tmp_path):
    (etc / "shards.yaml").unlink()

    assert problems(etc) == [
        "etc/shards.yaml: no such file; `pinlaterd init DIR` writes a new deployment"
    ]
    [problem] = problems(tmp_path / "elsewhere")
    assert "no such folder" in problem


def test_names_are_text_as_written(etc):
    (etc / "shards.yaml").write_text("shards: {1: {}, '2': {}, 003: {}, a-b: {}, 1e3: {}, yes: {}}")

    assert list(load_config(etc).shards) == ["1", "2", "003", "a-b", "1e3", "yes"]


@pytest.mark.parametrize(
    ("lease_seconds", "request_timeout_ms", "expected"),
    [(10, 10_000, 5.0), (4, 10_000, 2.0), (10, 3_000, 1.5), (3600, 100, 1.0)],
)
def test_a_store_is_given_up_before_the_caller_and_the_lease_are(
    lease_seconds, request_timeout_ms, expected
):
    settings = ServerSettings(
        owner_lease_seconds=lease_seconds, request_timeout_ms=request_timeout_ms
    )
    assert settings.store_answer_seconds == expected


def test_mysql_and_redis_shards(etc, monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "redis.passwd").write_text("swordfish\n")
    (etc / "shards.yaml").write_text(
        "shards:\n"
        "  1:\n"
        "    engine: mysql\n"
        "    master: {host: db1, port: 3306}\n"
        "    user: pinlater\n"
        "    passwd_env: SECRET\n"
        "  2:\n"
        "    engine: redis\n"
        "    master: {host: cache1, port: 6379}\n"
        "    slave: {host: cache2, port: 6379}\n"
        "    passwd_file: redis.passwd\n"
        "    dequeue_only: on\n"
    )

    config = load_config(etc)

    mysql, redis = config.shards["1"], config.shards["2"]
    assert (mysql.engine, mysql.master, mysql.user) == ("mysql", Address("db1", 3306), "pinlater")
    assert (redis.engine, redis.slave, redis.dequeue_only) == ("redis", Address("cache2", 6379), 1)
    assert (mysql.passwd, redis.passwd) == ("hunter2", "swordfish")
    assert "hunter2" not in repr(config)
    assert "swordfish" not in repr(config)


@pytest.mark.parametrize(
    ("password", "what"),
    [
        ("passwd: 4711", "shards.1.passwd: expected text, got something else; put it in quotes"),
        ("passwd_env: NOT_THERE", "the environment has no NOT_THERE"),
        ("passwd_env: NOT_UTF8", "the environment's NOT_UTF8 is not valid UTF-8"),
        ("passwd_file: nope", "nope: No such file or directory"),
        ("passwd_file: latin1", "latin1 is not valid UTF-8"),
        ("passwd: s3cret, passwd_env: HOME", "shards.1.passwd is given too; keep one"),
    ],
)
def test_a_password_that_can_not_be_had_is_never_shown(etc, password, what, tmp_path, monkeypatch):
    monkeypatch.setenv("NOT_UTF8", os.fsdecode(b"s3cret\xff"))
    (tmp_path / "latin1").write_bytes(b"s3cret\xff")
    (etc / "shards.yaml").write_text(
        f"shards: {{1: {{engine: mysql, user: u, master: {{host: h, port: 1}}, {password}}}}}"
    )

    [problem] = problems(etc)

    assert what in problem
    assert "4711" not in problem
    assert "s3cret" not in problem


def test_pinlaters_mysql_json(etc):
    (etc / "pinlaterd.yaml").write_text("mysql_num_db_per_queue: 3")
    (etc / "shards.yaml").write_text(
        '{"pinlatermysql001": {"master": {"host": "db1", "port": 3306},\n'
        '\t"slave": {"host": "db2", "port": 3306}, "user": "u", "passwd": "p",'
        ' "dequeueOnly": true},\n'
        '"pinlatermysql010": {"master": {"host": "db3", "port": 3306}, "user": "u"}}'
    )

    shards = load_config(etc).shards

    assert list(shards) == ["1", "1d1", "1d2", "10", "10d1", "10d2"]
    assert shards["1d1"].slave == Address("db2", 3306)
    assert shards["1d1"].dequeue_only
    assert shards["10"].master == Address("db3", 3306)


def test_mistakes_in_pinlaters_mysql_json(etc):
    (etc / "shards.yaml").write_text(
        '{"a001": {"master": {"host": "db1", "port": 3306}, "user": "u"},\n'
        ' "b01": {"master": {"host": "db1", "port": "x"}, "usr": "u"},\n'
        ' "nonumber": {"master": {"host": "db1", "port": 3306}, "user": "u"}}'
    )

    found = problems(etc)

    assert "etc/shards.yaml:2: b01.user: missing" in found
    assert "etc/shards.yaml:2: b01: a second shard '1'; rename one" in found
    assert any("b01.master.port: expected a whole number" in problem for problem in found)
    assert any("3: nonumber: expected a name that ends in" in problem for problem in found)


def test_pinlaters_redis_json(etc):
    (etc / "shards.yaml").write_text(
        '{"shards": [{"name": "1", "shardConfig": {"master": {"host": "r1", "port": 6379},'
        ' "slave": null, "dequeueOnly": false}}, {"name": "2", "shardConfig": {}}]}'
    )
    assert problems(etc) == ["etc/shards.yaml:1: shards.1.shardConfig.master: missing"]

    (etc / "shards.yaml").write_text(
        '{"shards": [{"name": "1", "shardConfig": {"master": {"host": "r1", "port": 6379}}}]}'
    )
    shard = load_config(etc).shards["1"]
    assert (shard.engine, shard.master, shard.slave) == ("redis", Address("r1", 6379), None)


def test_queue_settings_go_over_the_servers(etc):
    (etc / "pinlaterd.yaml").write_text("job_claimed_timeout_seconds: 60\n")
    (etc / "queues.yaml").write_text(
        "queues:\n  mail: {job_succeeded_ttl_hours: 0.5, max_jobs_per_second: 0.1}\n  bulk:\n"
    )

    config = load_config(etc)

    mail, bulk = config.queue("mail"), config.queue("bulk")
    assert (mail.job_succeeded_ttl_hours, mail.max_jobs_per_second) == (0.5, 0.1)
    assert mail.job_claimed_timeout_seconds == 60
    assert bulk == config.queue("never heard of")
    assert bulk.max_jobs_per_second is None


def test_pinlaters_queue_json(etc):
    (etc / "queues.yaml").write_text(
        '{"queues": [{"name": "mail", "queueConfig": {"maxJobsPerSecond": 2.5}},\n'
        '  {"name": "off", "queueConfig": {"maxJobsPerSecond": 0}}, {"name": "free"}]}'
    )

    config = load_config(etc)

    rates = {name: queue.max_jobs_per_second for name, queue in config.queues.items()}
    assert rates == {"mail": 2.5, "off": 0, "free": None}


def test_mistakes_in_pinlaters_queue_json(etc):
    (etc / "queues.yaml").write_text(
        '{"queues": [{"name": "a b"}, {"queueConfig": {}},\n'
        ' {"name": "m", "queueConfig": {"maxJobsPerSecon": 1}}, {"name": "m"}]}'
    )

    assert problems(etc) == [
        (
            "etc/queues.yaml:1: queues.0.name: 'a b' is no queue name; "
            "use letters, digits and underscores"
        ),
        "etc/queues.yaml:1: queues.1.name: missing",
        "etc/queues.yaml:2: queues.3.name: a second queue 'm'",
    ]


def test_unknown_keys_of_pinlaters_json_are_warnings(etc):
    endpoint = '{"host": "db1", "port": 3306, "rack": 7}'
    (etc / "shards.yaml").write_text(
        f'{{"a001": {{"master": {endpoint}, "user": "u", "dequeueOnli": true}}}}'
    )
    (etc / "queues.yaml").write_text(
        '{"queues": [{"name": "mail", "owner": "x", "queueConfig": {"maxJobsPerSecon": 1}}]}'
    )

    config = load_config(etc)

    assert not config.shards["1"].dequeue_only
    assert config.queues["mail"].max_jobs_per_second is None
    unknown = "unknown key, ignored;"
    assert config.warnings == (
        f"etc/shards.yaml:1: a001.dequeueOnli: {unknown} did you mean 'dequeueOnly'?",
        f"etc/shards.yaml:1: a001.master.rack: {unknown} choose from host, port",
        f"etc/queues.yaml:1: queues.0.owner: {unknown} choose from name, queueConfig",
        (
            f"etc/queues.yaml:1: queues.0.queueConfig.maxJobsPerSecon: {unknown} "
            "did you mean 'maxJobsPerSecond'?"
        ),
    )


def test_unknown_keys_of_pinlaters_redis_json_are_warnings(etc):
    (etc / "shards.yaml").write_text(
        '{"version": 1, "shards": [{"name": "1", "zone": "a", "shardConfig":'
        ' {"master": {"host": "r", "port": 6379}, "weight": 2}}]}'
    )

    keys = [warning.split(": ")[1] for warning in load_config(etc).warnings]

    assert keys == ["version", "shards.0.zone", "shards.0.shardConfig.weight"]


def test_a_password_that_others_can_read_is_a_warning(etc):
    shards = "shards: {1: {engine: mysql, master: {host: h, port: 1}, user: u, passwd%s}}\n"
    shards_file, secret = etc / "shards.yaml", etc / "secret"
    secret.write_text("sesame")
    secret.chmod(0o644)

    def warnings(password: str, mode: int) -> tuple[str, ...]:
        shards_file.write_text(shards % password)
        shards_file.chmod(mode)
        return load_config(etc).warnings

    assert warnings(": sesame", 0o600) == ()
    said = "holds a password, and others can read it; chmod 600"
    assert warnings(": sesame", 0o644) == (f"etc/shards.yaml: {said} etc/shards.yaml",)
    assert warnings("_file: etc/secret", 0o644) == (f"etc/secret: {said} etc/secret",)
    secret.chmod(0o640)
    assert warnings("_file: etc/secret", 0o644) == ()


def test_the_admin_password_comes_from_the_file_or_the_environment(etc, monkeypatch, tmp_path):
    in_file, in_environment = hash_password("a"), hash_password("b")
    (tmp_path / "hash").write_text(in_file + "\n")
    (etc / "pinlaterd.yaml").write_text("admin_password_hash_file: hash")
    assert load_config(etc).server.admin_password_hash == in_file

    monkeypatch.setenv("PINLATERD_ADMIN_PASSWORD_HASH", in_environment)
    config = load_config(etc)
    assert config.server.admin_password_hash == in_environment
    assert in_environment not in repr(config)

    monkeypatch.setenv("PINLATERD_ADMIN_PASSWORD_HASH", "nonsense")
    [problem] = problems(etc)
    assert "PINLATERD_ADMIN_PASSWORD_HASH: not a hash" in problem
    assert "nonsense" not in problem


def test_an_unreadable_folder_instead_of_a_file(etc):
    (etc / "queues.yaml").mkdir()

    assert problems(etc) == ["etc/queues.yaml: can't be read: Is a directory"]


@pytest.mark.parametrize("name", ["queues.yaml", "secret"])
def test_a_pipe_or_a_device_instead_of_a_file_is_named_and_stops_nobody(etc, name):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        file = etc / name
        make(file)
        if name == "secret":
            (etc / "pinlaterd.yaml").write_text("admin_password_hash_file: etc/secret\n")

        [problem] = problems(etc)

        assert f"etc/{name}" in problem
        assert problem.endswith("Not a regular file")
        file.unlink()


@pytest.mark.parametrize(
    ("push", "key", "says"),
    [
        ("url: 'http://h:0/'", "url", "this is not valid; expected http://HOST[:PORT]"),
        ("url: 'http://h:65536/'", "url", "this is not valid"),
        ("url: 'http://h:x/'", "url", "this is not valid"),
        ("url: 'http://[::1/'", "url", "this is not valid"),
        ("url: 'http://h/', headers: {X: 'hush\u00e9'}", "headers.X", "this is not valid"),
        ("url: 'http://h/', headers: {Content-Length: '1'}", "headers.Content-Length", "leave it"),
        ("url: 'http://h:00/', headers: {Expect: 'x', Connection: 'close'}", "url", "not valid"),
    ],
)
def test_what_no_request_could_be_pushed_with_is_named(etc, push, key, says):
    (etc / "pinlaterd.yaml").write_text("push_hosts: h\n")
    (etc / "queues.yaml").write_text(f"queues: {{mail: {{push: {{{push}}}}}}}\n")

    [problem] = problems(etc)

    assert problem.startswith(f"etc/queues.yaml:1: queues.mail.push.{key}: ")
    assert says in problem
    assert "hush" not in problem


@pytest.mark.parametrize(
    "url", ["http://h", "https://h:65535/a?", "http://[::1]:80/x", "http://h:/", "http://h:080/"]
)
def test_urls_that_can_be_pushed_to_are_valid(url):
    assert HTTP_URL.problem(url.rstrip("?"), url) == ""


def test_a_pattern_that_is_none_is_named_and_nothing_else_is_written(etc, capfd):
    (etc / "pinlaterd.yaml").write_text("web_redact: '('\n")

    [problem] = problems(etc)

    assert "'(' is not valid: missing ): (; expected a pattern of RE2" in problem
    assert "missing )" not in capfd.readouterr().err  # by RE2; others may write there, too


# --- Sentinels --------------------------------------------------------------------------------

WATCHED = """\
shards:
  1:
    engine: redis
    sentinel:
      service: jobs
      addresses:
        - {host: s1, port: 26379}
        - {host: s2, port: 26379}
      passwd: of the Sentinels
    passwd: of the master
"""


def test_a_redis_shard_may_ask_sentinels_for_its_master(etc):
    (etc / "shards.yaml").write_text(WATCHED)

    shard = load_config(etc).shards["1"]

    assert shard.master is None
    assert shard.sentinel == SentinelSettings(
        "jobs", (Address("s1", 26379), Address("s2", 26379)), passwd="of the Sentinels"
    )
    assert "of the" not in repr(shard)


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (
            "    passwd: of the master\n",
            "    master: {host: a, port: 1}\n",
            "1.master: Sentinels know it",
        ),
        ("      service: jobs\n", "", "1.sentinel.service: missing"),
        ("port: 26379}\n        - ", "port: 0}\n        - ", "addresses.0.port: 0 is out of range"),
        ("service:", "servise:", "did you mean 'service'?"),
        ("engine: redis", "engine: sqlite", "1.sentinel: unknown key"),
    ],
)
def test_a_mistake_about_sentinels_is_named(etc, before, after, problem):
    assert before in WATCHED
    (etc / "shards.yaml").write_text(WATCHED.replace(before, after, 1))

    with pytest.raises(ConfigError) as raised:
        load_config(etc)

    assert any(problem in text for text in raised.value.problems), raised.value.problems


# --- a cluster --------------------------------------------------------------------------------

LOCAL = "cluster: prod\nserver: jobs-1\nzookeeper: z1:2181,z2:2181\npeer_host: 10.0.0.1\n"
PINNED = "shards: {1: {server: jobs-1}}"


@pytest.fixture
def member(etc):
    """A server of a cluster; its etc/."""
    (etc / "local.yaml").write_text(LOCAL)
    (etc / "shards.yaml").write_text(PINNED)
    (etc / "cluster.key").touch(mode=0o600)
    return etc


def test_settings_of_the_machine_go_before_the_shared_ones(member):
    (member / "pinlaterd.yaml").write_text("port: 9020\nrouters: 2\n")
    (member / "local.yaml").write_text(LOCAL + "port: 9030\nweight: 2\n")

    config = load_config(member)

    server = config.server
    assert (server.port, server.routers, server.weight) == (9030, 2, 2.0)
    assert (server.cluster, server.server) == ("prod", "jobs-1")
    assert (server.zookeeper, server.peer_host) == ("z1:2181,z2:2181", "10.0.0.1")
    assert config.shards["1"].server == "jobs-1"
    assert "local.yaml" in config.files
    assert not config.warnings


def test_local_settings_of_a_single_machine(etc):
    (etc / "local.yaml").write_text("host: 0.0.0.0\n")

    assert load_config(etc).server == ServerSettings(host="0.0.0.0")


def test_each_setting_has_its_file(member):
    (member / "pinlaterd.yaml").write_text("server: jobs-1\nserver_set_file: servers\n")
    (member / "local.yaml").write_text(LOCAL + "max_queues: 5\nadmin_password_hash_file: x\n")

    shared = "is the same on all servers; write it into etc/pinlaterd.yaml"
    assert problems(member) == [
        "etc/pinlaterd.yaml:1: server: each server has its own; write it into etc/local.yaml",
        (
            "etc/pinlaterd.yaml:2: server_set_file: the servers of a cluster divide the rates "
            "without it; remove it"
        ),
        f"etc/local.yaml:5: max_queues: {shared}",
        f"etc/local.yaml:6: admin_password_hash_file: {shared}",
    ]


@pytest.mark.parametrize("name", ["cluster", "server", "zookeeper", "peer_host"])
def test_what_a_server_of_a_cluster_needs(member, name):
    kept = [line for line in LOCAL.splitlines() if not line.startswith(f"{name}:")]
    (member / "local.yaml").write_text("\n".join(kept))

    assert problems(member) == [
        f"etc/local.yaml:1: {name}: missing; a server of a cluster needs it"
    ]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("server: jobs 1", "'jobs 1' is not valid; use 1 to 64 letters"),
        ("cluster: a/b", "'a/b' is not valid; use 1 to 64 letters"),
        ("zookeeper: z1", "'z1' is not valid; expected HOST:PORT,HOST:PORT"),
        ("zookeeper: 'z1:2181, z2:2181'", "is not valid; expected HOST:PORT,HOST:PORT"),
        ("zookeeper: z1:2181/prod", "is not valid; expected HOST:PORT,HOST:PORT"),
        ("weight: 0", "0 is out of range; choose from 0.01 to 100"),
        ("peer_port: 9010", "9010 is the port, too; choose another"),
        ("stats_port: 9012", "9012 is the peer_port, too; choose another"),
        ("shard_ports: 9012", "have the ports to 9012, 9012 among them"),
        ("shard_ports: 65535", ""),
    ],
)
def test_values_that_a_cluster_can_not_have(member, line, what):
    kept = [one for one in LOCAL.splitlines() if one.split(":")[0] != line.split(":")[0]]
    (member / "local.yaml").write_text("\n".join([*kept, line]))

    if what:
        [problem] = problems(member)
        assert what in problem
    else:
        load_config(member)


def test_the_shards_ports_end(member):
    (member / "local.yaml").write_text(LOCAL + "shard_ports: 65535\n")
    (member / "shards.yaml").write_text("shards: {1: {server: a}, 2: {server: a}}")

    [problem] = problems(member)

    assert "have the ports to 65536, 65536 among them" in problem


def test_the_key_of_a_cluster(member):
    (member / "cluster.key").chmod(0o640)
    [problem] = problems(member)
    assert (
        problem == "etc/local.yaml: etc/cluster.key: others can read it; chmod 600 etc/cluster.key"
    )

    (member / "cluster.key").unlink()
    [problem] = problems(member)
    assert problem.startswith("etc/local.yaml: etc/cluster.key is missing; copy it from another")


def test_a_server_of_a_cluster_never_becomes_a_single_machine_by_accident(member):
    (member / "local.yaml").unlink()

    [problem] = problems(member)

    assert "names no cluster, but etc/cluster.key is that of one; restore etc/local.yaml" in problem


def test_where_shards_of_a_cluster_may_be(member):
    (member / "shards.yaml").write_text(
        "shards:\n"
        "  1: {}\n"
        "  2: {engine: sqlite, server: a b}\n"
        "  3: {engine: redis, master: {host: h, port: 1}}\n"
    )

    assert problems(member) == [
        "etc/shards.yaml:2: shards.1.server: missing; its file is on one server: name that",
        (
            "etc/shards.yaml:3: shards.2.server: 'a b' is not valid; "
            "use 1 to 64 letters, digits, dots, hyphens and underscores"
        ),
    ]


def test_a_place_is_ignored_by_a_single_machine(etc):
    (etc / "shards.yaml").write_text(PINNED)

    assert load_config(etc).warnings == (
        "etc/shards.yaml:1: shards.1.server: this is a single machine: ignored",
    )


def test_passwords_that_would_lie_in_zookeeper_are_warned_of(member):
    (member / "shards.yaml").write_text(
        "shards:\n"
        "  1:\n"
        "    engine: redis\n"
        "    passwd: s3cret\n"
        "    sentinel: {service: s, addresses: [{host: h, port: 1}], passwd: s3cret}\n"
        "  2: {engine: redis, master: {host: h, port: 1}, passwd_file: etc/cluster.key}\n"
    )
    (member / "shards.yaml").chmod(0o600)

    text = "would lie in ZooKeeper as it is; use passwd_env or passwd_file"
    assert load_config(member).warnings == (
        f"etc/shards.yaml:4: shards.1.passwd: {text}",
        f"etc/shards.yaml:5: shards.1.sentinel.passwd: {text}",
    )


def test_what_of_local_yaml_acts_at_once():
    before = ServerSettings()
    after = dataclasses.replace(before, peer_port=9013, weight=2.0)

    found = follow(before, after)

    assert found.settings == dataclasses.replace(before, weight=2.0)
    assert found.needs_restart == [
        (
            "etc/local.yaml: peer_port: 9012 is active, the file says 9013; "
            "needs a restart: `pinlaterd up`"
        )
    ]


def test_job_types_have_queues_with_settings_of_their_own(etc):
    head = "delivery_strategy: at_least_once, attempts: 7, concurrency: 3"
    made = "created_at: 2026-11-26T03:00:00.123456Z"
    (etc / "job_types.yaml").write_text(
        f"job_types:\n  a_1: {{name: 'a, b', {head}, {made}}}\n"
        f"  b_1: {{name: b, {head}, {made}, archive_hours: 1}}\n"
    )
    (etc / "queues.yaml").write_text("queues:\n  b_1: {max_jobs_per_second: 5}\n")

    config = load_config(etc)

    assert config.job_types["a_1"].name == "a, b"
    assert config.job_types["a_1"].created_at.microsecond == 123456
    assert config.queues["a_1"].job_failed_ttl_hours == 180 * 24
    assert (config.queues["a_1"].max_in_progress, config.queues["b_1"].max_in_progress) == (3, 3)
    assert config.queue("a_1").job_claimed_timeout_seconds == 420
    assert config.queue("b_1").job_succeeded_ttl_hours == 1
    assert config.queue("b_1").max_jobs_per_second == 5


def test_mistakes_in_job_types(etc):
    head = "{name: a, delivery_strategy: at_least_once, attempts: 7, concurrency: 3"
    (etc / "job_types.yaml").write_text(
        f"job_types:\n  a-1: {head}}}\n  a_1: {head}}}\n"
        f"  a_2: {head}, created_at: yesterday}}\n  a_3: {{name: '', attempts: 0}}\n"
        "  a_4: {name: b, delivery_strategy: twice, attempts: 0, concurrency: 1, created_at: 3}\n"
    )

    assert problems(etc) == [
        (
            "etc/job_types.yaml:2: job_types.a-1: 'a-1' is no queue name; "
            "use letters, digits and underscores"
        ),
        "etc/job_types.yaml:3: job_types.a_1.created_at: missing",
        ("etc/job_types.yaml:4: job_types.a_2.created_at: expected a time as 2027-01-31T00:00:00Z"),
        "etc/job_types.yaml:5: job_types.a_3.delivery_strategy: missing",
        "etc/job_types.yaml:5: job_types.a_3.concurrency: missing",
        "etc/job_types.yaml:5: job_types.a_3.created_at: missing",
        ("etc/job_types.yaml:6: job_types.a_4.created_at: expected a time as 2027-01-31T00:00:00Z"),
        (
            "etc/job_types.yaml:6: job_types.a_4.delivery_strategy: "
            "unknown value 'twice'; choose from at_least_once, at_most_once"
        ),
        (
            "etc/job_types.yaml:6: job_types.a_4.attempts: "
            "0 is out of range; choose from 1 to 32_767"
        ),
    ]
