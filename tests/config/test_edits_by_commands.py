"""What commands write into shards.yaml and queues.yaml, beside what a person wrote there."""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.config.active import activate
from pinlaterd.config.edit import (
    add_shard,
    carry_out,
    drop_lost,
    forget_abandoned,
    limit_settings,
    lock_edits,
    remove_shard,
    set_dequeue_only,
    set_limit,
    set_paused,
    shards_alike,
    take_over,
)
from pinlaterd.config.edit_text import Value
from pinlaterd.config.layout import BASE_FILE
from pinlaterd.config.load import load_config
from pinlaterd.errors import ConfigError

SHARDS = """\
# ours
shards:
  1:  # the first
    engine: sqlite
  # the second is old
  2: {engine: sqlite, file: data/two.sqlite}

  # the third
  3:
    file: data/three.sqlite
# the end
"""
PINLATER_MYSQL = (
    '{"db001": {"master": {"host": "a", "port": 1}, "user": "u", "dequeueOnly": false},\n'
    ' "db002": {"master": {"host": "b", "port": 1}, "user": "u"}}\n'
)
PINLATER_REDIS = (
    '{"shards": [{"name": "a", "shardConfig": {"master": {"host": "h", "port": 1}}},\n'
    '            {"name": "b", "shardConfig": {"master": {"host": "h", "port": 2}}}]}\n'
)


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    (folder / "shards.yaml").write_text(SHARDS)
    return folder


def shards_text(etc: Path) -> str:
    return (etc / "shards.yaml").read_text()


def dequeue_only(etc: Path) -> set[str]:
    return {name for name, shard in load_config(etc).shards.items() if shard.dequeue_only}


# --- shards -----------------------------------------------------------------------------------


def test_dequeue_only_adds_one_line_and_may_be_repeated(etc):
    assert set_dequeue_only(etc, "3", on=True)
    assert not set_dequeue_only(etc, "3", on=True)

    assert shards_text(etc) == SHARDS.replace("  3:\n", "  3:\n    dequeue_only: true\n")
    assert set_dequeue_only(etc, "3", on=False)
    assert dequeue_only(etc) == set()


@pytest.mark.parametrize(
    ("text", "shard", "alike"),
    [(PINLATER_MYSQL, "2", {"2", "2d1"}), (PINLATER_REDIS, "b", {"b"}), (SHARDS, "2", {"2"})],
)
def test_dequeue_only_of_every_form_is_for_all_shards_of_the_entry(etc, text, shard, alike):
    (etc / "shards.yaml").write_text(text)
    (etc / "pinlaterd.yaml").write_text("mysql_num_db_per_queue: 2\n")

    assert set(shards_alike(etc, shard)) == alike
    assert set_dequeue_only(etc, shard, on=True)

    assert dequeue_only(etc) == alike


def test_a_shard_that_is_not_there_is_named_with_those_that_are(etc):
    with pytest.raises(ConfigError, match="no shard '7'; there are: 1, 2, 3"):
        shards_alike(etc, "7")


def test_add_writes_at_the_end_and_removing_leaves_no_trace(etc):
    server: dict[str, str | int] = {"host": "h", "port": 6379}
    settings: dict[str, Value] = {"engine": "redis", "master": server, "dequeue_only": True}

    assert add_shard(etc, "4", settings)
    assert not add_shard(etc, "4", settings)

    new = "  4:\n    engine: redis\n    master: {host: h, port: 6379}\n    dequeue_only: true\n"
    assert shards_text(etc) == SHARDS.replace("# the end", f"{new}# the end")
    assert list(load_config(etc).shards) == ["1", "2", "3", "4"]
    with pytest.raises(ConfigError, match="is there already"):
        add_shard(etc, "4", {"engine": "sqlite"})
    assert remove_shard(etc, "4", abandon=False)
    assert shards_text(etc) == SHARDS


@pytest.mark.parametrize(
    ("shard", "gone"),
    [
        ("1", "  1:  # the first\n    engine: sqlite\n"),
        ("2", "  2: {engine: sqlite, file: data/two.sqlite}\n"),
        ("3", "  3:\n    file: data/three.sqlite\n"),
    ],
)
def test_remove_takes_the_shards_own_lines_only(etc, shard, gone):
    assert remove_shard(etc, shard, abandon=False)
    assert not remove_shard(etc, shard, abandon=False)

    assert shards_text(etc) == SHARDS.replace(gone, "")


def test_a_shard_whose_jobs_are_given_up_is_named_so_until_it_has_gone(etc):
    assert remove_shard(etc, "3", abandon=True)
    assert load_config(etc).abandon == ("3",)

    assert forget_abandoned(etc, "3")
    assert not forget_abandoned(etc, "3")
    assert load_config(etc).abandon == ()
    assert remove_shard(etc, "2", abandon=True)
    assert add_shard(etc, "2", {"engine": "sqlite"})
    assert load_config(etc).abandon == ()


def test_the_only_shard_stays(etc):
    (etc / "shards.yaml").write_text("shards:\n  1: {}\n")

    with pytest.raises(ConfigError, match="the only shard"):
        remove_shard(etc, "1", abandon=True)


