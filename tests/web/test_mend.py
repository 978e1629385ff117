"""Mending from the dashboard: previews, operations, their undoing, and the audit log."""

from __future__ import annotations

import html
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from pinlaterd.client import AckInfo, CheckpointInfo, Client, Job, JobOptions, JobState
from pinlaterd.web.mend import Switch
from tests.deployment import Deployment, claim
from tests.web.conftest import (
    LoadUntil,
    PageAnswer,
    Visitor,
    serving_web,
    wait_until_answering,
)

pytestmark = pytest.mark.service

_HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
_queues = iter(range(1, 1_000))


@pytest.fixture(scope="module")
def mending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving_web(tmp_path_factory.mktemp("mending"), shards=2, web_writes=True) as deployment:
        yield deployment


@pytest.fixture
def client(mending: Deployment) -> Iterator[Client]:
    with mending.client("worker:web1") as client:
        yield client


@pytest.fixture
def visitor(mending: Deployment) -> Visitor:
    return Visitor(mending.web_port)


@pytest.fixture
def queue(client: Client) -> str:
    name = f"mend_{next(_queues)}"
    client.create_queue(name)
    return name


def fail(client: Client, queue: str, *says: str, **fields: Any) -> list[str]:
    """Return the descriptors of failed jobs: one a status, of which that is the body, too."""
    client.enqueue(queue, [Job(each.encode(), attempts_allowed=1, **fields) for each in says])
    claimed = claim(client, queue, len(says))
    acks = [
        AckInfo(job.descriptor, job.body.decode(), claim_descriptor=job.claim_descriptor)
        for job in claimed
    ]
    client.ack(queue, failed=acks)
    return [job.descriptor for job in claimed]


def fields_of(page: PageAnswer) -> dict[str, list[str]]:
    """Return what the form of a page sends of itself."""
    found: dict[str, list[str]] = {}
    for name, value in _HIDDEN.findall(page.body):
        found.setdefault(name, []).append(value)
    found.pop("token")
    found.pop("next", None)
    return found


def look(visitor: Visitor, path: str, headers: dict[str, str] | None = None) -> PageAnswer:
    """Load a preview until it has counted all: on a busy machine a search takes long."""
    while 'name="bound" value="1"' in (page := visitor.get(path, headers)).body:
        pass
    return page


def begin(visitor: Visitor, path: str, **more: str) -> PageAnswer:
    """Send the form of a preview; return the page of the operation."""
    return visitor.follow(visitor.post("/mend", {**fields_of(look(visitor, path)), **more}))


def number_of(page: PageAnswer) -> int:
    found = re.search(r"<h1>op (\d+):", page.body)
    assert found, page.text
    return int(found[1])


@pytest.fixture
def ended(visitor: Visitor, load_until: LoadUntil) -> Callable[[int, str], PageAnswer]:
    """Wait until an operation is in a phase; return its page."""

    def wait(number: int, phase: str = "done") -> PageAnswer:
        return load_until(visitor, f"/op/{number}", lambda page: f"{phase}:" in page.text)

    return wait


def test_a_preview_says_what_would_be_and_changes_nothing(client, visitor, queue):
    fail(client, queue, *[f"Timeout: smtp{n} is away" for n in range(7)], "KeyError: 'a'")

    page = look(visitor, f"/mend?action=retry&queue={queue}&message=Timeout:+smtp%23+is+away")

    assert page.status == 200
    assert f"Retry 7 failed jobs of {queue}?" in page.text
    assert "“Timeout: smtp# is away”, failed before" in page.text
    assert "later ones stay" in page.text
    assert len(re.findall(r'<td><a href="/j/', page.body)) == 5
    command = rf"pinlater-admin job retry {queue} --message 'Timeout: smtp# is away' --before \S+ "
    assert re.search(command + "--attempts 1 ", page.text)
    assert re.search(command + "--attempts 1 --spread 50 ", page.text)
    [first] = re.findall(rf"job retry {queue} ({queue}:[^-]*) --before", page.text)
    assert len(first.split()) == 7
    assert client.count(queue, JobState.FAILED) == 8


