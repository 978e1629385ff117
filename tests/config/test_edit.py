"""Changes of shards.yaml by programs: what a person wrote stays as it was."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.config.edit import edit_file, set_servers
from pinlaterd.config.edit_text import Text
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Address, Config
from pinlaterd.errors import ConfigError

A, B = Address("db-a", 3306), Address("db-b", 3307)
NOBODY = 65534

_TEXT = """\
# The shards.   Do not rename.
shards:
    # the first
    001:
        engine: mysql   # ours
        master: {host: "MASTER", port: M_PORT}  # rack 1
        slave:  {host: 'SLAVE', port: S_PORT}
        user: pinlater
        passwd:   "it's # secret"

    2:    # the second
        engine: mysql
        master:
            host: MASTER
            port: M_PORT
        # its slave
        slave:
            host: SLAVE   # rack 2
            port: S_PORT
        user: pinlater
        passwd: yes it is a long password that no line of eighty characters has any room for, is it
        dequeue_only: off

    r-1: {engine: redis, master: {host: db-a, port: 3306}}
    s:
# the end
"""


def _with_servers(**names: str) -> str:
    return re.sub("|".join(names), lambda found: names[found[0]], _TEXT)


OURS = _with_servers(MASTER="db-a", M_PORT="3306", SLAVE="db-b", S_PORT="3307")
OURS_SWAPPED = _with_servers(MASTER="db-b", M_PORT="3307", SLAVE="db-a", S_PORT="3306")

PINLATER_MYSQL = """\
{
    "plshard001": {
        "master": {"host": "db-a", "rack": 7, "port": 3306},
        "slave": {"host": "db-b", "port": 3307},
        "user": "pinlater", "passwd": "geheim \\u00fc",
        "dequeueOnly": false
    },
    "plshard002": {"master": {"host": "db-a", "port": 3306}, "slave": null, "user": "p"}
}
"""

PINLATER_REDIS = (
    '{"shards": [{"name": "1", "shardConfig": {"master": {"host": "db-a", "port": 3306},'
    ' "slave": null, "dequeueOnly": false}}]}'
)


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder


@pytest.fixture
def shards_file(etc: Path) -> Path:
    path = etc / "shards.yaml"
    path.write_text(OURS)
    return path


def test_comments_quotes_order_and_indentation_stay(etc, shards_file):
    changed = set_servers(etc, ["001", "2"], master=B, slave=A)

    assert changed
    assert shards_file.read_text() == OURS_SWAPPED


def test_a_change_to_what_is_there_already_leaves_the_very_file(etc, shards_file):
    before = shards_file.stat().st_ino

    assert not set_servers(etc, ["001", "2"], master=A, slave=B)

    assert shards_file.stat().st_ino == before


@pytest.mark.parametrize(
    "text",
    [
        "---\nshards:\n  1: {}\n",
        "shards: {1: {engine: sqlite}}\n",
        "shards:\n 1:\n  engine: sqlite # one blank\n",
        "\ufeffshards:\n  1:\n    engine: sqlite\n",
        "shards:\r\n  1:\r\n    engine: sqlite\r\n",
        'shards:\n  "1":\n    engine: "sqlite"\n\n\n# far below\n',
        PINLATER_REDIS,
        "shards:\n- name: 1\n  shardConfig:\n    master: {host: a, port: 1}\n",
        "shards:\n  - name: 1\n    shardConfig:\n      master: {host: a, port: 1}\n",
    ],
)
def test_what_is_not_changed_is_written_as_it_was(etc, shards_file, text):
    shards_file.write_bytes(text.encode())

    assert not edit_file(etc, "shards.yaml", lambda before, _config: Text(before).render())

    assert shards_file.read_bytes() == text.encode()


def test_a_slave_is_added_where_there_was_none(etc, shards_file):
    set_servers(etc, ["r-1"], master=B, slave=A)

    shard = load_config(etc).shards["r-1"]
    assert (shard.master, shard.slave) == (B, A)
    assert "r-1: {engine: redis, master: {host: db-b, port: 3307}, slave:" in (
        shards_file.read_text()
    )


def test_an_entry_of_pinlaters_stands_for_several_shards(etc, shards_file):
    shards_file.write_text(PINLATER_MYSQL)
    (etc / "pinlaterd.yaml").write_text("mysql_num_db_per_queue: 2\n")

    set_servers(etc, ["1d1"], master=B, slave=A)

    shards = load_config(etc).shards
    assert {name: shard.master for name, shard in shards.items()} == {
        "1": B,
        "1d1": B,
        "2": A,
        "2d1": A,
    }
    kept = '{\n    "plshard001": {\n        "master": {"host": "db-b", "rack": 7, "port": 3307},\n'
    assert shards_file.read_text().startswith(kept)


def test_pinlaters_redis_form_stays_on_its_line(etc, shards_file):
    shards_file.write_text(PINLATER_REDIS)

    set_servers(etc, ["1"], master=B, slave=A)

    assert shards_file.read_text() == PINLATER_REDIS.replace("db-a", "db-b").replace(
        "3306", "3307"
    ).replace("null", '{"host": "db-a", "port": 3306}')


def test_what_would_be_a_mistake_is_not_written(etc, shards_file):
    with pytest.raises(ConfigError, match="out of range"):
        set_servers(etc, ["2"], master=Address("db-b", 0), slave=A)

    assert shards_file.read_text() == OURS
    assert list(etc.iterdir()) == [shards_file]


def test_mistakes_that_are_there_are_to_be_mended_first(etc, shards_file):
    (etc / "pinlaterd.yaml").write_text("port: none\n")

    with pytest.raises(ConfigError, match="port"):
        set_servers(etc, ["2"], master=B, slave=A)

    assert shards_file.read_text() == OURS


def test_a_change_by_somebody_else_is_not_lost(etc, shards_file):
    def meddle(before: bytes, _config: Config) -> bytes:
        shards_file.write_text(OURS + "# mine\n")
        return before.replace(b"pinlater", b"other")

    with pytest.raises(ConfigError, match="changed by somebody else"):
        edit_file(etc, "shards.yaml", meddle)

    assert shards_file.read_text() == OURS + "# mine\n"


def test_mode_and_links_stay(etc, tmp_path):
    real = tmp_path / "elsewhere.yaml"
    real.write_text(OURS)
    real.chmod(0o640)
    (etc / "shards.yaml").symlink_to(real)

    set_servers(etc, ["001", "2"], master=B, slave=A)

    assert (etc / "shards.yaml").is_symlink()
    assert real.read_text() == OURS_SWAPPED
    assert oct(real.stat().st_mode & 0o777) == "0o640"


@contextmanager
def owner_without_privileges(folder: Path) -> Iterator[None]:
    """Root ignores modes, so root runs this as `nobody`, who owns the folder meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, -1)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def test_a_folder_that_can_t_be_written_to_is_named():
    # not in tmp_path: `nobody` can't search the folders above it
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        etc = Path(folder)
        (etc / "shards.yaml").write_text(OURS)
        etc.chmod(0o500)
        cannot = pytest.raises(ConfigError, match="can't be written: Permission denied")

        with owner_without_privileges(etc), cannot:
            set_servers(etc, ["001"], master=B, slave=A)