@pytest.mark.parametrize("text", [PINLATER_MYSQL, PINLATER_REDIS])
def test_pinlaters_forms_are_left_to_people(etc, text):
    (etc / "shards.yaml").write_text(text)

    with pytest.raises(ConfigError, match="by hand"):
        add_shard(etc, "9", {"engine": "sqlite"})
    with pytest.raises(ConfigError, match="by hand"):
        remove_shard(etc, "b", abandon=False)
    assert shards_text(etc) == text


# --- queues -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "# only this",
        "queues: {}\n",
        "queues:\n  other:\n    max_jobs_per_second: 1  # slow\n  # the last\n",
        "queues:\n  123: {job_claimed_timeout_seconds: 5}\n",
        '{"queues": [{"name": "other", "queueConfig": {"maxJobsPerSecond": 7}}]}\n',
    ],
)
def test_limit_and_pause_in_every_form_of_the_file(etc, text):
    path = etc / "queues.yaml"
    if text is not None:
        path.write_text(text)
    before = load_config(etc).queues
    assert not set_limit(etc, "mail", None)
    for queue in ("mail", "123"):
        assert set_limit(etc, queue, 2.5)
        assert not set_limit(etc, queue, 2.5)
        assert load_config(etc).queue(queue).max_jobs_per_second == 2.5

        assert set_paused(etc, queue, paused=True)
        assert load_config(etc).queue(queue).max_jobs_per_second == 0
        assert limit_settings(etc, queue) == (2.5, True)

        assert set_paused(etc, queue, paused=False)
        assert not set_paused(etc, queue, paused=False)
        assert load_config(etc).queue(queue).max_jobs_per_second == 2.5

        assert set_limit(etc, queue, None)
        assert not set_limit(etc, queue, None)
    assert load_config(etc).queues == before
    if text and "#" in text:
        assert "# " in path.read_text()


def test_a_limit_of_a_broken_file_is_a_mistake_in_it(etc):
    (etc / "queues.yaml").write_text("queues: {\n")

    with pytest.raises(ConfigError, match=r"queues\.yaml:2: not valid YAML"):
        limit_settings(etc, "mail")


def test_pause_says_no_more_than_true_or_false(etc):
    (etc / "queues.yaml").write_text("queues:\n  mail:\n    paused: maybe\n")

    with pytest.raises(ConfigError, match=r"queues\.mail\.paused: expected true or false"):
        load_config(etc)


def make_active(etc: Path, monkeypatch) -> None:
    monkeypatch.chdir(etc.parent)
    Path("run").mkdir()
    activate(load_config(etc))


