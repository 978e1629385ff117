"""What befalls a cluster: each fault begins and ends, and tells in how many seconds all shards
served again through the routers that can serve.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from random import Random

from tests.checker.shim import control_shim
from tests.cluster.run import Run
from tests.cluster.site import MOVABLE_SHARDS, Server, Site, wait_until

# Ten seconds are promised; a busy machine may need more.
SERVED_SECONDS = 100.0
SESSION_SECONDS = 4.0
# How long calls wait for a shard whose server is restarted: SESSION_SECONDS and a take-over.
AWAITED_SECONDS = SESSION_SECONDS + 5.0
_FREEZE_SECONDS = (8.0, 60.0)
_ZOOKEEPER_AWAY_SECONDS = 5 * SESSION_SECONDS
_CLOCK_STEP_SECONDS, _CLOCK_STEPPED_SECONDS = 3600, 3.0

Fault = Callable[[Run, Random], float]


# --- what is waited for ---------------------------------------------------------------------


def takes_over(run: Run, victim: Server, began: float) -> float:
    """Seconds until all serve without it."""
    others = run.site.others(victim)
    seconds = run.wait_until_served(began, servers=others, shards=MOVABLE_SHARDS)
    assert seconds < SERVED_SECONDS
    return seconds


def gives_up_all(run: Run, victim: Server, began: float) -> float:
    """Seconds until others own its shards, and all serve without it."""
    wait_until(lambda: owns_nothing(run.site, victim), seconds=2 * SERVED_SECONDS)
    takes_over(run, victim, time.monotonic())
    return time.monotonic() - began


def owns_nothing(site: Site, server: Server) -> bool:
    """As the others say, of shards that can move."""
    owners = site.owners(of=site.others(server))
    return server not in [owners[shard] for shard in MOVABLE_SHARDS]


def wait_until_it_runs(server: Server, program: str) -> None:
    wait_until(lambda: server.pid_of(program))


# --- machines -------------------------------------------------------------------------------


def off(run: Run, _rng: Random) -> float:
    victim = run.follower()
    with run.fault("off") as began:
        victim.machine.off()
        seconds = takes_over(run, victim, began)
        wait_until(lambda: owns_nothing(run.site, victim) and run.site.take_overs(began))
        run.site.restore()
    return seconds


def off_with_leaders(run: Run, _rng: Random) -> float:
    victim, zookeeper = run.leader(), run.site.zookeeper_leader()
    with run.fault("off with leaders") as began:
        victim.machine.off()
        zookeeper.machine.off()
        seconds = takes_over(run, victim, began)
        assert run.site.leader() is not victim
        run.site.restore()
    return seconds


def two_off(run: Run, _rng: Random) -> float:
    """Half or more at once may be the network, so that they are waited for."""
    left = run.site.follower()
    victims = run.site.others(left)
    run.site.gather_shards(victims[0])
    with run.fault("two off") as began:
        for victim in victims:
            victim.machine.off()
        seconds = run.wait_until_served(began, servers=[left], shards=MOVABLE_SHARDS)
        assert seconds < 10 + SERVED_SECONDS
        run.site.restore()
    return seconds


def freeze(run: Run, rng: Random, *, longest_seconds: float = _FREEZE_SECONDS[1]) -> float:
    """Its shards are others' by the time that it goes on, which it has to find out."""
    victim = run.follower()
    with run.fault("freeze", holds=True) as began:
        thaws = began + min(rng.uniform(*_FREEZE_SECONDS), longest_seconds)
        victim.machine.freeze()
        seconds = takes_over(run, victim, began)
        time.sleep(max(0.0, thaws - time.monotonic()))
        victim.machine.thaw()
        run.wait_until_served(time.monotonic())
        run.site.wait_until_serving()
    return seconds


# --- networks -------------------------------------------------------------------------------


def cut(run: Run, rng: Random) -> float:
    """Of a server from ZooKeeper, the stores or other servers, in one direction or both."""
    name = rng.choice(list(CUTS))
    return cut_from(run, name, rng.choice(DIRECTIONS))


DIRECTIONS = ("both", "out", "in")


def cut_from(run: Run, name: str, direction: str) -> float:
    victim, site = run.follower(), run.site
    with run.fault(f"cut from {name}, {direction}", holds=True) as began:
        for other in CUTS[name](site, victim):
            ends = (victim.machine, other) if direction != "in" else (other, victim.machine)
            site.network.cut(*ends, one_way=direction != "both")
        seconds = gives_up_all(run, victim, began)
        site.restore()
    return seconds


CUTS = {
    "ZooKeeper": lambda site, _: [zookeeper.machine for zookeeper in site.zookeepers],
    "the store": lambda site, _: [site.store],
    "other servers": lambda site, victim: [other.machine for other in site.others(victim)],
}


