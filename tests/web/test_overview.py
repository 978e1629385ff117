"""The overview and the page of a queue, as a browser without scripts shows them."""

from __future__ import annotations

from tests.web.conftest import Visitor


def test_the_overview_lists_queues_with_their_jobs(dashboard, visitor, wait_until):
    with dashboard.client() as client:
        client.create_queue("overview_mail")
        client.enqueue("overview_mail", [b"1", b"2", b"3"])

    def shows() -> bool:
        page = visitor.get("/")
        return "overview_mail" in page.body and page.cell("overview_mail ready") == "3"

    wait_until(shows)
    page = visitor.get("/")
    assert page.status == 200
    assert "TEST" in page.text
    assert "2 shards well" in page.text


def test_the_page_of_a_queue_has_its_jobs_by_state(dashboard, visitor, wait_until):
    with dashboard.client() as client:
        client.create_queue("queue_mail")
        client.enqueue("queue_mail", [b"1", b"2"])
        [job] = client.dequeue("queue_mail", limit=1)
        client.ack("queue_mail", succeeded=[job])

    wait_until(lambda: "figure succeeded" in visitor.get("/q/queue_mail").body)
    wait_until(lambda: visitor.get("/q/queue_mail").cell("figure succeeded") == "1")
    page = visitor.get("/q/queue_mail")
    assert page.cell("figure ready") == "1"
    assert page.cell("figure running") == "0"


def test_a_queue_that_does_not_exist_is_said_with_what_to_do(visitor: Visitor):
    page = visitor.get("/q/nothing_here")

    assert page.status == 404
    assert "There is no queue nothing_here." in page.text