def test_a_missing_file_is_made_for_its_owner_once_there_is_something_to_say(etc):
    path = etc / "queues.yaml"

    assert not set_paused(etc, "mail", paused=False)
    assert not path.exists()

    assert set_paused(etc, "mail", paused=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_config(etc).queue("mail").paused


def test_a_pause_notes_who_when_and_why_until_the_queue_is_resumed(etc):
    (etc / "queues.yaml").write_text("queues:\n  mail: {max_jobs_per_second: 5}\n")

    assert set_paused(etc, "mail", paused=True, by="ada", reason='disk "check"')

    noted = load_config(etc).queue("mail")
    assert (noted.paused_by, noted.pause_reason) == ("ada", 'disk "check"')
    assert datetime.fromisoformat(noted.paused_at).tzinfo is not None
    # Repeated, it keeps the time; somebody else's is a new one.
    assert not set_paused(etc, "mail", paused=True, by="ada", reason='disk "check"')
    assert set_paused(etc, "mail", paused=True, by="bob")
    assert load_config(etc).queue("mail").pause_reason == ""
    assert set_paused(etc, "mail", paused=False)
    assert load_config(etc).queue("mail").paused_by == ""
    assert limit_settings(etc, "mail") == (5, False)


def test_a_reason_that_would_end_its_line_is_refused(etc):
    with pytest.raises(ConfigError, match="pause_reason"):
        set_paused(etc, "mail", paused=True, by="ada", reason="a\nb")


def test_a_missing_file_that_can_not_be_made_is_told(etc, tmp_path):
    (etc / "queues.yaml").symlink_to(tmp_path / "nowhere" / "queues.yaml")

    with pytest.raises(ConfigError, match=r"queues\.yaml: can't be written: No such file"):
        set_paused(etc, "mail", paused=True)


@pytest.mark.parametrize("left", [None, "", "\n"])
def test_a_file_that_vanished_is_not_begun_anew(etc, monkeypatch, left):
    path = etc / "queues.yaml"
    path.write_text("queues:\n  other: {max_jobs_per_second: 1}\n")
    make_active(etc, monkeypatch)
    path.unlink()
    if left is not None:
        path.write_text(left)

    with pytest.raises(ConfigError, match=r"gone or empty.*put it back first"):
        set_paused(etc, "mail", paused=True)

    assert path.exists() == (left is not None)
    path.write_text("# it is to say nothing\n")
    assert set_paused(etc, "mail", paused=True)
    assert path.read_text().startswith("# it is to say nothing\n")


def test_a_file_that_said_nothing_may_be_missing(etc, monkeypatch):
    make_active(etc, monkeypatch)

    assert set_paused(etc, "mail", paused=True)


QUEUES = """\
# ours
queues:
  # for the newsletter
  mail:  # of the shop
    max_jobs_per_second: 5  # as agreed
    # until the move
    paused: true

  # may be slow
  thumbs: {max_jobs_per_second: 5, paused: true}  # small
  # ask them first
  sync:
    paused: true
  # the last
# the end
"""


@pytest.mark.parametrize(
    ("queue", "gone", "instead"),
    [
        ("mail", "    paused: true\n\n", "\n"),
        ("thumbs", ", paused: true}", "}"),
        ("sync", "  sync:\n    paused: true\n", ""),
    ],
)
def test_resume_takes_the_setting_and_no_remark_about_others(etc, queue, gone, instead):
    (etc / "queues.yaml").write_text(QUEUES)

    assert set_paused(etc, queue, paused=False)

    assert (etc / "queues.yaml").read_text() == QUEUES.replace(gone, instead)


def test_remarks_stay_when_no_queue_has_settings_any_more(etc):
    (etc / "queues.yaml").write_text(QUEUES)
    for queue in ("mail", "thumbs", "sync"):
        set_paused(etc, queue, paused=False)
        set_limit(etc, queue, None)
    left = (
        "# ours\nqueues: {}\n  # for the newsletter\n    # until the move\n\n  # may be slow\n"
        "  # ask them first\n  # the last\n# the end\n"
    )
    assert (etc / "queues.yaml").read_text() == left

    assert set_limit(etc, "mail", 2.5)
    new = "queues:\n  mail:\n    max_jobs_per_second: 2.5\n"
    assert (etc / "queues.yaml").read_text() == left.replace("queues: {}\n", new)
    assert set_limit(etc, "mail", None)
    assert (etc / "queues.yaml").read_text() == left


def test_pinlaters_form_in_lines_keeps_its_remarks(etc):
    text = (
        "queues:\n- name: mail\n  queueConfig:\n    maxJobsPerSecond: 3\n    paused: true\n"
        "# may be slow\n- name: thumbs\n"
    )
    (etc / "queues.yaml").write_text(text)

    assert set_paused(etc, "mail", paused=False)

    assert (etc / "queues.yaml").read_text() == text.replace("    paused: true\n", "")


def test_an_edit_that_is_replaced_at_once_is_known_to_be_lost(etc):
    """As where the coordinator of a cluster waits for the end of the edit."""
    path = etc / "queues.yaml"
    theirs = b"queues: {other: {max_jobs_per_second: 1}}\n"

    mine = set_limit(etc, "mail", 7)
    kept = take_over(etc, path.name, b"", theirs)
    assert kept is not None
    assert drop_lost(path, mine)
    assert not kept.exists()

    mine = set_limit(etc, "mail", 7)
    assert not drop_lost(path, mine)
    assert load_config(etc).queue("mail").max_jobs_per_second == 7


@pytest.fixture
def etc_of_cluster(etc: Path) -> Path:
    """Its run/ is there, too."""
    cluster = "cluster: c\nserver: jobs-1\nzookeeper: zk:2181\npeer_host: jobs-1\n"
    (etc / "local.yaml").write_text(cluster)
    (etc / "cluster.key").touch(0o600)
    (etc / "shards.yaml").write_text("shards: {1: {server: jobs-1}}\n")
    (etc.parent / "run").mkdir()
    return etc


def test_an_edit_made_without_the_lock_leaves_what_is_kept(etc_of_cluster):
    """That may be of several edits: only who waits for its own may remove it."""
    etc = etc_of_cluster
    (etc.parent / "run/edit.lock").mkdir()  # as unusable as one that root has made
    kept: list[Path] = []

    def come_second() -> bytes | None:
        mine = set_limit(etc, "mail", 7)
        replaced = take_over(etc, "queues.yaml", b"", b"queues: {other: {}}\n")
        assert replaced is not None
        kept.append(replaced)
        return mine

    assert asyncio.run(carry_out(etc / "queues.yaml", come_second, 60))
    assert [path.exists() for path in kept] == [True]


def test_an_edit_whose_caller_is_gone_keeps_others_out_until_it_is_decided(etc_of_cluster):
    etc, path = etc_of_cluster, etc_of_cluster / "queues.yaml"
    (etc.parent / BASE_FILE).write_text("[]")  # nothing that says what was decided

    async def cancel_undecided() -> None:
        edit = asyncio.create_task(carry_out(path, partial(set_limit, etc, "mail", 7), 4))
        while not path.exists():  # noqa: ASYNC110 - until it is written
            await asyncio.sleep(0.01)
        edit.cancel()
        await asyncio.wait([edit])
        with pytest.raises(BlockingIOError):
            lock_edits(etc, patient=False)
        with await asyncio.to_thread(lock_edits, etc, patient=True):
            pass

    asyncio.run(cancel_undecided())