def test_the_command_for_jobs_that_wait_has_the_cut_off_of_the_preview(client, visitor, queue):
    client.enqueue(queue, [b"x"])

    page = look(visitor, f"/mend?action=delete&queue={queue}&state=pending")

    assert "outside the deployment’s folder the command keeps no copy to restore" in page.text
    command = rf"job delete {queue} pending --unchanged-since (\S+Z) "
    said = re.search(command, page.text)
    [cut_off_ms] = re.findall(r'name="before" value="(\d+)"', page.body)
    assert said
    assert round(datetime.fromisoformat(said[1]).timestamp() * 1000) == int(cut_off_ms)


def test_a_mend_keeps_the_filter_of_the_page_before_it(visitor, client, queue, ended):
    [first, _] = fail(client, queue, "Timeout: one", "KeyError: two")
    link = f"/mend?action=retry&queue={queue}&message=Timeout:+one"
    page = f"/q/{queue}?state=failed&body=one"
    for referer, kept in (
        (f"http://127.0.0.1:{visitor.port}{page}", page),
        ("http://evil.example.com/q/x", f"/q/{queue}?state=failed&message=Timeout%3A+one"),
    ):
        preview = look(visitor, link, {"Referer": referer})
        cancel = re.search(r'<a class="button" href="([^"]+)">Cancel', preview.body)
        assert cancel
        assert html.unescape(cancel[1]).startswith(kept)

    done = ended(number_of(begin(visitor, link, mode="all")))

    assert f'<a href="/q/{queue}?state=failed&amp;message=Timeout%3A+one' in done.body
    row = (
        rf"retry jobs of {queue}, 1 previewed: failed, “Timeout: one”, failed before \S+ UTC; later"
    )
    assert re.search(row + " ones stay done: 1 retried", visitor.get("/audit").text)
    assert first in {job.descriptor for job in client.scan(queue, JobState.PENDING)}


def test_a_mend_is_for_jobs_of_the_priority_of_the_page_before_it(
    visitor, client, queue, load_until, ended
):
    fail(client, queue, "a", "b", priority=1)
    [urgent] = fail(client, queue, "a", priority=2)
    path = f"/q/{queue}?state=failed&priority=2"

    page = load_until(visitor, path, lambda page: "Retry all" in page.text)
    links = re.findall(r'href="(/mend\?action=retry[^"]*)"', page.body)

    assert len(links) == 2  # of the page, and of the list
    for link in links:
        assert "Of priority 2, failed before" in look(visitor, html.unescape(link)).text
    ended(number_of(begin(visitor, html.unescape(links[0]), mode="all")))
    assert [job.descriptor for job in client.scan(queue, JobState.PENDING)] == [urgent]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("color=red", "There is no condition 'color' for jobs."),
        ("priority=1&priority=2", "The condition priority is given twice."),
        ("priority=x", "priority: 'x' is no whole number"),
        ("by=re2", "A body is searched by text or RE2."),
        ("state=succeeded", "Only failed jobs can be retried."),
    ],
)
def test_a_mend_whose_conditions_are_not_understood_is_refused(visitor, queue, more, said):
    refused = visitor.get(f"/mend?action=retry&queue={queue}&{more}")

    assert (refused.status, said in refused.text) == (400, True), refused.text


def test_a_preview_shows_what_last_attempts_said(client, visitor, queue):
    fail(client, queue, "Timeout: one (mail.py:12 in send); KeyError: two (mail.py:9 in send)")

    page = look(visitor, f"/mend?action=retry&queue={queue}")

    assert ("KeyError: two" in page.text, "Timeout: one" in page.text) == (True, False)


