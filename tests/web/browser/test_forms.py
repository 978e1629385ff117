"""Forms as a real browser sends them: with its own origin, and by one click."""

from __future__ import annotations

from typing import Any

import pytest

from pinlaterd.client import JobState
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.web.browser.conftest import OpenTab, reload_until_counted

pytestmark = pytest.mark.service


def says(page: Any, text: str) -> bool:
    """Load a page again, and tell whether it says so now."""
    playwright = pytest.importorskip("playwright.sync_api")
    try:
        page.reload()
    except playwright.Error:  # the page before it has not gone yet
        return False
    return text in page.content()


@pytest.mark.parametrize("java_script_enabled", [True, False])
def test_a_few_failed_jobs_are_tried_and_the_page_asks(
    open_tab: OpenTab, demonstration: Deployment, wait_until: WaitUntil, java_script_enabled
):
    with demonstration.client() as client:
        before = client.count("mail", JobState.FAILED)
    page = open_tab(java_script_enabled=java_script_enabled).open("/q/mail")

    page.get_by_role("link", name="Retry failed").click()
    page.wait_for_url("**/mend?*")
    reload_until_counted(page, wait_until)
    page.get_by_label("reason").fill("smtp is back")
    page.get_by_role("button", name="Retry 10 of").click()

    page.wait_for_url("**/op/*")
    wait_until(lambda: says(page, "Go on with"))
    with demonstration.client() as client:
        assert client.count("mail", JobState.FAILED) == before - 10
    with page.expect_navigation():  # a reload would come before it
        page.get_by_role("button", name="Stop").click()
    wait_until(lambda: says(page, "stopped: 10 retried"))
