"""Faults of Redis and of the way to it: what becomes of them, and that service goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial

import pytest
import redis

from pinlaterd.engines.base import Batch, Checkpoint, EnqueueOp, Search, Searcher, StorageEngine
from pinlaterd.engines.redis.connection import Server, refusal_words
from pinlaterd.errors import ShardOwned, StorageError, StorageFull, StorageNotCommitted
from pinlaterd.model import Job, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.calls import SEARCHES, STORAGE_CALLS
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.conftest import FreePort, WaitUntil
from tests.engines.redis.conftest import NewServer
from tests.servers.redis import HOST, LEASE_SECONDS, RedisServer, redis_engine

NewStore = Callable[[RedisServer], EngineHarness]
# These change nothing, wherever their connection is lost.
READS = {"read_pending", "payloads", "lookup", "find_keys", "find_keys_of_all"}
READS |= {"oldest_failed", "depths"}


def _methods(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if callable(value) and name[0] != "_"}


def test_every_call_is_looked_at():
    # These answer from memory, or have tests of their own.
    others = {"open", "close", "queues", "narrower", "address", "durability", "searcher"}
    others |= {"suspects", "recount", "check"}
    assert STORAGE_CALLS.keys() | others == _methods(StorageEngine)
    assert SEARCHES.keys() | {"close"} == _methods(Searcher)


@pytest.mark.parametrize("name", sorted(STORAGE_CALLS))
def test_no_call_lets_a_lost_connection_through_or_makes_it_anew(
    store: EngineHarness, stranger: redis.Redis, name: str
):
    for client in stranger.client_list():
        if client["id"] != str(stranger.client_id()):
            stranger.client_kill_filter(_id=client["id"])

    with pytest.raises(StorageError, match="can't be reached") as caught:
        STORAGE_CALLS[name](store.engine)
    assert isinstance(caught.value, StorageNotCommitted) == (name in READS)
    assert store.engine.failure
    with pytest.raises(StorageError, match="must be reopened"):
        STORAGE_CALLS[name](store.engine)

    store.engine.close()
    store.engine.open(store.now_ms)  # at once: the lease is its own
    assert not store.engine.failure
    STORAGE_CALLS[name](store.engine)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_search_that_loses_its_connection_fails_and_the_next_makes_it_anew(
    store: EngineHarness, stranger: redis.Redis, search: Callable[[Searcher], object]
):
    searcher = store.engine.searcher()()
    search(searcher)
    for client in stranger.client_list():
        if client["id"] != str(stranger.client_id()):
            stranger.client_kill_filter(_id=client["id"])

    with pytest.raises(StorageError, match="can't be reached"):
        search(searcher)

    search(searcher)
    searcher.close()


# --- what the server may answer -------------------------------------------------------------


def _opening(server: Server) -> StorageError:
    with pytest.raises(StorageError) as caught:
        redis_engine(server, "1").open(1)
    with pytest.raises(StorageError):
        redis_engine(server, "1").searcher()().count(Search(QUEUE, JobState.PENDING))
    assert str(server) in caught.value.message
    return caught.value


def test_nobody_is_there(free_port: FreePort):
    error = _opening(Server(HOST, free_port()))

    assert "start it, or correct `master` of the shard in shards.yaml" in error.message


@pytest.mark.parametrize("passwd", ["pé", "€", "\udcff"], ids=ascii)
def test_a_user_and_a_password_may_have_any_characters(new_server: NewServer, passwd: str):
    server = new_server()
    with server.client() as client:
        sent = passwd.encode(errors="surrogateescape")
        client.execute_command("ACL", "SETUSER", "zoë", "on", b">" + sent, "~*", "&*", "+@all")
    engine = redis_engine(Server(HOST, server.port, "zoë", passwd), "1")

    engine.open(1)
    engine.close()

    assert "correct `user`" in _opening(Server(HOST, server.port, "zoë", f"{passwd}é")).message


@pytest.mark.parametrize("passwd", ["", "wrong"], ids=["none", "wrong"])
def test_the_password_is_wrong(new_server: NewServer, passwd: str):
    port = new_server("--requirepass", "secret").port

    error = _opening(Server(HOST, port, "", passwd))

    assert "correct `user` and `passwd`" in error.message
    assert "secret" not in repr(Server(HOST, port, "", "secret"))
    engine = redis_engine(Server(HOST, port, "", "secret"), "1")
    engine.open(1)
    engine.close()


_GUEST = ("guest", "on", ">pass")


def test_the_user_may_not(new_server: NewServer):
    server = new_server("--user", *_GUEST, "~other*", "+@all")

    error = _opening(Server(HOST, server.port, "guest", "pass"))

    assert "ACL SETUSER" in error.message


def test_settings_that_may_not_be_read_are_a_warning(new_server: NewServer):
    server = new_server("--user", *_GUEST, "~pl*", "+@all", "-config", "-info")
    engine = redis_engine(Server(HOST, server.port, "guest", "pass"), "1")

    engine.open(1)

    assert "CONFIG GET is refused" in engine.durability().warning
    engine.close()


def _opening_writer(server: RedisServer) -> StorageError:
    with pytest.raises(StorageError) as caught:
        redis_engine(server.address, "1").open(1)
    return caught.value


def test_an_owner_whose_server_becomes_a_replica_steps_back(
    new_server: NewServer, new_store: NewStore
):
    server, other = new_server(), new_server()
    store = new_store(server)
    with server.client() as client:
        client.replicaof(HOST, other.port)

    with pytest.raises(StorageNotCommitted, match="is a replica"):
        store.enqueue(b"x")
    with pytest.raises(StorageError, match="is a replica"):
        store.engine.heartbeat()


def test_it_is_part_of_a_cluster(new_server: NewServer, free_port: FreePort):
    bus_port = str(free_port())
    error = _opening_writer(new_server("--cluster-enabled", "yes", "--cluster-port", bus_port))

    assert "Redis Cluster" in error.message


def test_it_is_loading(new_server: NewServer, new_store: NewStore, wait_until: WaitUntil):
    server = new_server("--appendfsync", "always")
    store = new_store(server)
    keys = store.enqueue(*[b"x" * 200] * 200)
    with server.client() as client:  # so that there are keys to load, not commands
        client.bgrewriteaof()
        wait_until(lambda: not client.info("persistence")["aof_rewrite_in_progress"])
    server.kill()
    # So many microseconds for each key; the server answers meanwhile.
    server.start("--key-load-delay", "30000", "--loading-process-events-interval-bytes", "1024")

    error = _opening_writer(server)

    assert "is loading its data" in error.message
    store.engine.close()
    wait_until(partial(_can_open, store), seconds=60)
    assert set(store.states(keys)) == {JobState.PENDING}


def _can_open(store: EngineHarness) -> bool:
    try:
        store.engine.open(store.now_ms)
    except StorageError:
        return False
    return True


def test_its_disk_takes_nothing_more(
    new_server: NewServer, new_store: NewStore, wait_until: WaitUntil
):
    server = new_server("--save", "3600 1", "--appendonly", "no")
    store = new_store(server)
    [key] = store.enqueue(b"x")
    blocked = server.folder / "dump.rdb"
    blocked.unlink(missing_ok=True)
    (blocked / "a folder in the way of the snapshot").mkdir(parents=True)
    with server.client() as client:
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")

    with pytest.raises(StorageNotCommitted, match="can't write to its disk"):
        store.enqueue(b"y")

    assert store.states([key]) == [JobState.PENDING]
    (blocked / "a folder in the way of the snapshot").rmdir()
    blocked.rmdir()
    with server.client() as client:
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "ok")
    assert store.states(store.enqueue(b"z")) == [JobState.PENDING]


def test_it_is_busy_with_somebodys_script(
    new_server: NewServer, new_store: NewStore, wait_until: WaitUntil
):
    server = new_server("--busy-reply-threshold", "50")
    store = new_store(server)

    def run_for_ever() -> None:
        with server.client() as client, pytest.raises(redis.ResponseError):
            client.eval("while true do end", 0)

    def is_busy() -> bool:
        with server.client() as client:
            try:
                client.get("x")
            except redis.ResponseError as error:
                return "BUSY" in str(error)
        return False

    thread = threading.Thread(target=run_for_ever)
    thread.start()
    try:
        wait_until(is_busy)
        with pytest.raises(StorageNotCommitted, match="busy with a script"):
            store.enqueue(b"x")
    finally:
        with server.client() as client:
            client.script_kill()
        thread.join()
    assert store.states(store.enqueue(b"x")) == [JobState.PENDING]


def test_it_hangs(new_server: NewServer, new_store: NewStore):
    server = new_server()
    store = new_store(server)
    store.enqueue(b"before")
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StorageError, match="did not answer in time") as caught:
            store.enqueue(b"in doubt")
    finally:
        os.kill(server.pid, signal.SIGCONT)

    assert "whether the last batch was kept is not known" in caught.value.message
    store.engine.close()
    store.engine.open(store.now_ms)
    found = store.ready()
    assert len(found) in (1, 2)
    assert store.depths() == {(1, JobState.PENDING): len(found)}


def test_it_has_forgotten_the_scripts(store: EngineHarness, stranger: redis.Redis):
    [key] = store.enqueue(b"x")
    stranger.script_flush()

    assert store.ready() == [key]
    stranger.script_flush()
    assert [claimed.key for claimed in store.claim()] == [key]
    stranger.script_flush()
    store.engine.heartbeat()


@pytest.mark.parametrize(
    "text",
    [
        "OOM command not allowed when used memory > 'maxmemory'.",
        "-OOM command not allowed when used memory > 'maxmemory'.",  # before release 7
    ],
)
def test_an_error_that_a_script_passes_on_is_put_into_words(text: str):
    assert "raise maxmemory" in refusal_words(text)


# --- a full memory --------------------------------------------------------------------------


def test_a_full_memory_refuses_new_jobs_and_goes_on_with_the_others(
    new_server: NewServer, new_store: NewStore, clock: FakeClock
):
    server = new_server("--maxmemory-policy", "noeviction")
    store = new_store(server)
    keys = store.enqueue(*[Job(b"x" * 1_000, attempts_allowed=2)] * 100)
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)

    for _ in range(3):
        with pytest.raises(StorageFull, match=r"store is full: Redis at .*raise maxmemory"):
            store.enqueue(b"new")
    mixed = Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"y")])])
    with pytest.raises(StorageNotCommitted):
        store.engine.apply(mixed, store.now_ms)

    assert store.depths() == {(1, JobState.PENDING): 100}
    claimed = [one.key for one in store.claim(limit=50)]
    assert store.succeed(*claimed[:10]).succeeded == 10
    assert store.fail(*claimed[10:20]).failed == 10
    assert store.checkpoint(Checkpoint(claimed[20], None, move_to_pending=True)).done == 1
    clock.advance(601)
    expired = store.engine.release_expired(
        QUEUE, claimed_before_ms=store.now_ms, limit=100, now_ms=store.now_ms
    )
    assert len(expired.retried) == 29
    store.engine.heartbeat()
    store.reopen()
    store.engine.create_queue("other", store.now_ms)
    assert len(store.engine.delete_jobs(QUEUE, JobState.PENDING, 1, limit=1_000)) == 90
    with server.client() as client:
        client.config_set("maxmemory", 0)
    [new] = store.enqueue(b"new")
    assert new not in keys


# --- kill -9 of the server, and of its owner ------------------------------------------------


def test_a_server_that_comes_back_empty_is_given_no_id_twice(
    new_server: NewServer, new_store: NewStore, clock: FakeClock
):
    """Nothing is persisted, not even the counters of ids; descriptors of before are out there."""
    server = new_server("--appendonly", "no")
    store = new_store(server)
    keys = store.enqueue(b"a", b"b")
    for _ in range(2):
        clock.advance(1)
        server.kill()
        server.start()
        with pytest.raises(StorageError):
            store.engine.heartbeat()
        store.engine.close()

        store.engine.open(store.now_ms)
        assert store.engine.queues() == frozenset()
        store.engine.create_queue(QUEUE, store.now_ms)
        keys += store.enqueue(b"c", b"d")

    assert len(set(keys)) == 6
    assert keys == sorted(keys)


def test_no_id_is_given_twice_where_a_copy_was_put_back(
    store: EngineHarness, clock: FakeClock, stranger: redis.Redis, shard: str
):
    store.enqueue(b"a")
    store.engine.close()
    copy = {key: stranger.dump(key) or b"" for key in stranger.keys(f"pl?_{shard}*")}
    clock.advance(1)
    store.reopen()
    lost = store.enqueue(b"b", b"c")
    store.engine.close()
    stranger.delete(*stranger.keys(f"pl?_{shard}*"))
    for key, value in copy.items():
        stranger.restore(key, 0, value)

    clock.advance(1)
    store.reopen()

    assert min(store.enqueue(b"d", b"e")) > max(lost)


def test_a_deposed_owner_can_write_nothing(store: EngineHarness, wait_until: WaitUntil):
    [key] = store.enqueue(b"x")
    claims = store.wanted()
    second = EngineHarness(store.make, store.clock)  # waits for the end of the lease

    for _ in range(2):
        with pytest.raises(StorageError):
            store.enqueue(b"late")
        assert store.engine.failure
    with pytest.raises(StorageError, match="is not ours any more"):
        store.engine.heartbeat()
    store.engine.close()
    with pytest.raises(ShardOwned, match=f"owned by process {os.getpid()}"):
        store.engine.open(store.now_ms)

    assert second.start_ms > store.start_ms
    assert second.depths() == {(1, JobState.PENDING): 1}
    assert [one.key for one in second.claim()] == [key]
    assert claims
    second.engine.close()


def test_an_owner_whose_lease_ran_out_goes_on_if_nobody_took_over(
    store: EngineHarness, stranger: redis.Redis, shard: str, wait_until: WaitUntil
):
    wait_until(lambda: not stranger.exists(f"plo_{shard}"), seconds=10 * LEASE_SECONDS)

    store.enqueue(b"x")

    with pytest.raises(ShardOwned):
        store.make().open(store.now_ms)


def test_a_heartbeat_keeps_the_lease(
    store: EngineHarness, stranger: redis.Redis, shard: str, wait_until: WaitUntil
):
    lease = f"plo_{shard}"
    whole_ms = LEASE_SECONDS * 1000
    wait_until(lambda: stranger.pttl(lease) < whole_ms / 2)

    def is_renewed() -> bool:
        store.engine.heartbeat()
        return stranger.pttl(lease) > whole_ms / 2

    wait_until(is_renewed)
