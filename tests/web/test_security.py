"""Who is let in, and what is refused, with a line in the log."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest
from aiohttp.test_utils import make_mocked_request

from pinlaterd.client import JobState
from pinlaterd.config.load import load_config
from pinlaterd.deployment.files import write_deployment
from pinlaterd.errors import ConfigError
from pinlaterd.web.refusals import problem_of
from tests.deployment import Deployment
from tests.web.conftest import PageAnswer, Visitor, serving_web, wait_until_answering

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
SECRET = "correct horse"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A dashboard that has users."""
    with serving_web(tmp_path_factory.mktemp("guarded")) as deployment:
        with deployment.client() as client:
            client.create_queue("mail")
            client.create_queue("pay")
        for name, role, queue in (("ada", "operate", "*"), ("vera", "view", "ma*")):
            command = ("user", "add", name, "--role", role, "--queue", queue, "--password-stdin")
            deployment.admin(*command, stdin=SECRET)
        yield deployment


def log_in(deployment: Deployment, name: str, password: str = SECRET) -> tuple[Visitor, PageAnswer]:
    visitor = Visitor(deployment.web_port)
    visitor.get("/login")
    return visitor, visitor.post("/login", {"user": name, "password": password, "next": "/"})


def log_of(deployment: Deployment) -> str:
    return (deployment.folder / "run/log/web.log").read_text()


@pytest.mark.parametrize("path", ["/", "/login", "/nothing", "/q/nothing", "/live?of=nothing_here"])
def test_every_answer_has_the_headers_that_protect_it(visitor, path):
    answer = visitor.get(path)

    assert answer.headers["Content-Security-Policy"] == CSP
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Cache-Control"] == "no-store"


def test_files_have_urls_that_change_with_them_and_may_be_kept(visitor):
    page = visitor.get("/").body
    url = page.partition('<link rel="stylesheet" href="')[2].partition('"')[0]

    assert "immutable" in visitor.get(url).headers["Cache-Control"]
    assert visitor.get("/static/style.css").status == 404
    assert visitor.get("/static/..%2fmain.py").status == 404


@pytest.mark.parametrize(("takes", "sent"), [("gzip", "gzip"), ("gzip;q=0", None)])
def test_a_page_is_compressed_for_those_who_take_it(visitor, takes, sent):
    answer = visitor.get("/", headers={"Accept-Encoding": takes})

    assert answer.headers.get("Content-Encoding") == sent


def test_a_host_that_is_not_ours_is_refused(dashboard, visitor, wait_until):
    answer = visitor.get("/", headers={"Host": "evil.example.com"})

    assert answer.status == 421
    assert "http_hosts" in answer.text
    wait_until(lambda: "no name 'evil.example.com'" in log_of(dashboard))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "same-origin"}, 303),
        ({"Origin": "http://127.0.0.1:{port}"}, 303),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "https://127.0.0.1:{port}"}, 403),
        ({}, 403),
    ],
)
def test_only_a_page_of_ours_may_post(dashboard, visitor, headers, status):
    visitor.get("/")
    sent = {name: value.format(port=dashboard.web_port) for name, value in headers.items()}

    answer = visitor.post("/preferences", {"theme": "dark"}, headers=sent)

    assert answer.status == status


def test_a_form_of_another_session_is_refused(visitor, dashboard):
    visitor.get("/")
    other = Visitor(dashboard.web_port)
    other.get("/")
    other.cookies = visitor.cookies

    assert other.post("/preferences", {"theme": "dark"}).status == 403
    assert visitor.post("/preferences", {"theme": "dark"}).status == 303
    assert 'data-theme="dark"' in visitor.get("/").body


def test_the_next_page_is_never_on_another_site(visitor):
    for path in ("//evil.example.com", "https://evil.example.com", "/\\evil.example.com", "x"):
        visitor.get("/")
        answer = visitor.post("/preferences", {"theme": "light", "next": path})
        assert answer.headers["Location"] == "/"


def test_a_form_that_is_too_long_is_refused_before_it_is_read(visitor):
    visitor.get("/")

    assert visitor.post("/login", {"user": "a" * 300_000}).status == 413


def test_a_mistake_in_files_and_a_full_disk_are_no_defects(visitor):
    full = OSError(errno.ENOSPC, "no space")
    problem = problem_of(make_mocked_request("POST", "/mend"), full, None)

    assert (problem.status, problem.what) == (507, "The disk is full.")
    page = visitor.get("/mend?action=dequeue_only&shard=nowhere")
    assert (page.status, "there is no shard nowhere" in page.text) == (409, True)


