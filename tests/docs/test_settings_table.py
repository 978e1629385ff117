"""docs/operations.md names every setting with its default: the table is the schema's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pinlaterd.config.schema import ServerSettings, Setting, settings_of

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN = "<!-- settings: kept in step with pinlaterd/config/schema.py by a test -->\n"
LOCAL_BEGIN = BEGIN.replace("settings", "settings of local.yaml")
END = "<!-- end of settings -->\n"


def settings_table(*, local: bool) -> str:
    """`local`: those that stand in local.yaml only."""
    lines = ["| setting | default | what it is | allowed |", "|---|---|---|---|"]
    for field in dataclasses.fields(ServerSettings):
        setting = field.metadata["setting"]
        assert isinstance(setting, Setting)
        if setting.only_local != local:
            continue
        host_name = field.name == "advertised_host"  # the one that differs by machine
        default = "the machine's host name" if host_name else f"`{shown(field.default)}`"
        allowed = str(setting.allowed) if setting.allowed is not None else ""
        allowed = allowed.removeprefix("choose from ").removeprefix("expected ")
        lines.append(f"| `{field.name}` | {default} | {setting.doc} | {allowed} |")
    return "\n".join(lines) + "\n"


def shown(default: object) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, int | float):
        return f"{default:_}" if default >= 10_000 else f"{default:g}"
    return str(default) if default else '""'


def test_settings_that_act_at_once_are_named():
    text = OPERATIONS.read_text().partition("these act at once: ")[2].partition(". The others")[0]

    live = [
        f"`{name}`"
        for name, setting in settings_of(ServerSettings).items()
        if setting.live and not setting.only_local
    ]

    assert text == ", ".join(live)


def test_the_settings_that_may_stand_in_local_yaml_are_named():
    text = " ".join(OPERATIONS.read_text().split())
    text = text.partition("may stand in `etc/local.yaml` too: ")[2].partition(". ")[0]

    both = [
        f"`{name}`"
        for name, setting in settings_of(ServerSettings).items()
        if setting.machine and not setting.only_local
    ]

    assert text == ", ".join(both)


@pytest.mark.parametrize(("begin", "local"), [(BEGIN, False), (LOCAL_BEGIN, True)])
def test_the_settings_tables_are_the_schema(begin, local):
    text = OPERATIONS.read_text()

    table = text.partition(begin)[2].partition(END)[0].strip("\n") + "\n"

    wanted = settings_table(local=local)
    assert table == wanted, f"docs/operations.md should have:\n\n{wanted}"