def test_ten_are_tried_then_it_asks_and_goes_on_with_those_of_the_preview(
    mending, client, visitor, queue, ended, wait_until
):
    fail(client, queue, *[f"no {n}" for n in range(25)])
    form = fields_of(look(visitor, f"/mend?action=retry&queue={queue}&message=no+%23"))
    cut_off_ms = int(form["before"][0])
    wait_until(lambda: time.time() * 1000 >= cut_off_ms + 1)
    [late] = fail(client, queue, "no 99")

    sent = visitor.post("/mend", {**form, "mode": "first", "reason": "smtp is back"})
    number = number_of(visitor.follow(sent))
    ended(number, "asking")
    claimed = claim(client, queue, 10)
    client.ack(
        queue,
        succeeded=claimed[1:],
        failed=[AckInfo(claimed[0].descriptor, "no 7")],
    )

    asking = visitor.get(f"/op/{number}")
    assert client.count(queue, JobState.PENDING) == 0
    assert f"op {number}: 10 tried, 9 succeeded, 1 failed alike" in asking.text
    assert "Go on with 15" in asking.text
    visitor.follow(visitor.post(f"/op/{number}", {"do": "go_on"}))
    page = ended(number)
    assert "25 retried" in page.text
    assert client.count(queue, JobState.PENDING) == 15
    left = {job.descriptor for job in client.scan(queue, JobState.FAILED)}
    assert left == {late, claimed[0].descriptor}
    assert "smtp is back" in visitor.get("/audit").text
    told = f'"number":{number},"outcome":"go_on by somebody"'
    assert told in (mending.folder / "data/audit.jsonl").read_text()


def test_a_list_of_jobs_leads_to_a_mend_of_those_that_it_shows(client, visitor, queue, wait_until):
    [named, *_] = fail(client, queue, "to: ada", "to: ada", "to: bob")
    page = f"/q/{queue}?state=failed&body=ada&since=2020-01-01T00:00"
    wait_until(lambda: "Retry all" in visitor.get(page).text)  # the queue is new
    while "jobs so far" in (jobs := visitor.get(page)).text:
        pass  # a search ends after some time

    [path] = set(re.findall(r'href="(/mend\?action=retry[^"]*body=ada[^"]*)"', jobs.body))
    assert f"Retry 2 failed jobs of {queue}?" in look(visitor, html.unescape(path)).text
    chosen = f"/mend?action=retry&queue={queue}&state=failed&descriptor="
    assert f"Retry 1 failed job of {queue}?" in visitor.get(f"{chosen}&descriptor={named}").text
    nothing = visitor.get(chosen)
    assert (nothing.status, "No job was chosen" in nothing.text) == (400, True)


def test_a_double_click_acts_once(client, visitor, queue, ended):
    fail(client, queue, "a", "b")
    form = fields_of(look(visitor, f"/mend?action=retry&queue={queue}")) | {"mode": "all"}

    first, second = visitor.post("/mend", form), visitor.post("/mend", form)

    assert first.headers["Location"] == second.headers["Location"]
    ended(number_of(visitor.follow(first)))
    fail(client, queue)
    assert visitor.post("/mend", form).headers["Location"] == first.headers["Location"]


def test_retries_are_spread(client, visitor, queue, ended):
    fail(client, queue, *"abcdef")

    ended(number_of(begin(visitor, f"/mend?queue={queue}", mode="spread", per_second="0.1")))

    run_after_ms = {
        job.descriptor: job.run_after_ms
        for future in (True, False)  # one may fall due meanwhile
        for job in client.scan(queue, JobState.PENDING, future=future)
    }
    assert len(run_after_ms) == 6
    assert 30_000 <= max(run_after_ms.values()) - min(run_after_ms.values()) <= 60_000


def test_deleted_jobs_are_restored_byte_for_byte_and_once(client, visitor, queue, ended):
    bodies = [os.urandom(200) for _ in range(30)]
    jobs = [
        Job(body, 1 + n % 3, None, 1 + n % 4, f"s{n}", JobOptions(f"k{n}") if n % 2 else None)
        for n, body in enumerate(bodies)
    ]
    client.enqueue_keyed(queue, jobs)
    path = f"/mend?action=delete&queue={queue}&state=pending"

    deleted = ended(number_of(begin(visitor, path, mode="all")))
    assert "30 deleted" in deleted.text
    assert client.count(queue, JobState.PENDING) == 0
    number = number_of(deleted)
    again = [visitor.post(f"/op/{number}", {"do": "restore"}) for _ in range(2)]
    assert again[0].headers["Location"] == again[1].headers["Location"]
    ended(number_of(visitor.follow(again[0])))
    assert "Put back" not in visitor.get(f"/op/{number}").body
    assert f'value="{number}"' not in visitor.get("/audit").body

    named = [job.descriptor for job in client.scan(queue, JobState.PENDING)]
    found = client.lookup(named, include_body=True).values()
    assert sorted(job.body for job in found) == sorted(bodies)
    by_body = {job.body: job for job in jobs}
    for one in found:
        job = by_body[one.body]
        assert (one.attempts_allowed, one.custom_status) == (
            job.attempts_allowed,
            job.custom_status,
        )
        assert f":p{job.priority}:" in one.descriptor
        assert job.options is None or one.options.key == job.options.key


