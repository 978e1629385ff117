"""What operators do in a real browser: figures that agree, hostile texts, mending and undoing it,
processes that die meanwhile, hidden tabs."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any
from urllib.parse import urlsplit

import pytest

from pinlaterd.client import AckInfo, Client, JobChoice, JobState
from tests.conftest import WaitUntil
from tests.deployment import Deployment, claim, frozen
from tests.web.browser.conftest import OpenTab, log_in, reload_until_counted, wait_for
from tests.web.conftest import Visitor, wait_until_answering

pytestmark = pytest.mark.service

HOSTILE = [
    b'{"x": "<script>document.title = \'owned\'</script><img src=x onerror=alert(1)>"}',
    "\u202egnp.exe\u200b\x1b[31m".encode(),
    bytes(range(256)) * 40,
    b'"' + b"x" * 1_000_000 + b'"',
    b"[" * 50_000,
]

# Of the first line, and of the first verdict.
COLOURS = """
["h1", ".verdict strong"].map((each) => getComputedStyle(document.querySelector(each)).color)
"""
FAINT = "rgb(110, 119, 133)"


@pytest.fixture
def client(demonstration: Deployment):
    with demonstration.client("mailer:web9") as client:
        yield client


def fail_all(client: Client, queue: str, bodies: list[bytes], status: str) -> list[str]:
    """Enqueue jobs that fail for good."""
    client.create_queue(queue)
    client.enqueue(queue, bodies)
    acks = [
        AckInfo(job.descriptor, status, claim_descriptor=job.claim_descriptor, retryable=False)
        for job in claim(client, queue, len(bodies))
    ]
    client.ack(queue, failed=acks)
    return [job.descriptor for job in client.scan(queue, JobState.FAILED)]


def wait_for_figure(page: Any, name: str, value: int) -> None:
    cell = f"document.querySelector('[data-cell=\"figure {name}\"]')"
    wait_for(page, f"{cell}.innerText == '{value:,}'")


def test_figures_are_those_of_the_interface_and_change_while_one_looks(
    open_tab: OpenTab, client: Client, demonstration: Deployment, wait_until: WaitUntil
):
    client.create_queue("parcels")
    page = open_tab().open("/")
    client.enqueue("parcels", [b"x"] * 1234)
    claim(client, "parcels", 4)
    visitor = Visitor(demonstration.web_port)
    wait_until(lambda: 'data-cell="figure running"' in visitor.get("/q/parcels").body)
    page = open_tab().open("/q/parcels?range=1h")

    wait_for_figure(page, "running", 4)
    wait_for_figure(page, "ready", client.count("parcels", JobState.PENDING))
    before = page.evaluate("performance.getEntriesByType('navigation').length")
    client.enqueue("parcels", [b"x"] * 10)
    wait_for_figure(page, "ready", 1_240)
    assert page.evaluate("performance.getEntriesByType('navigation').length") == before


@pytest.mark.parametrize("body", HOSTILE, ids=["script", "bidi", "bytes", "megabyte", "deep"])
def test_a_hostile_body_is_shown_and_does_nothing(open_tab: OpenTab, client: Client, body):
    client.create_queue("odd")
    [descriptor] = client.enqueue("odd", [body])
    tab = open_tab()

    page = tab.open(f"/j/{descriptor}")

    assert page.title().startswith(descriptor)
    assert page.locator("img").count() == 0
    shown = page.inner_text("pre.body >> nth=0")
    assert not set("\u202e\u200b\x1b\x00") & set(shown)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    with page.expect_download() as saved:
        page.get_by_role("link", name="save").click()
    assert saved.value.path().read_bytes() == body


def test_a_search_shows_what_it_finds_and_text_beyond_ascii(open_tab: OpenTab, client: Client):
    client.create_queue("words")
    [descriptor] = client.enqueue("words", ['{"to": "grüße@example.com"}'.encode()])
    page = open_tab().open("/")

    page.keyboard.press("/")
    page.keyboard.type("grüße@example")
    page.keyboard.press("Enter")

    page.wait_for_url("**/find?q=*")
    page.get_by_role("link", name=descriptor).click()
    page.wait_for_url(f"**/j/{descriptor}")
    page.go_back()
    wait_for(page, "document.querySelectorAll('table.found tbody tr').length === 1")


def test_a_group_is_retried_ten_first_then_the_others(
    open_tab: OpenTab, client: Client, demonstration: Deployment, wait_until: WaitUntil
):
    fail_all(client, "letters", [b"%d" % n for n in range(25)], "Timeout: smtp1 (a.py:1 in b)")
    page = open_tab().open("/failures?queue=letters")
    page.locator("a[href^='/mend']").first.click()
    page.wait_for_url("**/mend?*")
    reload_until_counted(page, wait_until)
    assert "25" in page.inner_text("h1")
    button = page.locator("form.mend button.primary")
    page.check("input[name=mode][value=all]")
    assert button.inner_text() == "Retry 25"
    page.check("input[name=mode][value=first]")
    assert button.inner_text() == "Retry 10 of 25"

    page.locator("form.mend button.primary").click()

    page.wait_for_url("**/op/*")
    wait_until(lambda: client.count("letters", JobState.PENDING) == 10)
    client.ack("letters", succeeded=claim(client, "letters", 10))
    wait_for(page, "document.querySelector('h1').innerText.includes('10 tried, 10 succeeded')")
    go_on = page.get_by_role("button", name=re.compile("Go on"))
    wait_until(lambda: page.goto(page.url) and go_on.count())
    wait_for(page, "document.querySelector('h1').innerText.includes('10 tried, 10 succeeded')")
    visitor, path = Visitor(demonstration.web_port), urlsplit(page.url).path
    visitor.get(path)
    assert visitor.post(path, {"do": "stop"}).status == 303
    wait_for(page, "!document.querySelector('[data-differs]').hidden")
    with page.expect_navigation():
        page.get_by_role("link", name="Show", exact=True).click()
    assert "stopped: 10 retried" in page.inner_text("h1")
    go_on.click()
    wait_until(lambda: client.count("letters", JobState.PENDING) == 15)


def test_a_list_stays_as_it_was_read_and_offers_what_has_come_since(
    open_tab: OpenTab, client: Client, demonstration: Deployment, wait_until: WaitUntil
):
    old = fail_all(client, "cards", [b"1"] * 3, "KeyError: 'x' (a.py:3 in c)")
    visitor = Visitor(demonstration.web_port)
    wait_until(lambda: 'figure failed">3<' in visitor.get("/q/cards").body)
    pages = [open_tab().open(path) for path in ("/q/cards?state=failed", "/failures?queue=cards")]

    fail_all(client, "cards", [b"2"] * 4, "KeyError: 'x' (a.py:3 in c)")

    client.retry_failed("cards", choice=JobChoice(descriptors=old))
    for page in pages:
        wait_for(page, "document.querySelector('.changed').innerText.startsWith('4 newer')")
    page = pages[0]
    assert page.locator("table.jobs tbody tr").count() == 3
    with page.expect_navigation():
        page.get_by_role("link", name="show", exact=True).click()
    assert page.locator("table.jobs tbody tr").count() == 4


def test_a_list_of_ready_jobs_says_that_it_has_changed_and_its_ages_go_on(
    open_tab: OpenTab, client: Client, demonstration: Deployment, wait_until: WaitUntil
):
    client.create_queue("crates")
    client.enqueue("crates", [b"1"])
    visitor = Visitor(demonstration.web_port)
    wait_until(lambda: 'figure ready">1<' in visitor.get("/q/crates").body)
    page = open_tab().open("/q/crates")
    age = "document.querySelector('td.when time').innerText"
    before = page.evaluate(age)

    client.enqueue("crates", [b"2"])

    wait_for(page, "document.querySelector('.changed').innerText === 'These have changed, show'")
    wait_for(page, f"{age} !== {json.dumps(before)} && {age}.endsWith(' ago')")
    exact = page.get_attribute("td.when time", "title")
    page.evaluate("getSelection().selectAllChildren(document.querySelector('td.when'))")
    copied = "addEventListener('copy', () => { window.copied = getSelection().toString(); })"
    page.evaluate(f"() => {copied}")
    page.keyboard.press("Control+c")
    assert page.evaluate("window.copied") == exact


def test_a_banner_says_that_its_queue_is_well_again(
    open_tab: OpenTab, client: Client, demonstration: Deployment, wait_until: WaitUntil
):
    client.create_queue("shelves")
    visitor = Visitor(demonstration.web_port)

    def fails() -> bool:
        fail_all(client, "shelves", [b"1"], "KeyError: 'x' (a.py:3 in c)")
        return "shelves: failing" in visitor.get("/").text

    wait_until(fails)
    page = open_tab().open("/")
    banner = page.locator("section.banner", has_text="shelves:")
    assert banner.get_attribute("data-state") == "failing"
    assert banner.get_by_role("link", name="failures").count() == 1

    def is_well() -> object:
        # So many that few of a minute's attempts have failed, however often the machine let them.
        client.enqueue("shelves", [b"2"] * 400)
        client.ack("shelves", succeeded=claim(client, "shelves", 400))
        page.wait_for_timeout(50)
        return banner.get_attribute("data-state") == "well"

    wait_until(is_well)

    assert banner.inner_text().startswith("shelves: well")
    line = page.locator("p.changed").inner_text()
    assert line in ("This is over. Show", "Something else is wrong now. Show")


@pytest.mark.parametrize("path", ["/audit", "/workers", "/q/mail/history?range=1h"])
def test_a_page_that_follows_nothing_says_of_when_it_is(open_tab: OpenTab, path):
    page = open_tab().open(path)

    wait_for(page, "document.readyState === 'complete'")
    assert re.fullmatch(r"as of [0-9:]{8} UTC", page.inner_text("#age").removeprefix("● "))
    assert page.locator("#hold").is_hidden()


def test_a_session_that_is_over_is_said_with_a_link_that_comes_back(
    open_tab: OpenTab, guarded: Deployment
):
    tab = open_tab(of=guarded)
    page = tab.open("/login?next=%2Ffailures")
    log_in(page)
    page.wait_for_url("**/failures")
    wait_for(page, "document.getElementById('age').innerText.startsWith('live')")
    other = page.context.new_page()
    other.goto(f"{tab.address}/audit")
    other.get_by_role("button", name="log out").click()
    other.wait_for_url("**/login")

    wait_for(page, "document.getElementById('age').innerText === 'Log in again'")

    page.get_by_role("link", name="Log in again").click()
    page.wait_for_url("**/login?next=*")
    log_in(page)
    page.wait_for_url("**/failures")


def test_deleted_jobs_are_put_back(open_tab: OpenTab, client: Client, wait_until: WaitUntil):
    fail_all(client, "stamps", [b"%d" % n for n in range(8)], "KeyError: 'x' (a.py:3 in c)")
    page = open_tab().open("/mend?action=delete&queue=stamps&state=failed")
    reload_until_counted(page, wait_until)
    page.check("input[name=mode][value=all]")
    page.locator("form.mend button.primary").click()
    page.wait_for_url("**/op/*")
    put_back = page.get_by_role("button", name="Put back")
    wait_until(lambda: page.goto(page.url) and put_back.count())
    assert client.count("stamps", JobState.FAILED) == 0

    put_back.click()

    wait_until(lambda: client.count("stamps", JobState.PENDING) == 8)


def test_a_hidden_tab_closes_its_stream(open_tab: OpenTab):
    page = open_tab().open("/")
    wait_for(page, "document.getElementById('age').innerText.startsWith('live')")
    assert FAINT not in page.evaluate(COLOURS)
    page.evaluate("""() => {
      Object.defineProperty(document, "hidden", { get: () => true, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }""")

    wait_for(page, "document.body.classList.contains('stale')")
    assert page.evaluate(COLOURS) == [FAINT, FAINT]

    page.evaluate("""() => {
      delete document.hidden;
      document.dispatchEvent(new Event("visibilitychange"));
    }""")
    wait_for(page, "!document.body.classList.contains('stale')")


@pytest.mark.parametrize("program", ["coordinator", "web"])
def test_a_killed_process_is_told_and_the_page_goes_on_by_itself(
    open_tab: OpenTab, demonstration: Deployment, wait_until: WaitUntil, program
):
    tab, visitor = open_tab(), Visitor(demonstration.web_port)
    # A coordinator that has just started does not know it yet.
    wait_until(lambda: 'data-cell="figure ready"' in visitor.get("/q/images").body)
    page = tab.open("/q/images?range=1h")
    wait_for(page, "document.getElementById('age').innerText.startsWith('live')")

    pid = demonstration.pid_of(program)
    with frozen(demonstration.supervisord_pid()):  # it is away until the page has told so
        os.kill(pid, signal.SIGKILL)
        wait_for(page, "!document.getElementById('age').innerText.startsWith('live, 0')")
    wait_until_answering(demonstration, wait_until)
    wait_for(page, "/^live, [01][.]/.test(document.getElementById('age').innerText)")
    tab.complaints.clear()  # of the connection that broke


def test_a_page_of_another_site_can_not_post(open_tab: OpenTab, demonstration: Deployment):
    tab = open_tab()
    foreign = tab.page
    address = json.dumps(f"{tab.address}/find/cancel")
    foreign.route("http://elsewhere.test/", lambda route: route.fulfill(body="<p>hello"))
    foreign.goto("http://elsewhere.test/")
    with foreign.expect_navigation():
        foreign.evaluate(f"""() => {{
          const form = document.createElement("form");
          form.method = "post";
          form.action = {address};
          document.body.append(form);
          form.submit();
        }}""")

    assert "may not call this server" in foreign.inner_text("h1")
    tab.complaints.clear()  # the answer's status
