"""The overview and the page of a queue, as a browser without scripts shows them."""

from __future__ import annotations

import re

import pytest

from pinlaterd.client import AckInfo
from pinlaterd.config.schema import Config, QueueSettings
from pinlaterd.verdict import VerdictKind, VerdictLevel
from pinlaterd.web.live import LiveFrame
from pinlaterd.web.overview import Row, banners_of, headline, most_shown
from pinlaterd.web.queue import settings_of_queue
from pinlaterd.web.system import cells_of
from pinlaterd.web.text import clock_time, iso_ms
from tests.deployment import claim, frozen
from tests.web.conftest import Visitor


def test_the_overview_lists_queues_with_their_jobs(dashboard, visitor, load_until):
    with dashboard.client() as client:
        client.create_queue("overview_mail")
        client.enqueue("overview_mail", [b"1", b"2", b"3"])

    def shows(page) -> bool:
        return page.cells.get("overview_mail ready") == "3" and "2 shards well" in page.text

    page = load_until(visitor, "/", shows)
    assert page.status == 200
    assert "TEST" in page.text


def test_the_page_of_a_queue_has_its_jobs_by_state(dashboard, visitor, load_until):
    with dashboard.client() as client:
        client.create_queue("queue_mail")
        client.enqueue("queue_mail", [b"1", b"2"])
        [job] = claim(client, "queue_mail")
        client.ack("queue_mail", succeeded=[job])

    figures = {"figure succeeded": "1", "figure ready": "1", "figure running": "0"}
    load_until(visitor, "/q/queue_mail", lambda page: figures.items() <= page.cells.items())


def test_a_queue_that_does_not_exist_is_said_with_what_to_do(visitor: Visitor):
    page = visitor.get("/q/nothing_here")

    assert page.status == 404
    assert "There is no queue nothing_here." in page.text


def test_the_worst_queue_is_first_with_its_reason_and_what_to_do(dashboard, visitor, load_until):
    with dashboard.client() as client:
        client.create_queue("shaky")

        def is_said(page) -> bool:
            client.enqueue("shaky", [b"x"] * 4)
            jobs = claim(client, "shaky", 4)
            failed = [AckInfo(job.descriptor, append_custom_status="no answer") for job in jobs[:2]]
            client.ack("shaky", failed=failed, succeeded=jobs[2:])
            return "shaky: failing" in page.text and "no answer" in page.text

        page = load_until(visitor, "/", is_said)
        assert re.search(r"One queue needs you|\w+ queues need you", page.text)
        assert page.body.index('href="/q/shaky"') < page.body.index("Queues, worst first")
        assert 'href="/help#jobs-fail"' in page.body


def test_with_many_queues_the_idle_ones_are_folded_and_one_link_away(
    dashboard, visitor, wait_until
):
    names = [f"idle_{number}" for number in range(15)]
    with dashboard.client() as client:
        for name in names:
            client.create_queue(name)

    wait_until(lambda: all(name in visitor.get("/?all=1").body for name in names))
    folded = visitor.get("/")
    assert re.search(r"\d+ more (is|are) well or idle", folded.text)
    assert not all(name in folded.body for name in names)


def test_of_many_queues_that_are_idle_some_are_shown():
    idle = Row("q", {"kind": "idle", "level": "idle"}, (), "")
    active = idle._replace(verdict={"kind": "well", "level": "ok"})

    assert [most_shown([idle] * count) for count in (3, 15)] == [3, 12]
    assert most_shown([active, idle, idle]) == 1
    assert most_shown([active] * 2 + [idle] * 15) == 2


def test_of_many_queues_that_are_unwell_a_few_have_banners_and_the_others_a_number():
    stopped = {"kind": "stopped", "level": "bad", "word": "Stopped", "sentence": "9 ready."}
    failing = {**stopped, "kind": "failing", "word": "Failing 18 %"}
    rows = [Row(f"q{number}", stopped, (), "") for number in range(335)]
    rows.append(Row("pay", failing, (), ""))

    facts = {"problems": ["shard 2 does not answer"], "warnings": [], "shards": []}
    banners = banners_of(facts, rows)

    titles = [banner.title for banner in banners]
    assert titles[0] == "q0: stopped"
    assert titles[6:] == [
        "329 more queues: stopped",
        "pay: failing",
        "shard 2 does not answer",
    ]
    assert banners[7].links == [
        *(("queue", "/q/pay"), ("failures", "/failures?queue=pay")),
        ("what to do", "/help#jobs-fail"),
    ]


