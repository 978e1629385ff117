"""The figures of a real deployment: each job counts in them, and docs/metrics.md has every name."""

from __future__ import annotations

import ast
import re
import time
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pinlaterd.client import AckInfo, CheckpointInfo, Client, Job, PinLaterError
from pinlaterd.coordinator.pages import PrometheusText
from pinlaterd.stats import Stats, names_of
from tests.deployment import CALL_SECONDS, Deployment, claim
from tests.shared_service import ADMIN_PASSWORD

pytestmark = pytest.mark.service

DOCUMENTED = re.compile(r"^\| `(.+?)` \| `(.+?)` \| (counter|gauge|summary) \|", re.MULTILINE)
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/metrics.md").read_text()
RECORDERS = ("count", "gauge", "peak", "record")
# Of the states of a queue's jobs, which the page lists one by one.
NAMED_ELSEWHERE = {"*_*", "*_*_gc"}


def test_each_job_is_a_sample_of_its_own(
    service: Deployment, client: Client, queue: str, wait_until
):
    client.enqueue(queue, [b"x" * 10, b"x" * 1_000])
    now_ms = round(time.time() * 1000)
    client.enqueue(queue, [Job(b"", run_after_ms=now_ms - late_ms) for late_ms in (10**6, 10**5)])
    wait_until(lambda: len(client.dequeue(queue, limit=4, dry_run=True)) == 4)
    claim(client, queue, 4)

    def metric(name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = service.stats()["metrics"].get(name, {"count": 0})
        return found

    sizes, delays = f"job_body_size_{queue}", f"{queue}_first_dequeue_delay_ms"
    wait_until(lambda: metric(sizes)["count"] == metric(delays)["count"] == 4)
    assert (metric(sizes)["minimum"], metric(sizes)["maximum"]) == (0, 1_000)
    assert metric(delays)["maximum"] >= 10**6
    assert metric(delays)["minimum"] < 10**5


def test_the_figures_of_a_queue_go_with_it(
    service: Deployment, client: Client, queue: str, wait_until
):
    def names() -> set[str]:
        stats = service.stats()
        return {name for section in SECTIONS for name in stats[section] if queue in name}

    use_all(service, client, queue)
    wait_until(partial(all_reported, service, queue))
    client.delete_queue(queue, password=ADMIN_PASSWORD)
    wait_until(lambda: not names())

    client.create_queue(queue)
    wait_until(lambda: f"{queue}_pending" in names())
    assert f"{queue}_enqueue" not in names()


def test_every_name_is_documented(service: Deployment, client: Client, queue: str, wait_until):
    use_all(service, client, queue)
    wait_until(partial(all_reported, service, queue))

    documented = DOCUMENTED.findall(PAGE)
    of_pages = {kind: [_pattern(name) for name, _, k in documented if k == kind] for kind in KINDS}
    for section, kind in SECTIONS.items():
        for name in service.stats()[section]:
            assert any(pattern.fullmatch(name) for pattern in of_pages[kind]), (section, name)
    of_prometheus = {name: kind for _, name, kind in documented}
    for family in prometheus(service):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert of_prometheus.get(name) == family.type, name
        labelled = name.startswith(("pinlaterd_queue", "pinlaterd_job_body"))
        assert all(("queue" in sample.labels) == labelled for sample in family.samples), name


KINDS = ("counter", "gauge", "summary")
SECTIONS = {"counters": "counter", "gauges": "gauge", "metrics": "summary"}


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"<\w+>", r"\\w+", name.replace(".", r"\.")))


def prometheus(service: Deployment) -> list[Any]:
    url = f"http://127.0.0.1:{service.stats_port}/metrics"
    with urllib.request.urlopen(url, timeout=CALL_SECONDS) as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def use_all(service: Deployment, client: Client, queue: str) -> None:
    """Whatever has figures: acks and checkpoints that apply and that do not, errors, schedules."""
    later_ms = round(time.time() * 1000) + 3_600_000
    client.enqueue(queue, [b"a", b"b", b"c", Job(b"later", run_after_ms=later_ms)])
    [first, second, third] = claim(client, queue, 3)
    client.checkpoint(queue, [CheckpointInfo(first.descriptor)])
    client.ack(queue, succeeded=[AckInfo(first.descriptor)], failed=[AckInfo(second.descriptor)])
    client.ack(queue, succeeded=[AckInfo(third.descriptor, claim_descriptor="stale")])
    client.checkpoint(queue, [CheckpointInfo(first.descriptor)])
    with pytest.raises(PinLaterError):
        client.enqueue("no_such_queue", [b"x"])


def all_reported(service: Deployment, queue: str) -> bool:
    stats = service.stats()
    counted = [f"{queue}_{name}" for name in ("ack_noop", "checkpoint_noop", "ack_failed")]
    scheduled = stats["gauges"].get(f"{queue}_scheduled")
    return scheduled == 1 and all(name in stats["counters"] for name in counted)


def recorded_names() -> Iterator[str]:
    """As the code has them, with * for what it puts in."""
    for path in (ROOT / "pinlaterd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (name := _recorded_name(node)):
                yield name


def _recorded_name(call: ast.Call) -> str | None:
    """`stats.count(name)`, `figures.count(name)`, or the `count(name)` of a method handed on."""
    receiver, _, method = ast.unparse(call.func).rpartition(".")
    owner = receiver.rpartition(".")[2].lstrip("_")
    if method not in RECORDERS or owner not in ("stats", "") or not call.args:
        return None
    match call.args[0]:
        case ast.Constant(value=str(name)):
            return name
        case ast.JoinedStr(values=pieces):
            return "".join(str(p.value) if isinstance(p, ast.Constant) else "*" for p in pieces)
        case _:
            return None


def test_every_name_that_the_code_records_is_documented():
    documented = {re.sub(r"<\w+>", "*", name) for name, _, _ in DOCUMENTED.findall(PAGE)}
    recorded = set(recorded_names())

    assert recorded >= {"*_enqueue", "shard_calls_refused", "log_lines_dropped"}
    assert recorded - documented == NAMED_ELSEWHERE


@pytest.mark.parametrize("name", list(names_of("q")))
def test_every_figure_of_a_queue_is_documented_and_labelled(name: str):
    rows = [row for row in DOCUMENTED.findall(PAGE) if "<queue>" in row[0]]
    [(_, metric, kind)] = [row for row in rows if row[0].replace("<queue>", "q") == name]
    stats = Stats()
    if kind == "counter":
        stats.count(name)
    else:
        record = stats.gauge if kind == "gauge" else stats.record
        record(name, 1)

    page = b"".join(PrometheusText().of({"shard-1": stats.snapshot()})).decode()

    [family] = text_string_to_metric_families(page)
    assert family.name + ("_total" if family.type == "counter" else "") == metric
    assert {sample.labels["queue"] for sample in family.samples} == {"q"}
