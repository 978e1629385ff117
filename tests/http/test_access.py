"""Who may do what over HTTP: users of etc/users.yaml, made by `pinlater-admin user`."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
import time
from pathlib import Path

import pytest

from pinlaterd.access import Access, NotIdentified, Refusal, load_authorizer
from pinlaterd.config.password import hash_password
from pinlaterd.config.schema import UserSettings
from pinlaterd.config.ticket import accept_ticket, ticket_to_delete
from pinlaterd.errors import ConfigError
from tests.clocks import FakeClock
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.docs.pages import REPOSITORY, python_blocks
from tests.http.conftest import HttpClient, http_of, serving_http

SECRET = "correct horse"
PROXY_USER = "X-Forwarded-User"
LETTERS = {"name": "letters", "delivery_strategy": "at_least_once"}
CALLS = {
    "queues": ("GET", "/v2/queues", None),
    "queue": ("GET", "/v2/queues/mail", None),
    "create": ("PUT", "/v2/queues/mail", None),
    "delete": ("DELETE", "/v2/queues/gone", None),
    "enqueue": ("POST", "/v2/queues/mail/jobs", {"data": 1}),
    "page": ("GET", "/v2/queues/mail/jobs", None),
    "retry": ("POST", "/v2/queues/mail/retry", None),
    "delete jobs": ("POST", "/v2/queues/mail/delete", {"state": "failed"}),
    "pause": ("POST", "/v2/queues/mail/pause", None),
    "resume": ("POST", "/v2/queues/mail/resume", None),
    "claim": ("POST", "/v2/queues/mail/claims", None),
    "ack": ("POST", "/v2/jobs/acks", {"succeeded": [{"descriptor": "mail:s1:p1:1", "claim": "x"}]}),
    "checkpoint": (
        *("POST", "/v2/jobs/checkpoints"),
        {"checkpoints": [{"descriptor": "mail:s1:p1:1", "claim": "x"}]},
    ),
    "job": ("GET", "/v2/jobs/mail:s1:p1:1", None),
    "types": ("GET", "/v2/job-types", None),
    "type": ("GET", "/v2/job-types/letters", None),
    "change type": ("PATCH", "/v2/job-types/letters", {}),
    "create type": ("POST", "/v2/job-types", {**LETTERS, "attempts": 1, "concurrency": 1}),
    "description": ("GET", "/v2/openapi.json", None),
    "docs": ("GET", "/v2/docs", None),
}
VIEW = {"queues", "queue", "page", "job", "types", "type", "description", "docs"}
ALLOWED = {
    "view": VIEW,
    "enqueue": VIEW | {"enqueue"},
    "work": VIEW | {"claim", "ack", "checkpoint"},
    "operate": VIEW
    | {"create", "retry", "delete jobs", "pause", "resume", "change type", "create type"},
    "admin": set(CALLS),
    "elsewhere": {"queues", "types", "description", "docs"},  # admin of other queues
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("access")
    with serving_http(folder) as deployment:
        http_of(deployment).put("/v2/queues/mail")
        for role in ALLOWED:
            _add(deployment, role, "admin" if role == "elsewhere" else role)
        yield deployment


def _add(deployment: Deployment, name: str, role: str) -> None:
    queue = "other*" if name == "elsewhere" else "*"
    command = ("user", "add", name, "--role", role, "--queue", queue, "--password-stdin")
    deployment.admin(*command, stdin=SECRET)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("user", ALLOWED)
def test_a_user_may_do_what_its_role_says_and_nothing_else(guarded, user, call):
    api = http_of(guarded).as_user(user, SECRET)
    method, path, body = CALLS[call]

    answer = api.call(method, path, body)

    code = answer.body.get("code", answer.body.get("id")) if answer.status == 403 else ""
    refused = code in ("FORBIDDEN", "forbidden")
    assert refused == (call not in ALLOWED[user])


def test_every_call_is_among_these(guarded):
    paths = http_of(guarded).as_user("view", SECRET).get("/v2/openapi.json").body["paths"]
    described = {(method.upper(), path) for path, each in paths.items() for method in each}
    named = {"mail": "{queue}", "gone": "{queue}", "mail:s1:p1:1": "{descriptor}"}
    named["letters"] = "{name}"

    tried = {
        (method, "/".join(named.get(part, part) for part in path.split("/")))
        for method, path, _ in CALLS.values()
    }
    assert tried == described


@pytest.mark.parametrize("call", CALLS)
def test_every_call_needs_a_user(guarded, call):
    method, path, body = CALLS[call]

    answer = http_of(guarded).call(method, path, body)

    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"].startswith("Basic")


def test_an_admin_of_a_queue_deletes_it_without_the_password(guarded):
    api, other = http_of(guarded).as_user("elsewhere", SECRET), "/v2/queues/mail"
    made = api.put("/v2/queues/other_mail")
    answers = [api.delete("/v2/queues/other_mail") for _ in range(2)]
    refused = api.delete(other, headers={"X-Admin-Password": "ticket-" + "0" * 32})

    assert made.status == 201
    assert [answer.status for answer in answers] == [204, 404]
    assert (refused.status, refused.body["code"]) == (403, "FORBIDDEN")
    assert not list((guarded.folder / "run").glob("ticket-*"))


def test_the_home_page_names_the_queues_that_its_user_may_view(guarded):
    found = {
        user: http_of(guarded).as_user(user, SECRET).get("/").body.decode()
        for user in ("view", "elsewhere")
    }

    assert "mail" in found["view"]
    assert "Queues (0): <" in found["elsewhere"]
    assert all("Shards: 1 healthy" in page for page in found.values())


def test_a_ticket_deletes_one_queue_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    with ticket_to_delete("mail") as ticket, ticket_to_delete("mail") as misused:
        accepted = [accept_ticket(ticket, "mail") for _ in range(2)]
        accepted += [accept_ticket(misused, queue) for queue in ("news", "mail")]
    with ticket_to_delete("mail") as late:
        pass

    assert accepted == [True, False, False, False]
    assert not accept_ticket(late, "mail")
    assert not accept_ticket("../run", "mail")


def test_a_ticket_that_a_killed_process_has_left_is_refused_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    with ticket_to_delete("mail") as left:
        os.utime(Path("run") / left, (time.time() - 601,) * 2)

        assert not accept_ticket(left, "mail")
        assert not list(Path("run").iterdir())


def test_tickets_that_were_never_presented_go_when_another_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    with ticket_to_delete("mail") as left, ticket_to_delete("mail") as young:
        (Path("run") / left).rename(Path("run") / f".{left}.17.new")  # killed while it wrote
        of_shard = Path("run/shard-ticket-1.ipc")
        of_shard.touch()
        for path in (Path("run") / f".{left}.17.new", of_shard):
            os.utime(path, (time.time() - 601,) * 2)
        with ticket_to_delete("news") as ticket:
            names = {path.name for path in Path("run").iterdir()}
            assert names == {young, ticket, of_shard.name}


def test_a_token_is_shown_once_and_refused_once_its_user_is_removed(guarded, wait_until):
    token = guarded.admin("user", "add", "ci", "--role", "enqueue", "--token").splitlines()[-1]
    api = http_of(guarded).with_token(token)
    allowed = api.post("/v2/queues/mail/jobs", {"data": 1})
    kept = (guarded.folder / "etc/users.yaml").read_text()
    guarded.admin("user", "remove", "ci")

    wait_until(lambda: api.post("/v2/queues/mail/jobs", {"data": 1}).status == 401)
    assert allowed.status == 201
    assert token not in kept


def test_refusals_are_logged_without_the_credentials(guarded, wait_until: WaitUntil):
    http_of(guarded).as_user("view", "wrong password").get("/v2/queues")
    http_of(guarded).as_user("view", SECRET).post("/v2/queues/mail/claims")

    log_file = guarded.folder / "run/log/http.log"  # written by supervisord
    refused = [
        "refused: GET /v2/queues from 127.0.0.1 as 'view': wrong_password",
        "refused: POST /v2/queues/mail/claims from 127.0.0.1 as 'view': no role work",
    ]
    wait_until(lambda: all(line in log_file.read_text() for line in refused))
    log = log_file.read_text()
    assert "wrong password" not in log
    assert SECRET not in log


def test_a_password_is_what_bytes_it_is():
    user = UserSettings("ada", ("view",), password_hash=hash_password("p\udce9"))
    access = Access({"ada": user}, FakeClock())
    pair = base64.b64encode(b"ada:p\xe9").decode()

    assert asyncio.run(access.identify(f"Basic {pair}", "127.0.0.1")) == user


@pytest.mark.parametrize(("most_remembered", "is_served"), [(10, True), (0, False)])
def test_a_password_that_is_remembered_can_be_guessed_no_faster(most_remembered, is_served):
    """Credentials that were right from an address still work there after failures; those that must
    be checked do not."""
    user = UserSettings("ada", ("view",), password_hash=hash_password(SECRET))
    access = Access({"ada": user}, FakeClock(), most_remembered=most_remembered)

    async def identify(password: str, address: str) -> object:
        pair = base64.b64encode(f"ada:{password}".encode()).decode()
        try:
            return await access.identify(f"Basic {pair}", address)
        except NotIdentified as refused:
            return refused.why, refused.user

    async def guess() -> list[object]:
        await identify(SECRET, "here")
        for address in ("here", "elsewhere"):
            for _ in range(5):
                await identify("wrong", address)
        return [await identify(SECRET, address) for address in ("here", "elsewhere")]

    limited = (Refusal.TOO_MANY_FAILURES, "ada")
    assert asyncio.run(guess()) == [user if is_served else limited, limited]


def test_guessing_is_slowed_down(tmp_path: Path):
    with serving_http(tmp_path / "d") as deployment:
        _add(deployment, "ada", "admin")
        api = http_of(deployment)
        guesses = [api.as_user("ada", f"guess {n}").get("/v2/queues").status for n in range(7)]
        right = api.as_user("ada", SECRET).get("/v2/queues")

    assert guesses == [401] * 5 + [429] * 2
    assert right.status == 429
    assert int(right.headers["Retry-After"]) > 0


def test_a_function_of_ones_own_says_who_makes_a_request(tmp_path: Path, wait_until: WaitUntil):
    """The example of docs/http.md."""
    [program] = python_blocks((REPOSITORY / "docs/http.md").read_text("utf-8"))
    deployment = Deployment(tmp_path / "d")
    deployment.init(
        http=True, settings={"http_authorizer": "proxy:authorize", "http_host": "0.0.0.0"}
    )
    (deployment.folder / "etc/proxy.py").write_text(program)
    with deployment.running():
        anybody, ada = http_of(deployment), HttpClient(deployment.http_port, {PROXY_USER: "ada"})
        nobody = anybody.put("/v2/queues/mail")
        with deployment.client() as client:
            client.create_queue("mail")
        allowed = ada.post("/v2/queues/mail/jobs", {"data": 1})
        forbidden = ada.post("/v2/queues/mail/claims")
        log = deployment.folder / "run/log/http.log"
        wait_until(lambda: "/claims from 127.0.0.1 as 'ada': no role work" in log.read_text())

    assert [answer.status for answer in (nobody, allowed, forbidden)] == [401, 201, 403]


_FAULTY = """
import asyncio
from pinlaterd.config.schema import UserSettings