def test_a_delete_whose_jobs_were_enqueued_again_does_not_go_on(client, visitor, queue, ended):
    client.enqueue(queue, [b"x"] * 12)
    path = f"/mend?action=delete&queue={queue}&state=pending"
    number = number_of(begin(visitor, path))
    ended(number, "asking")
    early = visitor.post(f"/op/{number}", {"do": "restore"})
    visitor.post(f"/op/{number}", {"do": "stop"})
    ended(number, "stopped")

    assert "It has not ended yet: stop it first." in early.text
    ended(number_of(visitor.follow(visitor.post(f"/op/{number}", {"do": "restore"}))))
    refused = visitor.post(f"/op/{number}", {"do": "go_on"})

    assert (refused.status, "begin another delete" in refused.text) == (400, True)
    assert "Go on" not in visitor.get(f"/op/{number}").text
    assert client.count(queue, JobState.PENDING) == 12


@pytest.mark.parametrize("mode", ["all", "first"])
def test_jobs_that_come_after_a_preview_are_not_deleted(client, visitor, queue, ended, mode):
    before = set(client.enqueue(queue, [b"before"] * 20))
    path = f"/mend?action=delete&queue={queue}&state=pending"
    preview = look(visitor, path)
    assert f"Delete 20 pending jobs of {queue}?" in preview.text
    assert re.search(r"Unchanged since [0-9:]{8} UTC; later ones stay", preview.text)
    late = client.enqueue(queue, [b"late"] * 15)

    number = number_of(visitor.follow(visitor.post("/mend", {**fields_of(preview), "mode": mode})))
    if mode == "first":
        assert "10 deleted" in ended(number, "asking").text
        assert client.count(queue, JobState.PENDING) == 25
        visitor.follow(visitor.post(f"/op/{number}", {"do": "go_on"}))

    assert "20 deleted" in ended(number).text
    assert {job.descriptor for job in client.scan(queue, JobState.PENDING)} == {*late}
    refused = visitor.post("/mend", {**fields_of(preview), "before": "", "nonce": "other"})
    assert (refused.status, "no cut-off" in refused.text) == (400, True)
    assert not before & {*late}


def test_jobs_that_were_claimed_after_a_preview_of_running_ones_stay(client, visitor, queue, ended):
    client.enqueue(queue, [b"x"] * 5)
    seen = claim(client, queue, 2)
    preview = look(visitor, f"/mend?action=delete&queue={queue}&state=in_progress")
    late = claim(client, queue, 3)
    sent = visitor.post("/mend", {**fields_of(preview), "mode": "all"})

    assert f"{len(seen)} deleted" in ended(number_of(visitor.follow(sent))).text
    left = {job.descriptor for job in client.scan(queue, JobState.IN_PROGRESS)}
    assert left == {job.descriptor for job in late}


def test_chosen_jobs_that_were_renewed_after_a_preview_stay(client, visitor, queue, ended):
    client.enqueue(queue, [b"x"] * 3)
    jobs = claim(client, queue, 3)
    chosen = "&".join(f"descriptor={job.descriptor}" for job in jobs)
    preview = look(visitor, f"/mend?action=delete&queue={queue}&state=in_progress&{chosen}")
    renewed = jobs[1]
    client.checkpoint(
        queue,
        [CheckpointInfo(renewed.descriptor, claim_descriptor=renewed.claim_descriptor)],
    )

    sent = visitor.post("/mend", {**fields_of(preview), "mode": "all"})

    assert "2 deleted, 1 had changed meanwhile" in ended(number_of(visitor.follow(sent))).text
    left = [job.descriptor for job in client.scan(queue, JobState.IN_PROGRESS)]
    assert left == [renewed.descriptor]


