"""The plots of a queue: drawn from its history, with the values under a cursor that all share."""

from __future__ import annotations

import pytest

from tests.conftest import WaitUntil
from tests.web.browser.conftest import OpenTab, wait_for

pytestmark = pytest.mark.service


def values(page, place: int) -> list[str]:
    found: list[str] = page.locator("figure").nth(place).locator("output").all_inner_texts()
    return found


def test_plots_show_the_newest_values_and_those_under_the_shared_cursor(open_tab: OpenTab):
    tab = open_tab()
    page = tab.open("/q/images?range=1h")
    wait_for(page, "document.querySelectorAll('.plots canvas').length === 4")
    wait_for(page, "document.querySelectorAll('.plots output')[3].textContent === '1,200'")

    # At the left end of one plot nothing is known yet, which the others say, too.
    canvas = page.locator(".plots .u-over").first
    canvas.hover(position={"x": 2, "y": 40})

    wait_for(page, "document.querySelectorAll('.plots output')[3].textContent === '–'")
    assert values(page, 1) == ["–", "–", "–"]
    assert "UTC" in page.inner_text("#marks")


def test_colours_follow_the_scheme(open_tab: OpenTab, wait_until: WaitUntil):
    page = open_tab(color_scheme="light").open("/q/images?range=1h")
    page.wait_for_selector(".plots canvas")
    light = page.evaluate("getComputedStyle(document.querySelector('.lines i')).color")

    page.emulate_media(color_scheme="dark")

    dark = page.evaluate("getComputedStyle(document.querySelector('.lines i')).color")
    assert light != dark
    assert page.locator(".plots canvas").count() == 4


def test_a_range_is_an_address_and_back_works(open_tab: OpenTab):
    page = open_tab().open("/q/images")
    page.get_by_role("link", name="24 h").click()
    page.wait_for_url("**/q/images?range=24h")

    page.go_back()

    page.wait_for_url("**/q/images")


def test_without_javascript_the_same_figures_are_a_table(open_tab: OpenTab):
    page = open_tab(java_script_enabled=False).open("/q/images?range=1h")
    assert "Plots need JavaScript; the table does not." in page.inner_text("#marks")

    page.get_by_role("link", name="as a table").click()

    assert page.locator("table tbody tr").count() >= 1
    assert "1,200" in page.inner_text("table")
