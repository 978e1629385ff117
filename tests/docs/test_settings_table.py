"""docs/operations.md names every setting with its default: the table is the schema's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pinlaterd.config.schema import ServerSettings, Setting, settings_of

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
BEGIN = "<!-- settings: kept in step with pinlaterd/config/schema.py by a test -->\n"
END = "<!-- end of settings -->\n"


def settings_table() -> str:
    lines = ["| setting | default | what it is | allowed |", "|---|---|---|---|"]
    for field in dataclasses.fields(ServerSettings):
        setting = field.metadata["setting"]
        assert isinstance(setting, Setting)
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

    live = [f"`{name}`" for name, setting in settings_of(ServerSettings).items() if setting.live]

    assert text == ", ".join(live)


def test_the_settings_table_is_the_schema():
    text = OPERATIONS.read_text()

    table = text.partition(BEGIN)[2].partition(END)[0].strip("\n") + "\n"

    assert table == settings_table(), f"docs/operations.md should have:\n\n{settings_table()}"
