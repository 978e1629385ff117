"""Keys of all pages, figures that are live or held, in a real browser."""

from __future__ import annotations

from typing import Any

from tests.deployment import Deployment, frozen
from tests.web.browser.conftest import OpenTab


def choose(page: Any, preference: str) -> None:
    """Press the button of a preference, and wait until the page has come with it."""
    with page.expect_navigation():
        page.get_by_role("button", name=preference, exact=True).click()


def test_keys_find_go_and_choose_a_row(open_tab: OpenTab):
    page = open_tab().open("/")

    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "find"
    page.keyboard.press("g")  # typed into the field
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    first = page.locator("tr.current th").inner_text()
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/q/{first}")
    page.keyboard.press("g")
    page.keyboard.press("s")
    page.wait_for_url("**/system")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()


def test_keys_can_be_off(open_tab: OpenTab):
    page = open_tab().open("/")

    choose(page, "off")
    page.wait_for_selector("html[data-keys=off]")
    page.keyboard.press("/")

    assert page.evaluate("document.activeElement.id") != "find"
    choose(page, "on")
    page.wait_for_selector("html[data-keys=on]")


def test_the_look_is_the_systems_until_it_is_chosen(open_tab: OpenTab):
    page = open_tab(color_scheme="light").open("/")
    ground = "getComputedStyle(document.body).backgroundColor"

    assert page.evaluate(ground) == "rgb(247, 248, 250)"
    choose(page, "dark")
    page.wait_for_selector("html[data-theme=dark]")

    assert page.evaluate(ground) == "rgb(16, 19, 23)"


def test_figures_change_by_themselves_unless_they_are_held(
    open_tab: OpenTab, demonstration: Deployment
):
    with demonstration.client() as client:
        client.create_queue("watched")
        page = open_tab().open("/q/watched")
        ready = page.locator('[data-cell="figure ready"]')
        while not ready.count():  # the queue is newer than the figures
            page.reload()
        client.enqueue("watched", [b"x"] * 3)
        page.wait_for_selector('[data-cell="figure ready"]:text-is("3")')
        page.keyboard.press("p")
        client.enqueue("watched", [b"x"] * 2)
        page.wait_for_selector("body.stale")
        assert ready.inner_text() == "3"
        page.keyboard.press("p")
        page.wait_for_selector('[data-cell="figure ready"]:text-is("5")')
        page.wait_for_selector("body:not(.stale)")


def test_a_page_says_how_old_its_figures_are(open_tab: OpenTab, demonstration: Deployment):
    page = open_tab().open("/")
    page.wait_for_selector("text=live,")

    with frozen(demonstration.pid_of("coordinator")):
        page.wait_for_selector("body.stale")
        assert "data is" in page.locator("#age").inner_text()
    page.wait_for_selector("body:not(.stale)")
    demonstration.wait_until_serving()