def test_more_than_a_thousand_are_deleted_only_where_their_queue_is_typed(client, visitor, queue):
    client.enqueue(queue, [b"x"] * 1_001)
    form = fields_of(look(visitor, f"/mend?action=delete&queue={queue}&state=pending"))

    refused = visitor.post("/mend", {**form, "mode": "all", "typed": "mail"})

    assert refused.status == 400
    assert f"Type the queue's name, {queue}" in refused.text
    assert client.count(queue, JobState.PENDING) == 1_001


def test_a_pause_a_limit_and_a_shards_switch_are_made_and_undone(
    mending, client, visitor, queue, wait_until
):
    queues = mending.folder / "etc/queues.yaml"
    for path, more, said in (
        (f"/mend?action=pause&queue={queue}", {"reason": "disk check"}, "paused: true"),
        (f"/mend?action=limit&queue={queue}", {"value": "7"}, "max_jobs_per_second: 7"),
    ):
        page = visitor.get(path)
        form: dict[str, object] = {**fields_of(page), **more}
        if "reason" in more:
            assert visitor.post("/mend", {**form, "reason": "no\u00a0disk"}).status == 400
        audit = visitor.follow(visitor.post("/mend", form))
        assert said in queues.read_text()
        visitor.post("/mend", form)  # sent twice
        rows = re.findall(r'name="restore" value="(\d+)"', audit.body)
        visitor.follow(visitor.post("/audit", {"restore": rows[0]}))
        assert said not in queues.read_text()

    shards = mending.folder / "etc/shards.yaml"
    path = "/mend?action=dequeue_only&amp;shard=1&amp;value=on"
    assert path in visitor.get("/system").body
    switch = fields_of(visitor.get(html.unescape(path)))
    assert visitor.post("/mend", switch).status == 400
    audit = visitor.follow(visitor.post("/mend", {**switch, "typed": "1"}))
    assert "dequeue_only: true" in shards.read_text()
    [row, *_] = re.findall(r'name="restore" value="(\d+)"', audit.body)
    visitor.follow(visitor.post("/audit", {"restore": row}))
    assert "dequeue_only: true" not in shards.read_text()
    said = (mending.folder / "data/audit.jsonl").read_text()
    assert "disk check" in said


def test_a_killed_dashboard_says_interrupted_and_does_nothing_twice(
    mending, client, visitor, queue, ended, wait_until
):
    fail(client, queue, *[str(n) for n in range(2_000)])
    form = fields_of(look(visitor, f"/mend?action=delete&queue={queue}"))
    number = number_of(
        visitor.follow(
            visitor.post("/mend", {**form, "mode": "all", "typed": queue, "reason": "no\u00a0disk"})
        )
    )
    record = mending.folder / f"data/operations/{number}.json"
    wait_until(lambda: bool(json.loads(record.read_bytes())["done"]))
    mending.kill("web")
    wait_until_answering(mending, wait_until)
    page = visitor.get(f"/op/{number}")
    left = client.count(queue, JobState.FAILED)
    if "interrupted:" in page.text:
        assert "the dashboard was ended" in page.text
        assert client.count(queue, JobState.FAILED) == left
        visitor.post(f"/op/{number}", {"do": "go_on"})
    ended(number)
    assert client.count(queue, JobState.FAILED) == 0
    again = number_of(visitor.follow(visitor.post(f"/op/{number}", {"do": "restore"})))
    record = mending.folder / f"data/operations/{again}.json"
    wait_until(lambda: bool(json.loads(record.read_bytes())["done"]))
    mending.kill("web")
    wait_until_answering(mending, wait_until)
    if "interrupted:" in visitor.get(f"/op/{again}").text:
        visitor.post(f"/op/{again}", {"do": "go_on"})
    ended(again)
    named = [job.descriptor for job in client.scan(queue, JobState.PENDING, page_size=1_000)]
    bodies = [job.body for job in client.lookup(named, include_body=True).values()]
    assert len({*bodies}) == len(bodies) <= 2_000
    left_out = json.loads(record.read_bytes())["doubtful"]
    assert len(bodies) + left_out >= 2_000
    assert left_out <= 100


