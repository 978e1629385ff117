"""The guide is docs/operations.md, and every link of the dashboard leads to a section of it."""

from __future__ import annotations

import re
from pathlib import Path

from pinlaterd.verdict import VerdictKind
from pinlaterd.web.guide import SECTIONS, anchor, page

OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"
CALM = {VerdictKind.DRAINING, VerdictKind.UNKNOWN, VerdictKind.WELL, VerdictKind.IDLE}


def test_every_verdict_that_needs_somebody_has_a_section():
    anchors = set(re.findall(r'<h\d id="([^"]+)">', page()))

    assert {*VerdictKind} - CALM <= SECTIONS.keys()
    assert {*SECTIONS.values()} <= anchors


def test_links_within_the_guide_lead_somewhere():
    anchors = set(re.findall(r'<h\d id="([^"]+)">', page()))

    assert set(re.findall(r'href="#([^"]+)"', page())) <= anchors


def test_the_guide_has_all_of_the_text():
    text = OPERATIONS.read_text()
    headings = re.findall(
        r"^#{1,4} (.*)$",
        re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    shown = page()

    assert all(f'id="{anchor(heading)}"' in shown for heading in headings)
    assert shown.count("<tr>") == len(re.findall(r"^\|(?!-)", text, re.MULTILINE))
    assert "<pre>pinlater-admin restart router" in shown
    assert "<code>etc/pinlaterd.yaml</code>" in shown
    assert "**" not in re.sub(r"<pre>.*?</pre>|<code>.*?</code>", "", shown, flags=re.DOTALL)
