"""Where a deployment keeps its things."""

from __future__ import annotations

import stat
from pathlib import Path

from pinlaterd.config import layout


def test_a_deployment_that_was_only_checked_out_gets_its_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deployment" / "etc").mkdir(parents=True)

    etc = layout.enter(tmp_path / "deployment" / "etc")

    assert Path.cwd() == tmp_path / "deployment"
    assert etc == Path("etc")
    for folder in (layout.RUN, layout.DATA):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
