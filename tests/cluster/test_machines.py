"""The machines themselves: a cut is silent, what is off is gone, nothing is left over."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cluster.machines import Machine, Network
from tests.conftest import WaitUntil

# It takes 10 ms, and more on a busy machine.
OFF_SECONDS = 30.0
NOTICED_SECONDS = 45.0  # after 3 s, and more on a busy machine
PORT = 9010
# Prints every line that comes by UDP, with who sent it.
LISTEN = f"""
import socket
heard = socket.socket(type=socket.SOCK_DGRAM)
heard.bind(("", {PORT}))
while True:
    text, (address, _) = heard.recvfrom(100)
    print(address, text.decode(), flush=True)
"""
SAY = f"""
import socket, sys
socket.socket(type=socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), (sys.argv[1], {PORT}))
"""
# Says "ready" once it is connected, and then what becomes of that: what is read, or an error.
HOLD = f"""
import socket, sys
try:
    held = socket.create_connection((sys.argv[1], {PORT}), timeout=3)
    print("ready", flush=True)
    held.settimeout(float(sys.argv[2]))
    held.sendall(b"x")
    print(held.recv(1) or "closed", flush=True)
except OSError as error:
    print(type(error).__name__, flush=True)
"""
ACCEPT = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
held = []
while True:
    held.append(server.accept())
"""


# One end of a connection that is encrypted with a cluster's key, and then idle. Says "ready" once
# it has heard of the other, and "gone" when it finds that it has lost it.
KEPT = """
import sys, zmq
from pinlaterd.wire.curve import ClusterKey
key, listens, endpoint = ClusterKey(bytes(32), "prod"), sys.argv[1] == "listens", sys.argv[2]
end = zmq.Context().socket(zmq.ROUTER if listens else zmq.DEALER)
if listens:
    key.listen(end, endpoint)
    print("ready", flush=True)
    end.send_multipart(end.recv_multipart())
else:
    key.call(end)
    end.connect(endpoint)
    end.send(b"hello")
    end.recv()
events = end.get_monitor_socket(zmq.EVENT_DISCONNECTED)
print("ready", flush=True)
events.recv()
print("gone", flush=True)
"""
ECHO = """
print("ready", flush=True)
while True:
    print(input(), flush=True)
"""

Pair = tuple[Machine, Machine]


@pytest.fixture
def network(network_here: Callable[[], Network]) -> Iterator[Network]:
    network = network_here()
    yield network
    network.close()


@pytest.fixture
def pair(network: Network) -> Pair:
    return network.machine("left", days_up=3), network.machine("right", days_up=10)


class Listener:
    def __init__(self, machine: Machine, wait_until: WaitUntil, log: Path) -> None:
        self._log = log
        machine.start(sys.executable, "-c", LISTEN, log=log)
        wait_until(lambda: self._is_bound(machine))

    @staticmethod
    def _is_bound(machine: Machine) -> bool:
        return f"{PORT:04X}" in machine.run("cat", "/proc/net/udp")

    def heard(self) -> list[str]:
        return self._log.read_text().split("\n")[:-1]


def say(machine: Machine, to: Machine, text: str) -> None:
    machine.run(sys.executable, "-c", SAY, to.address, text)


def test_a_machine_has_an_address_a_name_and_a_clock_of_its_own(pair: Pair):
    uptimes = []
    for machine in pair:
        assert machine.run("hostname") == f"{machine.name}\n"
        assert machine.address in machine.run("ip", "address", "show", "dev", "eth0")
        clock = "import time; print(time.monotonic())"
        uptimes.append(float(machine.run(sys.executable, "-c", clock)) - time.monotonic())
    assert uptimes == [pytest.approx(3 * 86_400, abs=60), pytest.approx(10 * 86_400, abs=60)]


