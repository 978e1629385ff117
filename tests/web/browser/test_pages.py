"""Every page of the dashboard: policy, accessibility, weight, width, and no JavaScript."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from pinlaterd.client import JobState
from tests.deployment import Deployment
from tests.web.browser.conftest import PHONE, WIDE, OpenTab, Tab, package_file
from tests.web.conftest import Visitor
from tests.web.failing import fail

pytestmark = pytest.mark.service

MOST_FIRST_LOAD_BYTES = 80 * 1024
# A page each, where a job's descriptor, or the number of an operation, is to be put in.
PAGES = (
    "/",
    "/q/mail",
    "/q/mail?state=failed",
    "/failures?queue=mail",
    "/find?q=user21",
    "/mend?action=retry&queue=mail&state=failed",
    "/workers",
    "/system",
    "/mend?action=dequeue_only&shard=1&value=on",
    "/audit",
    "/help",
    "/q/mail/history?range=1h",
    "/failures",
    "/j/{job}",
    "/j/{job}?as=hex",
    "/j/none:s1:p1:1",
    "/op/{op}",
)
LOOKS: dict[str, dict[str, Any]] = {
    "light": {"viewport": WIDE, "color_scheme": "light"},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
    "zoom 400 %": {"viewport": {"width": 320, "height": 256}, "color_scheme": "light"},
}
_RUN_AXE = """
async (tags) => (await axe.run(document, {runOnly: tags, resultTypes: ["violations"]}))
  .violations.flatMap((found) => found.nodes.map((node) => `${found.id}: ${node.html}`))
"""
# Links within sentences of the guide may be as high as their line.
_SMALL_TARGETS = """
() => [...document.querySelectorAll("a, button, select, input:not([type=radio], [type=checkbox])")]
  .filter((each) => each.checkVisibility() && !each.matches(".skip, .help a"))
  .filter((each) => each.getBoundingClientRect().height < 44)
  .map((each) => each.outerHTML.slice(0, 120))
"""
_WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


@pytest.fixture(scope="module")
def path_of(demonstration: Deployment) -> Callable[[str], str]:
    with demonstration.client() as client:
        job = next(iter(client.scan("mail", JobState.FAILED))).descriptor
        fail(client, "opened", ["KeyError: 'x' (a.py:3 in c)"] * 2)
    visitor = Visitor(demonstration.web_port)
    preview = visitor.get("/mend?action=retry&queue=opened").body
    form = dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', preview))
    form.pop("next")  # of the form that chooses the look
    path = visitor.post("/mend", {**form, "mode": "first"}).headers["Location"]
    return lambda page: page.format(job=job, op=path.rpartition("/")[2])


def accessibility_faults(page: Any) -> list[str]:
    page.evaluate(package_file("axe-core/axe.min.js").read_text())
    found: list[str] = page.evaluate(_RUN_AXE, _WCAG)
    return found


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_accessible_and_fits(open_tab: OpenTab, path_of, path, look):
    check_page(open_tab(**LOOKS[look]), path_of(path), look)


@pytest.mark.parametrize("look", LOOKS)
def test_the_login_is_accessible_and_fits(open_tab: OpenTab, guarded: Deployment, look):
    check_page(open_tab(of=guarded, **LOOKS[look]), "/login", look)


def check_page(tab: Tab, path: str, look: str) -> None:
    page = tab.page
    page.goto(tab.address + path)

    assert accessibility_faults(page) == []
    if "has_touch" in LOOKS[look]:
        assert page.evaluate(_SMALL_TARGETS) == []
    widths = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    assert tab.bytes_received <= MOST_FIRST_LOAD_BYTES
    tab.complaints[:] = [text for text in tab.complaints if "status of 404" not in text]
