"""The dashboard in Debian's chromium, driven by playwright, over the queues of the quickstart.

One deployment serves all tests of a process, one browser those of a module. A page that reports a
violation of its policy, an error on its console, or a request that fails, fails the test that has
opened it.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ProgramPath, WaitUntil
from tests.deployment import MOST_PATIENT, Deployment
from tests.web.conftest import Visitor, serving_web

ROOT = Path(__file__).parents[3]
PACKAGES = ROOT / "build/browser/node_modules"
CHROMIUM = "/usr/bin/chromium"
PASSWORD = "correct horse"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
_BROWSER_MS = 120_000  # for all that is waited for
# Reports of the page's policy, from its first line on.
_WATCH_POLICY = """
addEventListener("securitypolicyviolation", (event) => {
  console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sample}`);
});
"""


class Tab:
    """A page of the browser, whose complaints are kept."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.address = address
        self.complaints: list[str] = []
        self._sizes: dict[str, int] = {}
        page.add_init_script(_WATCH_POLICY)
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("requestfinished", self._weigh)

    def open(self, path: str) -> Any:
        """Load a page of the dashboard, and return the browser's own object for it."""
        answer = self.page.goto(self.address + path)
        assert answer.status < 400, f"{path}: {answer.status}"
        return self.page

    @property
    def bytes_received(self) -> int:
        """The size of all that was asked for, as it came first: plots ask again and again."""
        return sum(self._sizes.values())

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _weigh(self, request: Any) -> None:
        if not request.url.startswith(self.address + "/live"):  # it never ends
            sizes = request.sizes()
            size = sizes["responseBodySize"] + sizes["responseHeadersSize"]
            self._sizes.setdefault(request.url, size)


OpenTab = Callable[..., Tab]


def wait_for(page: Any, expression: str, *, seconds: float = 60.0) -> None:
    """Wait for a condition of the page. Playwright's own way evaluates text within the page, which
    the dashboard's policy forbids."""
    until = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < until, f"not within {seconds:g} s: {expression}"
        page.wait_for_timeout(50)


def reload_until_counted(page: Any, wait_until: WaitUntil) -> None:
    """Reload a preview until it has counted all, which a busy machine delays."""

    def is_counted() -> bool:
        page.reload()
        return "at least" not in page.inner_text("h1")

    wait_until(is_counted)


def package_file(path: str) -> Path:
    """A file of npm's packages; without it the test is skipped."""
    file = PACKAGES / path
    if not file.exists():
        pytest.skip(f"{file} is missing; `tools/test` installs it where npm is")
    return file


@pytest.fixture(scope="module")
def chromium(program_path: ProgramPath) -> Iterator[Any]:
    """The browser. While it is driven the thread has a running event loop, with which no test of
    another module that starts one of its own could do."""
    program_path(CHROMIUM, debian_package="chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-dev-shm-usage"],
            timeout=_BROWSER_MS,
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def example() -> ModuleType:
    """The module that makes the quickstart's queues."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("quickstart_example")
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="session")
def demonstration(
    tmp_path_factory: pytest.TempPathFactory, example: ModuleType, wait_until: WaitUntil
) -> Iterator[Deployment]:
    """A deployment with the quickstart's queues, which the dashboard shows."""
    folder = tmp_path_factory.mktemp("b")
    with serving_web(folder, shards=2, web_writes="true", web_label="TEST") as deployment:
        assert example.leave(deployment.client, folder)
        wait_until(lambda: has_history(deployment, example.IMAGES, example.READY_IMAGES))
        yield deployment


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment with a user, who has to log in."""
    deployment = Deployment(tmp_path_factory.mktemp("g"))
    deployment.init(settings=MOST_PATIENT, web=True)
    deployment.admin(*("user", "add", "ada", "--role", "view", "--password-stdin"), stdin=PASSWORD)
    with deployment.running():
        yield deployment


def log_in(page: Any) -> None:
    """Fill in the form of the page /login, and send it."""
    page.get_by_label("Name").fill("ada")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()


def has_history(deployment: Deployment, queue: str, jobs: int) -> bool:
    """Return whether a point of a queue's history is known that has all of its jobs."""
    return jobs in Visitor(deployment.web_port).history(queue)["series"].get("ready", ())


@pytest.fixture
def open_tab(chromium: Any, demonstration: Deployment) -> Iterator[OpenTab]:
    """Open tabs, each in a context of its own, with the options that playwright has for contexts.
    `of`: another deployment than the demonstration."""
    contexts: list[Any] = []
    tabs: list[Tab] = []

    def new(*, of: Deployment | None = None, **options: Any) -> Tab:
        context = chromium.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
        context.set_default_timeout(_BROWSER_MS)
        contexts.append(context)
        tab = Tab(context.new_page(), f"http://127.0.0.1:{(of or demonstration).web_port}")
        tabs.append(tab)
        return tab

    yield new
    for context in contexts:
        context.close()
    assert [tab.complaints for tab in tabs if tab.complaints] == []
