"""Job types over Rickover's interface: what its clients send, and what they compare in answers."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest

from pinlaterd.config import edit
from pinlaterd.config.layout import BASE_FILE, replace_file
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import JobType, queue_of_type
from pinlaterd.deployment.files import write_deployment
from pinlaterd.http.job_types import JobTypes
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.http.conftest import HttpClient, http_of, serving_http
from tests.web.conftest import Visitor

SECRET = "hymanrickover"
_numbers = count(1)


def a_type(**given: object) -> dict[str, object]:
    name = f"type-{next(_numbers)}"
    least_once = {"delivery_strategy": "at_least_once", "attempts": 7, "concurrency": 3}
    return {"name": name, **least_once, **given}


def error(answer) -> tuple[int, str]:
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert answer.body["title"]
    return answer.status, answer.body["id"]


def test_a_job_type_is_created_shown_and_listed_newest_first(api):
    older, newer = a_type(), a_type(name=f"any Text/{next(_numbers)} é😀\x01", attempts=2)
    made = [api.post("/v1/jobs", older), api.post("/v2/job-types", newer)]

    assert [answer.status for answer in made] == [201, 201]
    assert {**older, "created_at": made[0].body["created_at"]} == made[0].body
    assert made[0].body["created_at"].endswith("Z")
    for path in ("/v1/jobs/", "/v2/job-types/", "/rickover/v2/job-types/"):
        shown = api.get(path + str(older["name"]))
        assert (shown.status, shown.body) == (200, made[0].body)
    for path in ("/v2/job-types", "/rickover/v2/job-types"):
        assert api.get(path).body[:2] == [made[1].body, made[0].body]


def test_answers_have_rickovers_headers(api):
    for answer in (api.get("/v2/job-types"), api.get("/v1/nothing")):
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert answer.headers["Server"].startswith("pinlaterd/")
        assert "max-age=31536000" in answer.headers["Strict-Transport-Security"]


@pytest.mark.parametrize(
    ("body", "id_", "has_instance"),
    [
        (b"", "invalid_request", False),
        (b"[]", "invalid_request", False),
        (b"null", "invalid_request", False),
        (b'{"name": 3}', "invalid_request", False),
        (a_type(attempts=1.5), "invalid_request", False),
        (a_type(attempts=40000), "invalid_request", False),
        (a_type(concurrency="3"), "invalid_request", False),
        ({}, "missing_parameter", True),
        (a_type(name=""), "missing_parameter", True),
        ({"name": "meta.shutdown"}, "forbidden_parameter", False),
        (a_type(delivery_strategy=None), "missing_parameter", True),
        (a_type(delivery_strategy="once"), "invalid_delivery_strategy", True),
        (a_type(delivery_strategy="at_most_once", attempts=2), "invalid_attempts", True),
        (a_type(attempts=0), "invalid_parameter", True),
        (a_type(attempts=-1, concurrency=0), "invalid_parameter", True),
        (a_type(concurrency=-3), "invalid_parameter", True),
        (a_type(name="n" * 201), "invalid_parameter", True),
    ],
)
def test_a_mistake_in_a_job_type_has_rickovers_id(api, body, id_, has_instance):
    answer = api.post("/v1/jobs", body)

    assert error(answer) == (400, id_)
    assert answer.body["status"] == 400
    assert answer.body.get("instance") == ("/v1/jobs" if has_instance else None)


def test_a_body_is_read_as_leniently_as_rickover_reads_it(api):
    wanted = a_type()
    text = json.dumps({key.upper(): value for key, value in wanted.items()} | {"id": 7})

    answer = api.post("/v1/jobs", f" {text} and more".encode())

    assert answer.status == 201
    assert answer.body["name"] == wanted["name"]


def test_a_name_that_exists_is_refused_with_equal_fields_too(api):
    wanted = a_type()
    api.post("/v1/jobs", wanted)

    answer = api.post("/v1/jobs", wanted)

    assert error(answer) == (400, "invalid_parameter")
    assert answer.body["instance"] == "/v1/jobs"


def test_of_creators_at_the_same_time_one_succeeds(api):
    bodies = [a_type(name="raced", attempts=attempts) for attempts in range(1, 5)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda body: api.post("/v1/jobs", body), bodies))

    [made] = [answer.body for answer in answers if answer.status == 201]
    assert sorted(answer.status for answer in answers) == [201, 400, 400, 400]
    assert api.get("/v1/jobs/raced").body == made


def test_a_command_adds_one_with_all_its_settings(api, http_service: Deployment):
    for name, given in (("usual", ()), ("archived", ("--archive-hours", "0.5"))):
        http_service.admin("job-type", "add", name, *given)

    listed = json.loads(http_service.admin("job-type", "list", "--json"))
    assert {row["archive_hours"] for row in listed if row["name"] == "archived"} == {0.5}
    assert {row["archive_hours"] for row in listed if row["name"] == "usual"} == {4320}
    text = (http_service.folder / "etc/job_types.yaml").read_text()
    assert text.count("archive_hours") == 1


def test_names_that_look_alike_have_queues_of_their_own(api, http_service: Deployment):
    names = ["a-x", "a_x", "a.x", "a-X"]
    for name in names:
        assert api.post("/v1/jobs", a_type(name=name)).status == 201

    listed = json.loads(http_service.admin("job-type", "list", "--json"))
    queues = {row["queue"] for row in listed if row["name"] in names}
    known = {queue["name"] for queue in api.get("/v2/queues").body["queues"]}
    assert len(queues) == 4
    assert queues <= known


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/v1", (404, "not_found")),
        ("GET", "/v1/nothing", (404, "not_found")),
        ("GET", "/v1/../v2/queues", (404, "not_found")),
        ("GET", "/v1%2Fjobs", (404, "not_found")),
        ("GET", "/v1/jobs%0A", (404, "not_found")),
        ("GET", "/v1/jobs/", (404, "not_found")),
        ("GET", "/v1/jobs/type-that-is-not-there", (404, "not_found")),
        ("GET", "/v1/jobs/with%20space", (404, "not_found")),
        ("GET", "/v1/jobs/with%2Fslash", (404, "not_found")),
        ("GET", "/v2/job-types/none", (404, "not_found")),
        ("GET", "/rickover/v2/nothing", (404, "not_found")),
        ("GET", "/v2/job-types/", (404, "not_found")),
        ("GET", "/v1/jobs", (405, "method_not_allowed")),
        ("DELETE", "/v1/jobs/x", (405, "method_not_allowed")),
        ("DELETE", "/v2/job-types", (405, "method_not_allowed")),
    ],
)
def test_what_is_not_there_is_told_as_by_rickover(api, method, path, expected):
    answer = api.call(method, path)

    assert error(answer) == expected
    assert answer.body["status"] == expected[0]
    assert answer.body["instance"].startswith("/")
    assert "Allow" not in answer.headers


def test_the_numbers_of_a_type_can_be_changed(api):
    wanted = a_type()
    made = api.post("/v1/jobs", wanted).body
    path = f"/v1/jobs/{wanted['name']}"

    answers = [
        api.call("PATCH", path, {"concurrency": 9}),
        api.call("PATCH", f"/v2/job-types/{wanted['name']}", {"attempts": 2}),
        api.call("PATCH", path, {}),
    ]

    assert [answer.status for answer in answers] == [200] * 3
    assert answers[-1].body == {**made, "concurrency": 9, "attempts": 2} == api.get(path).body
    assert error(api.call("PATCH", path, {"attempts": -1})) == (400, "invalid_parameter")
    assert error(api.call("PATCH", "/v1/jobs/no-such-type", {})) == (404, "not_found")


def test_options_names_the_methods(api):
    answer = api.call("OPTIONS", "/v1/jobs")

    assert answer.status == 200
    assert set(answer.headers["Allow"].split(", ")) == {"POST", "OPTIONS"}


def test_a_proxy_that_took_plain_http_is_refused(api):
    answer = api.call("GET", "/v1/nothing", headers={"X-Forwarded-Proto": "http"})
    passed = api.call("GET", "/v2/job-types", headers={"X-Forwarded-Proto": "https"})

    assert error(answer) == (403, "insecure_request")
    assert passed.status == 200


# --- who calls ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory):
    with serving_http(tmp_path_factory.mktemp("v1")) as deployment:
        for name, role in (("test", "admin"), ("viewer", "view")):
            command = ("user", "add", name, "--role", role, "--password-stdin")
            deployment.admin(*command, stdin=SECRET)
        yield deployment


def test_credentials_are_refused_with_rickovers_ids(guarded):
    api, path = http_of(guarded), "/v2/job-types"
    answers = {
        "nothing": api.get(path),
        "malformed": HttpClient(api.port, {"Authorization": "Basic !"}).get(path),
        "no name": api.as_user("", SECRET).get(path),
        "unknown": api.as_user("nobody", SECRET).get(path),
        "wrong": api.as_user("test", "guess").get(path),
        "no role": api.as_user("viewer", SECRET).post("/v1/jobs", a_type()),
    }

    assert {name: error(answer) for name, answer in answers.items()} == {
        "nothing": (401, "unauthorized"),
        "malformed": (401, "unauthorized"),
        "no name": (401, "missing_authentication"),
        "unknown": (403, "forbidden"),
        "wrong": (403, "incorrect_password"),
        "no role": (403, "forbidden"),
    }
    for name, answer in answers.items():
        is_challenged = answer.status == 401
        challenge = 'Basic realm="rickover"' if is_challenged else None
        assert answer.headers.get("WWW-Authenticate") == challenge, name
        assert ("instance" in answer.body, "status" in answer.body) == 2 * (is_challenged,), name
    assert "test" in answers["wrong"].body["title"]
    assert api.as_user("test", SECRET).post("/v1/jobs", a_type()).status == 201


def test_a_path_is_refused_before_the_caller_on_v1_only(guarded):
    api = http_of(guarded)

    assert error(api.get("/v1/nothing")) == (404, "not_found")
    assert error(api.get("/v1/jobs")) == (405, "method_not_allowed")
    assert error(api.get("/rickover/v2/nothing")) == (401, "unauthorized")
    assert error(api.get("/v2/job-types/a/b")) == (401, "unauthorized")
    assert error(api.call("DELETE", "/v2/job-types")) == (401, "unauthorized")
    assert api.call("OPTIONS", "/v1/jobs").status == 200


def test_a_user_of_some_types_reaches_no_job_of_others(guarded, wait_until: WaitUntil):
    api = http_of(guarded).as_user("test", SECRET)
    for name in ("mine", "theirs"):
        assert api.post("/v1/jobs", a_type(name=name)).status == 201
    roles = [part for role in ("enqueue", "work") for part in ("--role", role)]
    guarded.admin(
        "user", "add", "eve", *roles, "--queue", "mine*", "--password-stdin", stdin=SECRET
    )
    theirs, job_id = "/v1/jobs/theirs", f"job_{uuid.uuid4()}"
    assert api.put(f"{theirs}/{job_id}", {"data": 1}).status == 202
    eve, report = http_of(guarded).as_user("eve", SECRET), {"status": "failed", "attempt": 7}

    guarded.admin(
        *("user", "add", "operator", "--role", "operate", "--queue", "mine*", "--password-stdin"),
        stdin=SECRET,
    )
    operator = http_of(guarded).as_user("operator", SECRET)

    refused = [
        operator.post("/v1/jobs", a_type(name="theirs too")),
        operator.post("/v1/jobs", a_type(name="theirs")),
        operator.post("/v2/job-types", a_type(name="theirs too")),
        eve.get(theirs),
        eve.get(f"/v1/jobs/{job_id}"),
        eve.get(f"/v1/jobs/mine/{job_id}"),
        eve.put(f"/v1/jobs/mine/{job_id}", {"data": 2}),
        eve.put(f"{theirs}/random_id", {"data": 2}),
        eve.post(f"/v1/jobs/mine/{job_id}", report),
        eve.post(f"/v1/jobs/{job_id}/replay"),
    ]

    assert [error(answer) for answer in refused] == [(403, "forbidden")] * len(refused)
    assert operator.post("/v1/jobs", a_type(name="mine too")).status == 201
    log, line = guarded.folder / "run/log/http.log", f"POST /v1/jobs/mine/{job_id} from 127.0.0.1"
    wait_until(lambda: f"refused: {line} as 'eve': no role work" in log.read_text())
    assert [one["name"] for one in eve.get("/v2/job-types").body] == ["mine too", "mine"]
    assert eve.get("/v1/archived-jobs").body == []
    mine = eve.put("/v1/jobs/mine/random_id", {"data": 2}).body["id"]
    assert eve.post(f"/v1/jobs/mine/{mine}", report).status == 200
    assert api.get(f"{theirs}/{job_id}").body["attempts"] == 7


# --- by hand --------------------------------------------------------------------------------


def test_commands_and_the_interface_know_the_same_job_types(api, http_service: Deployment):
    http_service.admin("job-type", "add", "by hand", "--attempts", "4")
    http_service.admin("job-type", "set", "by hand", "--concurrency", "9", "--archive-hours", "1")
    found = {one["name"]: one for one in api.get("/v2/job-types").body}["by hand"]
    http_service.admin("job-type", "remove", "by hand")

    assert (found["attempts"], found["concurrency"]) == (4, 9)
    assert "by hand" not in {one["name"] for one in api.get("/v2/job-types").body}


def test_a_job_type_outlasts_a_restart(tmp_path):
    with serving_http(tmp_path / "d") as deployment:
        made = http_of(deployment).post("/v1/jobs", a_type(name="kept")).body
        deployment.down()
        deployment.up()

        assert http_of(deployment).get("/v1/jobs/kept").body == made


def test_the_environment_gives_the_home_page_and_logs_what_is_said(tmp_path, wait_until: WaitUntil):
    environment = {
        "HOMEPAGE_TITLE": "Jobs & more",
        "HOMEPAGE_IFRAME_URL": 'https://example.com/?a=1&b="',
        "ALLOW_UNENCRYPTED_PROXY_TRAFFIC": "true",
        "DEBUG_HTTP_TRAFFIC": "true",
    }
    deployment = Deployment(tmp_path / "d", environment=environment)
    deployment.init(http=True, web=True)
    with deployment.running():
        api = http_of(deployment).as_user("ada", SECRET)
        answer = api.call("GET", "/", headers={"X-Forwarded-Proto": "http"})
        system = Visitor(deployment.web_port).get("/system")
        api.get("/v1/nothing?a=1")
        api.put("/v2/queues/of_home")
        home = api.get("/").body.decode()
        secret = {"X-Admin-Password": "open sesame"}
        api.call("POST", "/v1/jobs", b'{"name": "logged"}', headers=secret)
        log_file = deployment.folder / "run/log/http.log"  # written by supervisord
        logged = 'b\'{"name": "logged"}\': answered 400 b\''
        wait_until(lambda: logged in log_file.read_text())
        log = log_file.read_text()

    page = answer.body.decode()
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "<title>Jobs &amp; more</title>" in page
    assert "GET /v1/nothing?a=1 " in log
    assert "Basic " not in log
    assert "open sesame" not in log
    for line in ("Service: healthy", "Shards: 1 healthy", "http serving", "of_home"):
        assert line in home
    assert 'src="https://example.com/?a=1&amp;b=&quot;"' in page
    assert '<iframe src="https://example.com/?a=1&amp;b=&#34;"' in system.body
    assert system.headers["Content-Security-Policy"].endswith("; frame-src https://example.com")


# --- several servers ------------------------------------------------------------------------


def made_type(name: str, attempts: int = 1) -> JobType:
    now = datetime.now(UTC)
    return JobType(name, queue_of_type(name), now, "at_least_once", attempts, 1)


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    write_deployment(tmp_path, "sqlite", 1, {})
    return tmp_path / "etc"


@pytest.mark.parametrize("name", ["mine", "theirs"])
def test_an_edit_that_came_second_is_made_again_unless_the_name_is_taken(etc: Path, name: str):
    """As the coordinator of a cluster does it: the accepted file replaces ours."""
    path, theirs = etc / "job_types.yaml", made_type("theirs", attempts=5)
    mine = made_type(name)
    (etc / "cluster.key").touch(0o600)
    cluster = "cluster: c\nserver: jobs-1\nzookeeper: zk:2181\npeer_host: jobs-1\n"
    (etc / "local.yaml").write_text(cluster)
    (etc / "shards.yaml").write_text("shards: {1: {server: jobs-1}}\n")

    def accept(files: dict[str, str]) -> None:
        replace_file(etc.parent / BASE_FILE, json.dumps({"files": files}).encode())

    async def create() -> bool:
        types = JobTypes(etc, load_config(etc))
        creating = asyncio.create_task(types.create(mine, seconds=60))
        while not path.exists():  # until its edit is written
            assert not creating.done(), creating
            await asyncio.sleep(0.01)
        base, ours = b"", path.read_bytes()
        path.unlink()
        edit.add_job_type(etc, theirs)
        accepted = path.read_bytes()
        path.write_bytes(ours)
        edit.take_over(etc, path.name, base, accepted)
        accept({path.name: accepted.decode()})
        types.follow(load_config(etc))
        until = time.monotonic() + 30
        while name == "mine" and mine not in load_config(etc).job_types.values():
            assert time.monotonic() < until
            await asyncio.sleep(0.01)
        accept({path.name: path.read_text()})
        types.follow(load_config(etc))
        return await creating

    assert asyncio.run(create()) is (name == "mine")
    expected = [theirs, mine] if name == "mine" else [theirs]
    assert list(load_config(etc).job_types.values()) == expected
    assert not list(etc.glob("*yours*"))