def test_a_form_acts_once_also_where_the_dashboard_is_killed_between(
    mending, visitor, queue, wait_until
):
    paused = fields_of(visitor.get(f"/mend?action=pause&queue={queue}"))
    audit = visitor.follow(visitor.post("/mend", paused))
    undo = {"restore": re.findall(r'name="restore" value="(\d+)"', audit.body)[0]}
    done = visitor.follow(visitor.post("/audit", undo)).body
    assert f'value="{undo["restore"]}"' not in done
    queues = mending.folder / "etc/queues.yaml"
    assert "paused: true" not in queues.read_text()
    mending.kill("web")
    wait_until_answering(mending, wait_until)
    visitor.get("/")

    assert visitor.post("/mend", paused).headers["Location"] == "/audit"
    assert "paused: true" not in queues.read_text()
    log = mending.folder / "run/log/web.log"  # written by supervisord
    said = "refused: POST /mend from 127.0.0.1 as 'somebody': its form was sent before"
    wait_until(lambda: said in log.read_text())
    mending.admin("queue", "pause", queue)
    assert visitor.post("/audit", undo).status == 303
    assert "paused: true" in queues.read_text()
    mending.admin("queue", "resume", queue)


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"what": "retry", "facts": {}},
        {"what": "retry", "facts": {"queue": "mail", "expected": "many"}},
        {"what": "set", "facts": {"name": "mail", "value": True, "before": False}},
        {"what": "retry", "facts": {"queue": "mail"}, "at_ms": 10**18},
    ],
)
def test_a_damaged_line_of_the_audit_log_hides_no_others(mending, visitor, queue, damage):
    visitor.post("/mend", fields_of(visitor.get(f"/mend?action=pause&queue={queue}")))
    who = {"who": "ada"} if damage else {}
    with (mending.folder / "data/audit.jsonl").open("a") as file:
        file.write(f"\n{json.dumps({'number': 0, 'at_ms': 3, **who, **damage})}\n")

    assert f"pause {queue}" in visitor.get("/audit").text
    mending.admin("queue", "resume", queue)


def test_what_goes_on_can_be_stopped_where_nothing_else_may_be_changed(
    mending, client, visitor, queue, ended, wait_until
):
    fail(client, queue, *[str(n) for n in range(12)])
    number = number_of(begin(visitor, f"/mend?action=retry&queue={queue}", mode="first"))
    ended(number, "asking")
    settings = mending.folder / "etc/pinlaterd.yaml"
    writing = settings.read_text()
    settings.write_text(re.sub(r"web_writes: .*", "web_writes: false", writing))
    try:
        wait_until(lambda: "disabled>Go on" in visitor.get(f"/op/{number}").body)
        assert visitor.post(f"/op/{number}", {"do": "go_on"}).status == 403
        assert visitor.post(f"/op/{number}", {"do": "stop"}).status == 303
        ended(number, "stopped")
    finally:
        settings.write_text(writing)
    wait_until(lambda: "disabled>Go on" not in visitor.get(f"/op/{number}").body)


def test_bodies_stay_in_the_trash_for_no_more_than_a_day(mending, wait_until):
    old = mending.folder / "data/trash/999999.jsonl"
    old.parent.mkdir(mode=0o700, exist_ok=True)
    old.write_text("{}\n")
    os.utime(old, (0, 0))

    mending.kill("web")

    wait_until(lambda: not old.exists())
    wait_until_answering(mending, wait_until)


def test_the_command_of_a_large_limit_has_all_its_digits():
    switch = Switch("limit", "mail", 1234567.0)

    assert switch.command == "pinlater-admin queue limit mail 1234567"
    assert switch.words == "at most 1234567 jobs/s of mail"
