"""What users with some of the rights see of jobs, and what they may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.deployment import MOST_PATIENT, Deployment
from tests.web.conftest import PageAnswer, Visitor
from tests.web.failing import fail
from tests.web.test_live import stream

pytestmark = pytest.mark.service

PASSWORD = "correct horse"
HIDDEN = "a" * 250


class Bounded(NamedTuple):
    """A dashboard with an operator of all queues, and two of `mail` but not of `pay`, who see no
    secrets, and one who does; each of the queues has a job that failed."""

    deployment: Deployment
    mail: str
    pay: str

    def log_in(self, name: str) -> Visitor:
        visitor = Visitor(self.deployment.web_port)
        visitor.get("/login")
        fields = {"user": name, "password": PASSWORD, "next": "/audit"}
        visitor.follow(visitor.post("/login", fields))
        return visitor


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bounded]:
    deployment = Deployment(tmp_path_factory.mktemp("bounded"))
    settings = {**MOST_PATIENT, "web_writes": True, "web_redact": "secret[a-z]*"}
    deployment.init(settings=settings, web=True)
    for name, role, queue in (
        ("ada", "operate", "*"),
        ("olga", "operate", "ma*"),
        ("ned", "operate", "[!p]*"),
        ("bea", "bodies", "*"),
    ):
        command = ("user", "add", name, "--role", role, "--queue", queue, "--password-stdin")
        deployment.admin(*command, stdin=PASSWORD)
    with deployment.running():
        with deployment.client("mailer:web3") as client:
            [mail] = fail(client, "mail", [f"ValueError: secret{HIDDEN} (a.py:1 in b)"])
            [pay] = fail(client, "pay", ["paid by bobolink"])
        yield Bounded(deployment, mail, pay)


@pytest.fixture
def olga(bounded: Bounded) -> Visitor:
    return bounded.log_in("olga")


def test_jobs_of_another_queue_are_neither_shown_nor_kept(bounded, olga):
    chosen = {"queue": "mail", "state": "failed", "descriptor": bounded.pay}
    preview = olga.get(f"/mend?action=delete&queue=mail&descriptor={bounded.pay}")
    form = {"action": "delete", "nonce": "n", "mode": "all", "before": "4102444800000", **chosen}

    assert (preview.status, "bobolink" in preview.text) == (400, False)
    assert olga.post("/mend", form).status == 400
    assert not (bounded.deployment.folder / "data/trash").exists()


@pytest.mark.parametrize("search", ["body=x", "status=secret.*"])
def test_what_is_hidden_is_not_searched_for_by_a_preview(olga, search):
    assert olga.get(f"/mend?action=retry&queue=mail&{search}").status == 403
    assert olga.get("/mend?action=retry&queue=mail").status == 200


@pytest.mark.parametrize(
    "path", ["/j/{}", "/mend?queue=mail&descriptor={}", "/failures?queue=mail"]
)
def test_what_is_hidden_is_in_no_part_of_a_page(bounded, olga, path):
    page = olga.get(path.format(bounded.mail))

    assert (page.status, "[redacted]" in page.text) == (200, True)
    assert HIDDEN[:40] not in page.body


@pytest.mark.parametrize(
    ("says", "seen", "shown"),
    [
        ("no secretkey\u202e\0", "no secretkey\\u202e\\u0000", "no [redacted]\\u202e\\u0000"),
        # The pattern would leave the end of what the message has of it.
        ("no secretkey7key", "no secretkey#key", "[redacted]"),
    ],
)
def test_a_verdict_says_what_its_viewer_may_see(
    bounded, olga, wait_until, load_until, says, seen, shown
):
    bea = bounded.log_in("bea")

    def is_redacted(page: PageAnswer) -> bool:
        assert not any(hidden in page.body for hidden in ("key#", "secret", "\u202e"))
        return shown in page.text

    def is_said() -> bool:
        with bounded.deployment.client("mailer:web3") as client:
            fail(client, "mail", [says] * 5)
        return seen in bea.get("/").text and is_redacted(olga.get("/"))

    wait_until(is_said)
    for path in ("/", "/q/mail", "/failures"):
        load_until(olga, path, is_redacted)
        whole = load_until(bea, path, lambda page: seen in page.text)
        assert "\u202e" not in whole.body
    for of in ("overview", "queue&name=mail"):
        # Viewers who see more have a channel of their own.
        with (
            stream(bounded.deployment, of, bea) as all_of_it,
            stream(bounded.deployment, of, olga) as part,
        ):
            all_of_it.until("mail detail", seen)
            part.until("mail detail", shown, hidden="secret")


@pytest.mark.parametrize("name", ["olga", "ned"])
def test_a_shard_is_switched_by_those_only_who_may_operate_all_queues(bounded, name, wait_until):
    form = {"action": "dequeue_only", "name": "1", "value": "on", "typed": "1", "nonce": name}
    shards = bounded.deployment.folder / "etc/shards.yaml"

    def is_followed(*, dequeue_only: bool) -> bool:
        status = bounded.deployment.status()
        routers = {one["config_version"] for one in status["processes"] if one["name"] == "router"}
        switched = [shard["dequeue_only"] for shard in status["shards"]]
        return (switched, routers) == ([dequeue_only], {status["config_version"]})

    assert bounded.log_in(name).post("/mend", form).status == 403
    assert "dequeue_only: true" not in shards.read_text()
    ada = bounded.log_in("ada")
    assert ada.post("/mend", form).status == 303
    assert "dequeue_only: true" in shards.read_text()
    wait_until(lambda: is_followed(dequeue_only=True))
    assert ada.post("/mend", {**form, "value": "off", "nonce": f"{name} off"}).status == 303
    wait_until(lambda: is_followed(dequeue_only=False))  # other tests enqueue jobs


@pytest.mark.parametrize(
    ("name", "path", "offer", "needed"),
    [
        ("bea", "/q/till?state=failed", "Retry failed", "for till"),
        ("bea", "/j/{job}", "Retry…", "for till"),
        ("bea", "/failures?queue=till", "Retry…", "for till"),
        ("olga", "/system", "Take no jobs", "for all queues"),
    ],
)
def test_a_page_offers_what_its_user_may_do(bounded, name, path, offer, needed, load_until):
    may, may_not = bounded.log_in("ada"), bounded.log_in(name)
    with bounded.deployment.client("mailer:web3") as client:
        [job] = fail(client, "till", ["paid by eve"])
    path = path.format(job=job)
    said = f"Nothing can be changed here: the role operate {needed} allows it"

    def has(page: PageAnswer, text: str, *, hidden: str) -> bool:
        assert hidden not in page.text
        return text in page.text

    load_until(may, path, lambda page: has(page, offer, hidden=said))  # the queue is new
    load_until(may_not, path, lambda page: has(page, said, hidden=offer))


def test_who_may_only_look_at_a_change_can_not_undo_it(bounded, wait_until):
    ada, bea = bounded.log_in("ada"), bounded.log_in("bea")
    with bounded.deployment.client("mailer:web3") as client:
        [job] = fail(client, "bank", ["paid by eve"])
    form = {"action": "delete", "queue": "bank", "descriptor": job, "before": "4102444800000"}
    page = ada.post("/mend", {**form, "mode": "all", "nonce": "look"}).headers["Location"]
    wait_until(lambda: "Put back" in ada.get(page).text)

    assert "Put back" in ada.get("/audit").text
    for path in (page, "/audit"):
        assert "Put back" not in bea.get(path).text


@pytest.fixture(scope="module")
def operation(bounded) -> str:
    """The path of an operation of `pay`, which asks."""
    ada = bounded.log_in("ada")
    fields = {"action": "retry", "queue": "pay", "before": "4102444800000", "nonce": "pay"}
    path = str(ada.post("/mend", {**fields, "attempts": "1"}).headers["Location"])
    assert path.startswith("/op/")
    return path


@pytest.mark.parametrize(
    "form",
    [
        *({"action": what, "queue": "pay", "before": "1"} for what in ("retry", "delete")),
        *({"action": what, "queue": "pay"} for what in ("pause", "resume", "limit")),
        {"action": "dequeue_only", "name": "1", "value": "on", "typed": "1"},
        *({"do": what} for what in ("go_on", "stop", "restore")),
        {"restore": "{number}"},
    ],
)
def test_who_may_not_change_a_queue_is_refused_and_logged(bounded, operation, form, wait_until):
    number = operation.removeprefix("/op/")
    path = operation if "do" in form else "/audit" if "restore" in form else "/mend"
    fields = {"nonce": "n", **{name: value.format(number=number) for name, value in form.items()}}
    log = bounded.deployment.folder / "run/log/web.log"
    for name in ("olga", "bea"):  # an operator of another queue, and one who may only look
        visitor, before = bounded.log_in(name), log.read_text()

        assert visitor.post(path, fields).status == 403
        said = f"refused: POST {path} from 127.0.0.1 as '{name}': you have no role operate"
        # supervisord writes it.
        wait_until(lambda said=said, old=before: said in log.read_text().removeprefix(old))
        assert visitor.post(path, fields, {"Origin": "http://evil.example.com"}).status == 403
    audit = (bounded.deployment.folder / "data/audit.jsonl").read_text()
    assert not any(f'"who":"{name}"' in audit for name in ("olga", "bea"))


@pytest.mark.parametrize(
    "path",
    [
        *("/q/pay", "/q/pay/history", "/q/pay/history.json", "/failures?queue=pay"),
        *("/workers?queue=pay", "/j/{job}", "/j/{job}/body", "/mend?queue=pay"),
        *("/mend?action=pause&queue=pay", "/find?q={claim}&queue=pay", "{operation}"),
    ],
)
def test_nothing_of_a_queue_is_shown_to_who_may_not_view_it(
    bounded, olga, operation, path, wait_until
):
    claim = "host:1:1:w:1"
    page = olga.get(path.format(job=bounded.pay, operation=operation, claim=claim))

    # Shorter words may be in the random token of its forms.
    assert (page.status, "bobolink" in page.body) == (403, False)
    log = bounded.deployment.folder / "run/log/web.log"  # written by supervisord
    where = path.partition("?")[0].format(job=bounded.pay, operation=operation)
    said = f"refused: GET {where} from 127.0.0.1 as 'olga': you have no role view for queue"
    wait_until(lambda: said in log.read_text())
    with stream(bounded.deployment, "queue&name=pay", olga) as cells:
        assert cells.beat()["cells"] == {}


def test_a_mistake_in_the_configuration_names_no_queue_to_who_may_not_view_it(bounded, wait_until):
    ada, ned = bounded.log_in("ada"), bounded.log_in("ned")
    file = bounded.deployment.folder / "etc/queues.yaml"
    before = file.read_text()
    file.write_text("queues: {pay: {max_jobs_per_second: many}}")
    try:
        wait_until(lambda: "many" in ada.get("/system").text)
        switch = "/mend?action=dequeue_only&shard=1"
        form = {"action": "limit", "queue": "mail", "value": "5", "nonce": "m"}
        for page in (ned.get("/system"), ned.get(switch), ned.post("/mend", form)):
            is_said = "The configuration has a mistake" in page.text
            assert (is_said, "many" in page.text) == (True, False)
        audit = ned.get("/audit").text
        assert ("failed: the configuration has mistakes" in audit, "many" in audit) == (True, False)
        assert "many" in ada.get(switch).text
    finally:
        file.write_text(before)
    wait_until(lambda: "Configuration" not in ada.get("/system").text)


def test_changes_of_other_queues_are_left_out_and_that_is_no_refusal(bounded, olga, wait_until):
    ada = bounded.log_in("ada")
    assert ada.post("/mend", {"action": "pause", "queue": "pay", "nonce": "p"}).status == 303

    assert "pause pay" in ada.get("/audit").text
    assert "pause pay" not in olga.get("/audit").text
    wait_until(lambda: "pay: " in ada.get("/system").text)
    assert "pay: " not in olga.get("/system").text
    log = (bounded.deployment.folder / "run/log/web.log").read_text()
    assert "refused: GET /audit" not in log
