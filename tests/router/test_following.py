"""Where a router looks for each shard, by the coordinator's snapshots."""

from __future__ import annotations

from typing import cast

from pinlaterd.config.layout import shard_endpoint
from pinlaterd.router.shards import ShardSet
from pinlaterd.wire.control import ShardEntry, Snapshot
from pinlaterd.wire.link import LinkListener, ShardLink

THERE, THIRD = "tcp://b:9100", "tcp://c:9100"


class Link:
    healthy = preferred = answering = returning = False

    def __init__(self, endpoint: str) -> None:
        self.endpoints = [endpoint]

    def move_to(self, endpoint: str) -> None:
        self.endpoints.append(endpoint)


class Router:
    def __init__(self) -> None:
        self.links: dict[str, Link] = {}
        self.shards = ShardSet(self._connect, lambda: 0.0, lambda _queue: None)

    def _connect(self, name: str, endpoint: str, _listener: LinkListener) -> ShardLink:
        self.links[name] = Link(endpoint)
        return cast("ShardLink", self.links[name])

    def follow(self, *entries: ShardEntry, server: str = "a", member: str = "m-1") -> None:
        self.shards.follow(Snapshot(1, entries, 0, server=server, member=member))


def entry(server: str = "", endpoint: str = "", *, joining: bool = False) -> ShardEntry:
    return ShardEntry("1", False, server, endpoint=endpoint, joining=joining)


def test_on_a_single_machine_a_shard_is_at_its_socket():
    router = Router()
    router.follow(entry(), server="", member="")

    assert router.links["1"].endpoints == [shard_endpoint("1")]


def test_a_shard_is_looked_for_where_its_owner_is():
    router = Router()
    router.follow(entry("a", "tcp://a:9100"))
    router.follow(entry("b", THERE))
    router.follow(entry("c", THIRD))
    router.follow(entry())  # nobody's for now: the last may come back
    router.follow(entry("a", "tcp://a:9100"))

    here = shard_endpoint("1")
    assert router.links["1"].endpoints == [here, THERE, THIRD, here]


def test_a_shard_that_has_not_served_yet_is_not_known():
    router = Router()
    router.follow(entry("a", joining=True))
    assert not router.links
    router.follow(entry("a"))
    assert router.links


def test_shards_are_told_the_latest_member_node():
    router = Router()
    router.follow(entry("b", THERE))
    assert router.shards.membership() == ("a", "m-1")
    router.follow(entry("b", THERE), member="m-7")
    assert router.shards.membership() == ("a", "m-7")