def test_with_users_every_page_leads_to_the_login(guarded):
    visitor = Visitor(guarded.web_port)

    answer = visitor.get("/q/mail?x=1&y=2")

    assert answer.headers["Location"] == "/login?next=/q/mail?x%3D1%26y%3D2"
    assert "pinlater-admin user add" in visitor.follow(answer).text


def test_a_login_is_a_cookie_that_scripts_and_other_sites_do_not_get(guarded, wait_until):
    visitor, answer = log_in(guarded, "ada")

    assert answer.status == 303
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    page = visitor.follow(answer)
    assert page.status == 200
    assert "ada log out" in page.text
    [secret] = [one.value for one in visitor.cookies.values()]
    assert secret not in (guarded.folder / "data/web_sessions.json").read_text()

    guarded.kill("web")
    wait_until_answering(guarded, wait_until)
    assert visitor.get("/").status == 200
    assert visitor.post("/logout", {}).status == 303
    assert visitor.get("/").status == 303


def test_a_wrong_password_is_refused_and_logged_without_it(guarded, wait_until):
    known, unknown = (log_in(guarded, name, "wrong one")[1] for name in ("ada", "nobody"))

    assert known.status == unknown.status == 403
    assert "wrong" in known.text
    assert 'name="user" value="ada"' in known.body
    assert known.text.replace("ada", "") == unknown.text.replace("nobody", "")
    wait_until(lambda: "refused: login from 127.0.0.1 as 'ada': wrong_password" in log_of(guarded))
    assert "wrong one" not in log_of(guarded)


def test_a_user_sees_its_own_queues_only(guarded, wait_until):
    visitor, _ = log_in(guarded, "vera")

    wait_until(lambda: "mail" in visitor.get("/").text)
    assert "pay" not in visitor.get("/").text
    assert visitor.get("/q/mail").status == 200
    refused = visitor.get("/q/pay")
    assert refused.status == 403
    assert "you have no role view for queue pay" in refused.text
    wait_until(
        lambda: (
            "refused: GET /q/pay from 127.0.0.1 as 'vera': you have no role view" in log_of(guarded)
        )
    )


def test_who_may_only_look_mends_nothing(guarded):
    with guarded.client() as client:
        client.enqueue("mail", [b"x"])
    path = "/mend?action=delete&queue=mail&state=pending"
    viewer, operator = log_in(guarded, "vera")[0], log_in(guarded, "ada")[0]
    form = {"action": "delete", "queue": "mail", "state": "pending", "nonce": "n", "mode": "all"}
    assert viewer.get(path).status == operator.get(path).status == 200
    said = "Nothing can be changed here: web_writes: true in etc/pinlaterd.yaml allows it"
    assert operator.get("/audit").text.count(said) == 2  # on the page, and with its keys

    refused = viewer.post("/mend", form)
    foreign = operator.post("/mend", form, {"Sec-Fetch-Site": "cross-site"})
    switched_off = operator.post("/mend", form)

    assert [each.status for each in (refused, foreign, switched_off)] == [403] * 3
    assert "no role operate" in refused.text
    assert "<code>web_writes: true</code>" in switched_off.body
    with guarded.client() as client:
        assert client.count("mail", JobState.PENDING) == 1


def test_rights_that_are_taken_away_hold_no_longer(guarded, wait_until):
    guarded.admin("user", "add", "eve", "--role", "view", "--password-stdin", stdin=SECRET)

    def logged_in() -> Visitor | None:
        visitor, answer = log_in(guarded, "eve")
        return visitor if answer.status == 303 else None

    wait_until(logged_in)
    visitor = logged_in()
    assert visitor is not None
    assert visitor.get("/").status == 200
    guarded.admin("user", "remove", "eve")
    wait_until(lambda: visitor.get("/").status == 303)


def test_another_address_needs_users(tmp_path):
    write_deployment(tmp_path, "sqlite", 1, {})
    file = tmp_path / "etc/pinlaterd.yaml"
    file.write_text("web_host: 0.0.0.0\ninsecure: true\nhttp_port: 0\n")

    with pytest.raises(ConfigError, match=r"web_host: '0\.0\.0\.0' reaches beyond this machine"):
        load_config(tmp_path / "etc")
