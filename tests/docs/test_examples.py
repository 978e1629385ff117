"""Every example of a configuration file is one that the service takes."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config

REPOSITORY = Path(__file__).parents[2]
SHARDS = sorted(REPOSITORY.glob("examples/shards-*"))
BLOCKS = [
    dedent(block)
    for page in sorted([REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md")])
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
]


@pytest.fixture(autouse=True)
def passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*BLOCKS, *(path.read_text("utf-8") for path in SHARDS)]
    for text in texts:
        for name in re.findall(r"passwd_env: (\w+)", text):
            monkeypatch.setenv(name, "secret")


def load(folder: Path, kind: str, text: str) -> Config:
    hosts = re.findall(r"url: https?://([^/:]+)", text)  # each has to be one to push to
    server = f"push_hosts: {','.join(hosts)}\n" if hosts else ""
    files = {"pinlaterd": server, "shards": "shards: {1: {}}", "queues": ""} | {kind: text}
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(content)
    return load_config(folder)


@pytest.mark.parametrize("path", SHARDS, ids=lambda path: path.name)
def test_an_example_of_shards_is_taken(path: Path, tmp_path: Path):
    config = load(tmp_path, "shards", path.read_text("utf-8"))

    engines = {shard.engine for shard in config.shards.values()}
    assert engines == (
        {"sqlite", "mysql", "redis"} if "mixed" in path.name else {path.stem.split("-")[-1]}
    )


def test_settings_that_examples_leave_out_are_named_rightly(tmp_path: Path):
    """What is commented out can be put in."""
    text = (REPOSITORY / "examples/shards-mixed.yaml").read_text("utf-8")
    whole = re.sub(r"^( +)#(\w+:)", r"\1\2", text, flags=re.MULTILINE)

    shards = load(tmp_path, "shards", whole).shards

    assert whole != text
    assert shards["db-1"].dequeue_only
    assert shards["db-1"].slave is not None
    assert shards["1"].file == "/disk2/jobs/shard-1.sqlite"


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_of_the_documentation_is_taken(block: str, tmp_path: Path):
    kind = block.split(":", maxsplit=1)[0]
    config = load(tmp_path, kind if kind in ("shards", "queues") else "pinlaterd", block)

    assert config.shards
    if kind == "queues":
        assert config.queues