# --- ZooKeeper ------------------------------------------------------------------------------


def zookeeper_leader_off(run: Run, _rng: Random) -> float:
    began = time.monotonic()
    run.site.zookeeper_leader().machine.off()
    time.sleep(3 * SESSION_SECONDS)
    seconds = run.wait_until_served(time.monotonic())
    run.site.restore()
    assert run.site.take_overs(began) == []
    return seconds


def zookeeper_off(run: Run, rng: Random) -> float:
    """All of it, or its majority."""
    began, site = time.monotonic(), run.site
    for zookeeper in rng.sample(site.zookeepers, rng.choice((2, 3))):
        zookeeper.machine.off()
    time.sleep(_ZOOKEEPER_AWAY_SECONDS)
    seconds = run.wait_until_served(time.monotonic())
    site.restore()
    run.wait_until_served(time.monotonic())
    time.sleep(2 * SESSION_SECONDS)
    assert site.take_overs(began) == []
    return seconds


# --- processes ------------------------------------------------------------------------------


def kill(run: Run, rng: Random) -> float:
    """kill -9 of a router, or of a shard's process."""
    site, owners = run.site, run.site.owners()
    shard = rng.choice(site.shards)
    victims = [(server, "router") for server in site.servers]
    victim, program = rng.choice([*victims, (owners[shard], f"shard-{shard}")])
    with run.fault(f"{program} killed") as began:
        victim.kill(program)
        seconds = run.wait_until_served(began)
    assert site.take_overs(began) == []
    return seconds


def kill_coordinator(run: Run, rng: Random) -> float:
    """The leader's or another's: nothing moves."""
    site = run.site
    victim = rng.choice((run.leader, run.follower))()
    began = time.monotonic()
    victim.kill("coordinator")
    wait_until_it_runs(victim, "coordinator")
    seconds = run.wait_until_served(began)
    time.sleep(2 * SESSION_SECONDS)  # its session would have ended
    site.wait_until_serving()
    assert site.take_overs(began) == []
    return seconds


def hang_coordinator(run: Run, _rng: Random) -> float:
    """It is as if its machine were off: its shards go, and its router serves nobody."""
    victim = run.follower()
    with run.fault("coordinator hangs", holds=True) as began:
        pid = victim.pid_of("coordinator")
        os.kill(pid, signal.SIGSTOP)
        seconds = gives_up_all(run, victim, began)
        os.kill(pid, signal.SIGCONT)
        run.site.wait_until_serving()
        run.wait_until_served(time.monotonic())
    return seconds


# --- what lets no call fail -----------------------------------------------------------------


def moves(run: Run, rng: Random) -> float:
    """All shards go to one server, by maintenance of the others: four planned moves, if it had
    none. Tells of the longest call."""
    site, began = run.site, time.monotonic()
    owners = [site.owners()[shard] for shard in MOVABLE_SHARDS]
    site.gather_shards(min(rng.sample(site.servers, len(site.servers)), key=owners.count))
    run.wait_until_served(time.monotonic())
    return run.longest_call(began, shards=MOVABLE_SHARDS)


def leave(run: Run, _rng: Random) -> float:
    """A server is stopped and started again, once its own clients have gone elsewhere; tells of
    the longest call."""
    victim, site = run.follower(all_move=True), run.site
    run.use(site.others(victim))
    began = time.monotonic()
    victim.down()
    wait_until(lambda: owns_nothing(site, victim))
    victim.up()
    site.wait_until_serving()
    run.use(site.servers)
    run.wait_until_served(time.monotonic())
    return run.longest_call(began, shards=MOVABLE_SHARDS)


def clock(run: Run, rng: Random) -> float:
    """The wall clock of a server is an hour ahead or behind for a while."""
    victim, began = rng.choice(run.site.servers), time.monotonic()
    control_shim(victim.folder, clock_seconds=rng.choice((1, -1)) * _CLOCK_STEP_SECONDS)
    time.sleep(_CLOCK_STEPPED_SECONDS)
    control_shim(victim.folder)
    seconds = run.wait_until_served(began)
    assert run.site.take_overs(began) == []
    return seconds


FAULTS: Mapping[str, Fault] = {
    "off": off,
    "leaders-off": off_with_leaders,
    "two-off": two_off,
    "freeze": freeze,
    "cut": cut,
    "zookeeper-leader": zookeeper_leader_off,
    "zookeeper-off": zookeeper_off,
    "kill": kill,
    "kill-coordinator": kill_coordinator,
    "hang-coordinator": hang_coordinator,
    "moves": moves,
    "leave": leave,
    "clock": clock,
}
