"""A client of Rickover and its downstream, unchanged, on three servers of which one is lost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping

import pytest

from tests.cluster.site import JOB_TYPE, Server, Site, wait_until

pytestmark = [pytest.mark.service, pytest.mark.rounds, pytest.mark.timeout(400)]

HTTP_PORT, DOWNSTREAM_PORT = 9013, 9091
JOBS, CONCURRENCY = 300, 4
WITH_HTTP = f"http_host: 0.0.0.0\nhttp_port: {HTTP_PORT}\ninsecure: true\n"


@pytest.fixture
def rickover(site: Site) -> Iterator[Site]:
    """All servers have Rickover's interface, and push its jobs to the clients' machine."""
    before = {server: (server.folder / "etc/local.yaml").read_text() for server in site.servers}
    there = {"DOWNSTREAM_URL": f"http://{site.clients.address}:{DOWNSTREAM_PORT}"}
    for server, text in before.items():
        start_anew(server, text + WITH_HTTP, {**server.environment, **there})
    site.wait_until_serving()
    yield site
    site.restore()
    for server, text in before.items():
        others = {name: one for name, one in server.environment.items() if name not in there}
        start_anew(server, text, others)


def start_anew(server: Server, local: str, environment: Mapping[str, str]) -> None:
    server.down()
    (server.folder / "etc/local.yaml").write_text(local)
    server.environment = environment
    server.up()


def url(server: Server) -> str:
    return f"http://{server.machine.address}:{HTTP_PORT}"


def test_no_job_is_lost_or_doubled_when_a_server_goes(rickover: Site):
    site = rickover
    made = {"name": JOB_TYPE, "delivery_strategy": "at_least_once", "attempts": 5}
    create = json.dumps({**made, "concurrency": CONCURRENCY})
    site.clients.run("curl", "-sS", "--fail", f"{url(site.servers[0])}/v1/jobs", "-d", create)
    command = ("-m", "tests.cluster.rickover", "--jobs", str(JOBS), "--type", JOB_TYPE)
    listen = ("--listen", f"{site.clients.address}:{DOWNSTREAM_PORT}")
    process = site.clients.start(site.python, *command, *listen, *map(url, site.servers))
    assert process.stdout is not None
    assert process.stdout.readline() == b"half\n"
    site.follower().machine.off()
    found = json.loads(process.stdout.read())

    assert Counter(found["states"].values()) == {"succeeded": JOBS}
    assert {job_id for job_id, _ in found["received"]} == set(found["states"])
    attempts = Counter(map(tuple, found["received"]))
    assert [one for one, times in attempts.items() if times > 1] == []
    assert found["most_at_once"] <= CONCURRENCY
    archived = archived_ids(site)
    assert Counter(archived) == Counter(found["states"].keys())


def archived_ids(site: Site) -> list[str]:
    """List the ids of all jobs in the archive, once all shards serve again."""
    wait_until(lambda: site.clients.run("curl", "-sS", "--fail", archive(site)))
    ids: list[str] = []
    cursor = ""
    while True:
        page = site.clients.run("curl", "-sSi", "--fail", f"{archive(site)}{cursor}")
        head, _, body = page.partition("\n\n")
        ids += [job["id"] for job in json.loads(body)]
        _, is_more, rest = head.partition("cursor=")
        if not is_more:
            return ids
        cursor = f"&cursor={rest.partition('>')[0].partition('&')[0]}"


def archive(site: Site) -> str:
    [server, *_] = [server for server in site.servers if server.machine.is_on]
    return f"{url(server)}/v1/archived-jobs?name={JOB_TYPE}"