# --- any text -----------------------------------------------------------------------------------

NAMES = st.text("abcxyz019_-", min_size=1, max_size=4).filter(lambda name: name not in "---")
CHARACTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])
SCALARS = st.integers() | st.booleans() | st.floats(0, 1e9) | st.text(CHARACTERS, max_size=9)
SETTINGS = st.dictionaries(NAMES, SCALARS, max_size=3)
LAYOUTS = (
    json.dumps,
    lambda tree: json.dumps(tree, indent="\t", ensure_ascii=False),
    lambda tree: yaml.safe_dump(tree, default_flow_style=False, sort_keys=False, indent=3),
    lambda tree: yaml.safe_dump(tree, default_flow_style=True, sort_keys=False, width=20),
    lambda tree: "# first\n---\n" + yaml.safe_dump(tree, sort_keys=False).replace("\n", "\r\n"),
)


@given(
    st.dictionaries(NAMES, SETTINGS, max_size=3),
    st.lists(SETTINGS, max_size=3),
    st.sampled_from(LAYOUTS),
    st.data(),
)
def test_a_change_of_any_text_changes_just_that(queues, listed, layout, data):
    text = Text(layout({"queues": queues, "listed": listed}).encode())
    found = text.tree["queues"]
    for name in data.draw(st.sets(NAMES | st.sampled_from([*queues, "x"]), max_size=3)):
        found[name] = data.draw(SETTINGS | SCALARS | st.just({"host": "h", "port": 1}))
    for name in data.draw(st.sets(st.sampled_from([*queues, "x"]), max_size=2)) & found.keys():
        del found[name]
    items = st.sampled_from([*listed, {}]) | SETTINGS
    text.tree["listed"] = data.draw(st.permutations(listed) | st.lists(items, max_size=4))

    assert Text(text.render()).tree == text.tree
