"""What the dashboard can, the command line can: commands show and do the same as its pages."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from pinlaterd.cli import EXIT_INTERRUPTED
from pinlaterd.client import Client, Job, JobState
from pinlaterd.client.coordinator import UnixConnection
from pinlaterd.config.layout import WEB_SOCKET
from pinlaterd.model import JobOptions
from pinlaterd.web.trash import MOST_BYTES
from tests.cli.program import SECONDS, Program, read_until
from tests.deployment import Deployment, claim, frozen
from tests.web.conftest import LoadUntil, PageAnswer, Visitor
from tests.web.test_mend import begin, fail, fields_of, number_of

pytestmark = pytest.mark.service


@pytest.fixture
def admin(dashboard: Deployment) -> Program:
    return Program("admin", "--dir", dashboard.folder)


@pytest.fixture(scope="module")
def client(dashboard: Deployment) -> Iterator[Client]:
    with dashboard.client("commander:web1") as client:
        client.create_queue("coins")
        client.create_queue("notes")
        yield client


def same_as(page: str) -> str:
    """Return the command that a page names."""
    found = re.search(r'id="same">Same as</h2>\s*<pre[^>]*>([^<]+)<', page)
    assert found, page
    return found[1].removeprefix("pinlater-admin ")


# --- what happened ----------------------------------------------------------------------------


def test_events_are_those_of_the_systems_page(admin, client, visitor, load_until):
    admin.output("queue limit coins 7")
    text = "coins: max_jobs_per_second 7"
    page = load_until(visitor, "/system", lambda page: text in page.text)

    found = admin.facts("events")
    [event] = [one for one in found if one["text"] == text]
    later = admin.facts("events --since", event["at_ms"] + 1)

    assert found == sorted(found, key=lambda one: -one["at_ms"])
    assert event not in later
    assert len(admin.facts("events --limit 1")) == 1
    assert f"\t{text}\n" in admin.output("events")
    assert "<code>pinlater-admin events</code>" in page.body


def test_the_audit_is_that_of_the_page(admin, client, visitor):
    page = visitor.get("/mend?action=pause&queue=notes")
    form = {**fields_of(page), "reason": "disk check"}
    audit = visitor.follow(visitor.post("/mend", form))

    [change, *_] = admin.facts(same_as(audit.body))
    shown = admin.output("audit --queue notes")
    admin.output(change["undo"].removeprefix("pinlater-admin "))

    assert (change["words"], change["reason"]) == ("pause notes", "disk check")
    assert (change["who"], change["outcome"]) == ("somebody", "done")
    assert change["undo"] == "pinlater-admin queue resume notes"
    assert f"\tsomebody\tpause notes\tdisk check\tdone\t{change['undo']}\n" in shown
    assert admin.facts("audit --queue nothing") == []
    assert admin.facts("audit --since", change["at_ms"] + 1) == []


def test_history_is_the_table_of_the_page(admin, client, visitor, wait_until):
    client.enqueue("coins", [b"x"] * 1500)
    wait_until(lambda: 1500 in visitor.history("coins")["series"].get("ready", ()))

    page = visitor.get("/q/coins/history?range=6h")
    command = same_as(page.body)
    titles, *rows = admin.output(command).partition("\n\n")[0].splitlines()

    assert command == "history coins --range 6h"
    assert titles.startswith("time\tin/s\tout/s\tfailed/s\tready\tscheduled\trunning\twait p50\t")
    assert any(row.split("\t")[4] == "1,500" for row in rows)
    assert 1500 in admin.facts("history coins")["series"]["ready"]
    assert "choose from 1h, 6h, 24h, 7d" in admin.error("history coins --range 8d", code=2)


# --- find -------------------------------------------------------------------------------------


def test_a_descriptor_or_a_key_gives_the_job(admin, client):
    [stored] = client.enqueue_keyed("coins", [Job(b"gold", options=JobOptions(key="a coin"))])

    for text in (stored.descriptor, "a coin"):
        [job] = admin.facts("job find", text)
        assert (job["descriptor"], job["body"]) == (stored.descriptor, "gold")
    assert "gold" in admin.output("job find", stored.descriptor)
    assert "unknown: coins:s1:p1:99999999" in admin.error("job find coins:s1:p1:99999999")


def test_a_claim_descriptor_gives_its_sources_jobs(admin, client, dashboard):
    client.enqueue("notes", [b"1", b"2"])
    mine = claim(client, "notes", 1)
    with dashboard.client("commander:web2") as other:
        claim(other, "notes", 1)

    found = admin.facts("job find", mine[0].claim_descriptor)

    assert [job["descriptor"] for job in found] == [mine[0].descriptor]


def test_text_is_found_as_on_the_page(admin, client, visitor, load_until):
    [ready] = client.enqueue("coins", [b"a.b of silver"])
    [later] = client.enqueue("notes", [Job(b"a.b of silver", run_after_ms=4_000_000_000_000)])
    client.enqueue("coins", [b"aXb of silver"])

    def found(*arguments: str) -> set[str]:
        return {job["descriptor"] for job in admin.facts("job find", *arguments)}

    assert found("a.b of silver") == {ready, later}
    assert found("a.b of silver", "--queue", "n*") == {later}
    assert found("a.b of silver", "--state", "ready", "--state", "failed") == {ready}
    assert len(found("a.b of silver", "--re2", "--limit", "2")) == 2
    path = "/find?q=a.b+of+silver&as=re2&queue=coins&state=ready"
    page = load_until(visitor, path, lambda page: "data-over" in page.body)
    quoted = "&#39;a.b of silver&#39;"
    assert same_as(page.body) == f"job find --re2 --queue coins --state ready {quoted}"


def test_a_search_says_how_far_it_is_and_what_is_wrong(admin, client):
    done = admin("job find --progress", "no such text anywhere")

    assert done.returncode == 0
    far = r"looked at [\d,]+ of about [\d,?]+ jobs, (\d+) of \1 queues, 0 found"
    assert re.search(far, done.stderr)
    assert "no RE2 pattern" in admin.error("job find --re2 (")
    assert "no queue matches" in admin.error("job find x --queue nothing*")
    assert "choose from failed, running" in admin.error("job find x --state gone", code=2)


def test_ctrl_c_ends_a_search_and_shows_what_it_found(admin, client):
    client.create_queue("heaps")
    # A pattern that takes milliseconds for each of these.
    client.enqueue("heaps", [bytes(random.choices(b"ab", k=4_000)) for _ in range(1_000)])
    [needle] = client.enqueue("heaps", [b"needle"])
    line = ("job find --progress --json --queue heaps --re2", "needle|a[ab]{100}c")
    with admin.started(*line) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        read_until(process.stderr.fileno(), b" 1 found\n")
        process.send_signal(signal.SIGINT)
        output, said = process.communicate(timeout=SECONDS)

    assert process.returncode == EXIT_INTERRUPTED
    assert said.endswith(b"pinlater-admin: interrupted\n")
    assert [job["descriptor"] for job in json.loads(output)] == [needle]


# --- operations -------------------------------------------------------------------------------


def ended(visitor: Visitor, load_until: LoadUntil, number: int, phase: str) -> PageAnswer:
    return load_until(visitor, f"/op/{number}", lambda page: f"op {number}: {phase}" in page.body)


def test_an_operation_is_stopped_and_resumed(admin, client, visitor, load_until):
    client.create_queue("retried")
    fail(client, "retried", *["why"] * 12)
    number = number_of(begin(visitor, "/mend?action=retry&queue=retried"))
    page = ended(visitor, load_until, number, "asking")

    [asking] = [one for one in admin.facts("operation list") if one["number"] == number]
    stopped = admin.output(f"operation stop {number}")
    resumed = admin.output(f"operation resume {number}")

    assert (asking["what"], asking["queue"], asking["phase"]) == ("retry", "retried", "asking")
    assert f"<code>pinlater-admin operation stop {number}</code>" in page.body
    assert f"<code>pinlater-admin operation resume {number}</code>" in page.body
    assert stopped == f"operation {number}: stopped: 10 retried\n"
    assert resumed == f"operation {number}: done: 12 retried\n"
    assert "it has ended: done: 12 retried" in admin.error(f"operation stop {number}")
    assert "it does not wait" in admin.error(f"operation resume {number}")
    assert "there is no such operation" in admin.error("operation stop 999999999")


def test_a_delete_is_restored_once_with_a_line_in_the_audit_log(admin, client, visitor, load_until):
    client.create_queue("deleted")
    fail(client, "deleted", "one", "two", "three")
    path = "/mend?action=delete&queue=deleted&state=failed"
    number = number_of(begin(visitor, path, mode="all"))
    ended(visitor, load_until, number, "done")

    listed = [one["number"] for one in admin.facts("job restore")]
    preview = admin.facts(f"job restore {number} --preview")
    asked = admin.error(f"job restore {number}", code=2)
    done = admin.facts(f"job restore {number} --yes")
    again = admin.error(f"job restore {number} --yes")

    assert number in listed
    assert preview == {"would_restore": 3}
    assert "Enqueue 3 jobs of deleted again? Nobody can be asked; give --yes if so" in asked
    assert (done["what"], done["outcome"]) == ("restore", "done: 3 enqueued again")
    assert again == f"pinlater-admin: operation {number}: its jobs were enqueued again\n"
    assert {job.body for job in claim(client, "deleted", 3)} == {b"one", b"two", b"three"}
    [restored, deleted, *_] = admin.facts("audit --queue deleted")
    assert restored["words"].startswith("restore jobs of deleted, 3 previewed")
    assert (restored["who"], restored["outcome"]) == (done["who"], done["outcome"])
    assert (deleted["number"], deleted["undo"]) == (number, "")


def test_the_command_deletes_what_can_be_restored(admin, client, dashboard):
    client.create_queue("trashed")
    client.enqueue("trashed", [Job(b"%d" % number, priority=2) for number in range(5)])
    line = "job delete trashed pending --priority 2"

    first = admin.facts(line, "--limit", "2", "--yes")
    rest = admin.output(line, "--body-regex", ".", "--yes")
    none = admin.facts(line, "--yes")
    admin.output(f"job restore {first['operation']} --yes")
    [restored, deleted, _] = admin.facts("operation list")[:3]

    assert first["deleted"] == 2
    assert rest.startswith("3 jobs deleted; `pinlater-admin job restore ")
    assert none == {"deleted": 0}
    assert (restored["what"], restored["done"], deleted["done"]) == ("restore", 2, 3)
    assert client.count("trashed", JobState.PENDING) == 2


def test_a_delete_with_a_limit_begins_with_what_is_due_or_failed_first(admin, client):
    client.create_queue("ordered")
    fail(client, "ordered", "old")
    fail(client, "ordered", "new")
    client.enqueue("ordered", [b"due", Job(b"scheduled", run_after_ms=4_000_000_000_000)])

    for state in ("failed", "pending"):
        assert admin.facts(f"job delete ordered {state} --limit 1 --yes")["deleted"] == 1
        assert admin.facts("operation list")[0]["what"] == "delete"

    [left] = client.scan("ordered", JobState.FAILED)
    assert left.custom_status == "new"
    assert client.count("ordered", JobState.PENDING) == 0
    assert client.count("ordered", JobState.PENDING, future=True) == 1


def test_a_full_trash_is_said_and_how_many_can_be_restored(admin, client, dashboard):
    client.create_queue("brimful")
    names = client.enqueue("brimful", [b"small"] * 500)
    names += client.enqueue("brimful", [b"x" * 10_000] * 100)
    trash = dashboard.folder / "data" / "trash"
    trash.mkdir(exist_ok=True)
    filler = trash / "filler.jsonl"
    filler.touch()
    held = sum(file.stat().st_size for file in trash.glob("*.jsonl"))
    os.truncate(filler, MOST_BYTES - held - 1_000_000)
    try:
        done = admin("job delete brimful pending --yes --json", *names)
    finally:
        filler.unlink()

    facts = json.loads(done.stdout)
    assert (facts["deleted"], facts["kept"]) == (600, 500)
    assert "warning: the trash is full" in done.stderr
    admin.output(f"job restore {facts['operation']} --yes")
    assert client.count("brimful", JobState.PENDING) == 500


def test_what_fails_in_the_dashboard_never_deletes_without_the_trash(admin, client, dashboard):
    client.create_queue("kept")
    client.enqueue("kept", [b"1"])
    log, aside = dashboard.folder / "data" / "audit.jsonl", dashboard.folder / "data" / "aside"
    log.touch()
    log.rename(aside)
    log.mkdir()
    try:
        said = admin.error("job delete kept pending --yes"), admin.error("audit")
    finally:
        log.rmdir()
        aside.rename(log)

    assert all("the audit log can't be used: " in each for each in said)
    assert client.count("kept", JobState.PENDING) == 1
    with contextlib.closing(UnixConnection(dashboard.folder, WEB_SOCKET)) as connection:
        connection.request("POST", "/operations", b" " * (1 << 20) + b"{}")
        refused = json.loads(connection.getresponse().read())
    assert refused == {"error": "too many jobs are named at once: name fewer"}


def test_a_delete_names_the_operation_that_may_go_on(admin, client, dashboard, wait_until):
    with begun_to_delete(admin, client, "adrift") as process:
        wait_until(lambda: deleted_of(dashboard, "adrift"))
        with frozen(dashboard.pid_of("web")):
            _, said = process.communicate(timeout=SECONDS)
    number = admin.facts("operation list")[0]["number"]
    admin("operation stop", number)

    assert process.returncode == 1
    assert f"operation {number} may go on, see `pinlater-admin operation list`: " in said.decode()


def test_a_delete_of_named_jobs_keeps_those_of_other_priorities(admin, client):
    client.create_queue("ranked")
    names = client.enqueue("ranked", [Job(b"1", priority=1), Job(b"2", priority=2)])

    done = admin.facts("job delete ranked pending --priority 2 --yes", *names)

    assert done["deleted"] == 1
    assert list(client.lookup(names)) == names[:1]


@contextlib.contextmanager
def begun_to_delete(
    admin: Program, client: Client, queue: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a delete of so many jobs that it takes a while."""
    client.create_queue(queue)
    for _ in range(20):
        client.enqueue(queue, [b"x"] * 1_000)
    with admin.started(f"job delete {queue} pending --limit 20000 --yes") as process:
        yield process