def test_cuts_in_either_direction_and_both(
    network: Network, pair: Pair, wait_until: WaitUntil, tmp_path: Path
):
    left, right = pair
    at_left = Listener(left, wait_until, tmp_path / "left")
    at_right = Listener(right, wait_until, tmp_path / "right")

    network.cut(left, right, one_way=True)
    say(left, right, "1")
    say(right, left, "2")
    wait_until(lambda: at_left.heard() == [f"{right.address} 2"])
    network.cut(right, left, one_way=True)
    say(right, left, "3")
    network.heal()
    say(left, right, "4")
    say(right, left, "5")
    wait_until(lambda: at_left.heard() == [f"{right.address} 2", f"{right.address} 5"])
    wait_until(lambda: at_right.heard() == [f"{left.address} 4"])


@pytest.mark.parametrize("how", ["cut", "off"])
def test_nobody_is_told_of_a_cut_or_of_a_machine_that_went_off(
    network: Network, pair: Pair, how: str
):
    left, right = pair
    started(right, ACCEPT)
    before = started(left, HOLD, right.address, "0.5")
    if how == "cut":
        network.cut(left, right)
    else:
        right.off()
    assert next_line(before) == "TimeoutError"
    assert next_line(left.start(sys.executable, "-c", HOLD, right.address, "9")) == "TimeoutError"

    network.heal()
    if how == "off":
        right.on()
        started(right, ACCEPT)
    started(left, HOLD, right.address, "9")


@pytest.mark.parametrize("towards", ["listener", "caller"])
def test_both_ends_of_an_idle_connection_notice_a_silent_cut(
    network: Network, pair: Pair, towards: str
):
    left, right = pair
    endpoint = f"tcp://{right.address}:{PORT}"
    listener = started(right, KEPT, "listens", endpoint)
    caller = started(left, KEPT, "calls", endpoint)
    assert next_line(listener) == "ready"

    cut = (left, right) if towards == "listener" else (right, left)
    began = time.monotonic()
    network.cut(*cut, one_way=True)
    for end in (caller, listener):
        assert next_line(end) == "gone"
    assert time.monotonic() - began < NOTICED_SECONDS


def started(machine: Machine, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Once it says so."""
    process = machine.start(sys.executable, "-c", program, *arguments)
    assert next_line(process) == "ready"
    return process


def next_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def test_off_ends_everything_at_once(pair: Pair, wait_until: WaitUntil):
    left, _ = pair
    for _ in range(5):
        left.start("setsid", "sh", "-c", "sleep 1000 & sleep 1001; :")
    wait_until(lambda: len(list(left.pids())) == 1 + 5 * 3)
    pids = list(left.pids())
    left.freeze()  # even so

    began = time.monotonic()
    left.off()
    assert time.monotonic() - began < OFF_SECONDS
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    left.on()
    assert len(list(left.pids())) == 1


def test_a_frozen_machine_goes_on_where_it_was(pair: Pair):
    left, _ = pair
    echo = started(left, ECHO)
    assert echo.stdin is not None
    assert echo.stdout is not None
    left.freeze()
    echo.stdin.write(b"heard\n")
    echo.stdin.flush()
    assert not select.select([echo.stdout], [], [], 0.2)[0]
    left.thaw()
    assert next_line(echo) == "heard"
    echo.stdin.close()
    assert echo.wait() != 0


def test_nothing_is_left_when_the_tests_are_killed(wait_until: WaitUntil):
    made = """
import sys, time
from tests.cluster.machines import Network
network = Network()
machine = network.machine("a")
machine.start("sleep", "1000")
while len(list(machine.pids())) < 2:
    time.sleep(0.01)
print(network.hub_pid, *machine.pids(), flush=True)
time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", made], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        pids = [int(pid) for pid in maker.stdout.readline().split()]
        maker.send_signal(signal.SIGKILL)
    assert len(pids) == 3
    wait_until(lambda: all(_has_ended(pid) for pid in pids))


def _has_ended(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True