class NoException(BaseException):
    pass

FAULTS = {"exit": SystemExit(1), "own": NoException(), "cancelled": asyncio.CancelledError()}

async def authorize(headers, address):
    fault = headers.get("X-Fault")
    if fault in FAULTS:
        raise FAULTS[fault]
    return fault or UserSettings("ada", roles=("view",))
"""


def test_an_authorizer_that_fails_costs_its_request_alone(tmp_path: Path, wait_until: WaitUntil):
    deployment = Deployment(tmp_path / "d")
    deployment.init(http=True, settings={"http_authorizer": "faulty:authorize"})
    (deployment.folder / "etc/faulty.py").write_text(_FAULTY)
    log = deployment.folder / "run/log/http.log"
    with deployment.running():
        for fault in ("exit", "own", "cancelled", "no UserSettings"):
            asker = HttpClient(deployment.http_port, {"X-Fault": fault})
            answers = asker.get("/v2/queues"), asker.get("/v1/archived-jobs")
            assert [answer.status for answer in answers] == [500, 500]
        served = http_of(deployment).get("/v2/queues")
        wait_until(lambda: log.read_text().count("http_authorizer failed; the request from") == 8)

    assert served.status == 200
    assert log.read_text().count("serving HTTP on") == 1


@pytest.mark.parametrize("source", ["def authorize(:", "raise SystemExit(0)", "raise ValueError"])
def test_a_module_of_an_authorizer_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = tmp_path.name  # which no other test's module has
    (tmp_path / f"{name}.py").write_text(source)
    with pytest.raises(ConfigError, match=f"http_authorizer: {name}:authorize: [A-Z]"):
        load_authorizer(f"{name}:authorize", tmp_path)


def test_users_is_a_file_for_its_owner_only(guarded):
    assert (guarded.folder / "etc/users.yaml").stat().st_mode & 0o777 == 0o600


def test_mistakes_in_users_are_named_with_their_place(guarded, tmp_path: Path):
    from pinlaterd.config.load import load_config
    from pinlaterd.deployment.files import write_deployment
    from pinlaterd.errors import ConfigError

    write_deployment(tmp_path, "sqlite", 1, {})
    users = tmp_path / "etc/users.yaml"
    users.write_text(
        "users:\n"
        "  ada: {roles: [boss], password_hash: secret}\n"
        "  b b: {roles: [view], tokens: [{sha256: xyz}]}\n"
        "  eve: {roles: [view]}\n"
        "  jim: {roles: [view], tokens: [{sha256: xyz, expires: soon}]}\n"
    )
    with pytest.raises(ConfigError) as raised:
        load_config(tmp_path / "etc")

    text = str(raised.value)
    assert f"{users}:2: users.ada.roles.0: unknown role 'boss'; choose from view" in text
    assert f"{users}:2: users.ada.password_hash: not a hash" in text
    assert f"{users}:3: users.b b: 'b b' is not valid" in text
    assert f"{users}:4: users.eve.password_hash: missing, and so are tokens" in text
    assert f"{users}:5: users.jim.tokens.0.sha256" in text
    assert f"{users}:5: users.jim.tokens.0.expires: expected a time" in text
    assert "secret" not in text