def test_each_problem_of_the_service_leads_to_what_to_do_about_it():
    slow = "its store takes 900 ms for a commit"
    shards = [
        {"name": "1", "state": "serving", "dequeue_only": False, "degraded": slow},
        {"name": "2", "state": "silent", "dequeue_only": False, "degraded": ""},
    ]
    helps = {
        f"shard-1 takes no jobs: {slow}": "#a-shard-is-degraded",
        "jobs-1: shard-2 is silent": "#a-shard-is-down",
        "jobs-1: router is stopped, silent": "#a-process-does-not-start",
        "jobs-2: does not answer": None,
        f"shard-1: {slow}": "#a-shard-is-degraded",
        "shard-2: its store can't be reached": "#a-shard-is-down",
        "shard-12: its clock goes wrong": None,
    }
    said = list(helps)

    found = banners_of({"problems": said[:4], "warnings": said[4:], "shards": shards}, [])

    links = [dict(banner.links).get("what to do") for banner in found]
    assert links == [where and f"/help{where}" for where in helps.values()]


def _row(name: str, kind: VerdictKind, level: VerdictLevel) -> Row:
    return Row(name, {"kind": kind, "level": level, "word": kind, "sentence": ""}, (), "")


def test_the_first_line_names_all_that_are_not_well():
    facts: dict[str, list[str]] = {"problems": []}
    rows = [
        _row("images", VerdictKind.BEHIND, VerdictLevel.WARN),
        *(_row(name, VerdictKind.PAUSED, VerdictLevel.WARN) for name in ("mail", "pay")),
        _row("index", VerdictKind.WELL, VerdictLevel.OK),
    ]

    assert headline(facts, rows) == "No queue needs you at once; 1 is behind, 2 are paused"
    assert headline(facts, rows[3:]) == "All queues are well"
    stopped = _row("sms", VerdictKind.STOPPED, VerdictLevel.BAD)
    assert headline(facts, [stopped, *rows]) == "One queue needs you"


def test_names_of_others_are_shown_and_never_run(visitor):
    page = visitor.get("/q/%3Cscript%3Ealert(1)%3C%2Fscript%3E")

    assert page.status in (400, 404)
    assert "<script>alert" not in page.body


def test_the_system_page_has_shards_processes_and_what_is_wrong(
    dashboard, visitor, wait_until, load_until
):
    states = {"shard 1 state": "serving", "process web state": "serving"}
    page = load_until(visitor, "/system", lambda page: states.items() <= page.cells.items())

    assert "data/shard-2.sqlite" in page.text
    dashboard.kill("router")
    wait_until(lambda: "router restarted" in visitor.get("/system").text)
    with frozen(dashboard.pid_of("shard-2")):
        state = "shard 2 state"
        load_until(visitor, "/system", lambda page: page.cells.get(state, "serving") != "serving")
        load_until(visitor, "/", lambda page: "shard-2" in page.text)
    dashboard.wait_until_serving()


def test_a_process_that_has_ended_has_no_figures():
    ended = {"name": "web", "state": "stopped", "pid": 7, "cpu_percent": 0.0, "rss_bytes": 0}
    cells = cells_of(LiveFrame({"shards": [], "processes": [ended]}, 0.0), "", None)

    assert {cells[f"process web {column}"] for column in ("cpu", "memory", "pid")} == {"–"}


def test_a_time_of_another_day_has_its_date():
    at_ms, day_ms = 1_795_724_882_345, 86_400_000

    assert clock_time(at_ms, at_ms + day_ms - 1) == "20:28:02"
    assert clock_time(at_ms, at_ms + day_ms) == "11-26 20:28:02"
    assert iso_ms(at_ms) == "2026-11-26T20:28:02.345Z"


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(0.1, "0.1"), (2.5, "2.5"), (1_000.0, "1,000"), (10_000_000.0, "10,000,000")],
)
def test_settings_are_shown_as_they_were_set(limit, shown):
    settings = QueueSettings(5_400, 36, 72, max_jobs_per_second=limit, max_pending=10_000_000)

    found = settings_of_queue(Config(queues={"mail": settings}), "mail")

    assert found == {
        "claims end after": "1 h 30 min",
        "dequeues": f"at most {shown} jobs/s",
        "pending": "at most 10,000,000 jobs",
    }


def test_the_page_of_workers_says_who_asks_and_what_each_holds(dashboard, visitor, wait_until):
    with dashboard.client(source="mailer:web3") as client:
        client.create_queue("worked")
        client.enqueue("worked", [b"x"] * 5)
        claim(client, "worked", 2)

        # The figures by which claims are looked at are a second old.
        held = re.compile(r'class="figure held"[^>]*>2<')
        wait_until(lambda: held.search(visitor.get("/workers?queue=worked").body))
        # A router that is held up answers too late for this page.
        wait_until(lambda: "mailer:web3 Well worked" in visitor.get("/workers").text)