def deleted_of(deployment: Deployment, queue: str) -> int:
    """Return how many jobs of a queue operations have deleted."""
    with contextlib.closing(UnixConnection(deployment.folder, WEB_SOCKET)) as connection:
        connection.request("GET", "/operations")
        found = json.loads(connection.getresponse().read())
    return sum(one["done"] for one in found if one["queue"] == queue)


def test_ctrl_c_stops_a_delete(admin, client, dashboard, wait_until):
    with begun_to_delete(admin, client, "heap") as process:
        wait_until(lambda: deleted_of(dashboard, "heap"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=SECONDS)

    assert (process.returncode, said) == (EXIT_INTERRUPTED, b"pinlater-admin: interrupted\n")
    wait_until(lambda: admin.facts("operation list")[0]["phase"] == "stopped")
    assert deleted_of(dashboard, "heap") + client.count("heap", JobState.PENDING) == 20_000
    assert client.count("heap", JobState.PENDING)


def test_a_delete_that_can_not_be_restored_says_so_before(admin, client, dashboard):
    client.create_queue("lost")
    client.enqueue("lost", [b"1", b"2", b"3"])
    line = "job delete lost pending --limit 1 --yes"

    elsewhere = Program("admin", "--port", dashboard.port)(line)
    by_wish = admin(f"{line} --no-trash")

    assert elsewhere.stdout == by_wish.stdout == "1 job deleted\n"
    assert "warning: deleted jobs are not kept, so this can't be undone: --host" in elsewhere.stderr
    assert by_wish.stderr == ""
    assert "lost" not in [one["queue"] for one in admin.facts("operation list")]


def test_without_a_dashboard_the_commands_say_so(tmp_path):
    Deployment(tmp_path).init()

    said = Program("admin", "--dir", tmp_path).error("operation list")

    assert f"no answer from the dashboard at {tmp_path}/run/web.sock" in said
    assert "`pinlaterd up` starts it where `web_port` is not 0" in said
