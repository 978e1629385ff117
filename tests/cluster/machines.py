"""Machines for tests: namespaces with processes, a hostname, an address and a clock of their own.

A hub, a network namespace, routes between them, so that a rule of its routing cuts two machines
apart in one direction, silently: nobody gets a reset. A machine shares the file system, and
everything in it ends with its init, which ends with the process that made it, however that ends.

Root needs no user namespace, which a chroot would refuse it; others need one.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_START_SECONDS = 60.0
_POLL_SECONDS = 0.002
_COMMAND_SECONDS = 240.0
_DAY_SECONDS = 86_400
# It reaps whatever loses its parent.
_INIT = ("env", "--ignore-signal=CHLD", "sleep", "infinity")
_ENDS_WITH_ITS_PARENT = ("setpriv", "--pdeathsig", "KILL")
_OFF_PRIORITY, _CUT_PRIORITY = 10, 20


class NoNamespacesError(Exception):
    """This machine allows none."""


class Network:
    """The hub and its machines; `close` ends all of it."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        own_user = own_user_options()
        self.join_options = ("--user", "--preserve-credentials") if own_user else ()
        command = [*_ENDS_WITH_ITS_PARENT, "unshare", *own_user, "--net", "sleep", "infinity"]
        self._hub = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.hub_pid = self._hub.pid
        _wait_for_program(self.hub_pid, "sleep")
        self.in_hub = ["nsenter", "-t", str(self.hub_pid), *self.join_options, "--net"]
        self.do("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward; ip link set dev lo up")

    def machine(self, name: str, *, days_up: int = 0) -> Machine:
        """A new one that runs. `days_up`: by how much its monotonic clock is ahead of ours."""
        machine = Machine(self, name, len(self.machines) + 1, days_up)
        self.machines[name] = machine
        machine.on()
        return machine

    def do(self, *command: str) -> str:
        """Run it in the hub."""
        return _run([*self.in_hub, *command])

    def cut(self, source: Machine, to: Machine, *, one_way: bool = False) -> None:
        """Nothing of what `source` sends reaches `to`; nor the reverse, if not `one_way`."""
        self._rule("add", _CUT_PRIORITY, f"from {source.address} to {to.address}")
        if not one_way:
            self._rule("add", _CUT_PRIORITY, f"from {to.address} to {source.address}")

    def heal(self) -> None:
        """Undo all cuts."""
        while f"{_CUT_PRIORITY}:" in self.do("ip", "rule"):
            self.do("ip", "rule", "del", "priority", str(_CUT_PRIORITY))

    def isolate(self, machine: Machine) -> None:
        for side in ("from", "to"):
            self._rule("add", _OFF_PRIORITY + machine.number, f"{side} {machine.address}")

    def rejoin(self, machine: Machine) -> None:
        for side in ("from", "to"):
            self._rule("del", _OFF_PRIORITY + machine.number, f"{side} {machine.address}")

    def _rule(self, verb: str, priority: int, which: str) -> None:
        self.do("ip", "rule", verb, "priority", str(priority), *which.split(), "blackhole")

    def close(self) -> None:
        for machine in self.machines.values():
            machine.kill()
        self._hub.kill()
        self._hub.wait()


class Machine:
    """One machine; it can be switched off and on again, frozen, and cut from others."""

    def __init__(self, network: Network, name: str, number: int, days_up: int) -> None:
        self.name = name
        self.number = number
        self.address = f"10.77.{number}.2"
        self._gateway = f"10.77.{number}.1"
        self._network = network
        self._days_up = days_up
        self._init: subprocess.Popen[bytes] | None = None
        self._init_pid = 0
        self._started: list[subprocess.Popen[bytes]] = []
        self._was_off = False

    # --- on and off -------------------------------------------------------------------------

    @property
    def is_on(self) -> bool:
        return self._init is not None

    def on(self) -> None:
        """Boot it: without any of its processes."""
        assert self._init is None, f"{self.name} is on"
        offset = str(self._days_up * _DAY_SECONDS)
        self._init = subprocess.Popen(
            [
                *(*self._network.in_hub, *_ENDS_WITH_ITS_PARENT, "unshare"),
                *("--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL"),
                *("--mount-proc", "--time", "--monotonic", offset, "--boottime", offset),
                *("sh", "-c", f"hostname {self.name}; exec {shlex.join(_INIT)}"),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # when its child is killed it complains of a signal mask
        )
        self._init_pid = _only_child(self._init)
        _wait_for_program(self._init_pid, "sleep")
        self._link()

    def _link(self) -> None:
        outside, pid = self.name, str(self._init_pid)
        self._network.do(
            *("sh", "-c"),
            # Sockets that nobody owns any more would still send through the link of before.
            f"ip link del dev {outside} 2> /dev/null;"
            f" ip link add name {outside} type veth peer name eth0 netns {pid}"
            f" && ip addr add {self._gateway}/24 dev {outside} && ip link set dev {outside} up",
        )
        self.run(
            *("sh", "-c"),
            f"ip link set dev lo up && ip addr add {self.address}/24 dev eth0"
            f" && ip link set dev eth0 up && ip route add default via {self._gateway}",
        )
        if self._was_off:
            self._network.rejoin(self)
            self._was_off = False

    def off(self) -> None:
        """Cut the power: nobody gets a word, and nothing of it runs."""
        self._network.isolate(self)
        self._was_off = True
        self.kill()

    def kill(self) -> None:
        """End everything in it. Safe to repeat."""
        init, self._init = self._init, None
        if init is None:
            return
        os.kill(self._init_pid, signal.SIGKILL)
        for process in self._started:
            process.send_signal(signal.SIGCONT)  # they reap what they have started
            process.wait()
        self._started.clear()
        init.wait()

    def end_all(self) -> None:
        """Kill all of its processes; it stays on."""
        while running := [pid for pid in self.pids() if pid != self._init_pid]:
            for pid in running:
                _signal(pid, signal.SIGKILL)
            for process in self._started:
                process.wait()
            time.sleep(_POLL_SECONDS)

    # --- freezing ---------------------------------------------------------------------------

    def freeze(self) -> None:
        """Stop every process of it; its connections stay."""
        pids: list[int] = []
        while pids != (pids := list(self.pids())) or not all(map(_is_stopped, pids)):
            for pid in pids:
                _signal(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.pids():
            _signal(pid, signal.SIGCONT)
        for process in self._started:
            process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started

    def pids(self) -> Iterator[int]:
        """Its processes, by our numbers."""
        own = Path(f"/proc/{self._init_pid}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if (entry / "ns/pid").readlink() == own:
                        yield int(entry.name)
                except OSError:
                    continue  # ended meanwhile, or another user's

    # --- commands ---------------------------------------------------------------------------

    def enter(self, *command: str) -> list[str]:
        """The command line that runs `command` in the machine."""
        assert self._init is not None, f"{self.name} is off"
        return [
            *("nsenter", "-t", str(self._init_pid), *self._network.join_options),
            *("--mount", "--uts", "--ipc", "--net", "--pid", "--time", "--root", "--wd"),
            *command,
        ]

    def run(
        self,
        *command: str,
        environment: Mapping[str, str] | None = None,
        seconds: float = _COMMAND_SECONDS,
    ) -> str:
        """What it says; AssertionError if it fails."""
        return _run(self.enter(*command), environment, seconds)

    def start(
        self,
        *command: str,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A process that ends with the machine. Its input is a pipe; `log`: where its output goes,
        else a pipe, too."""
        output = subprocess.PIPE if log is None else log.open("ab")
        process = subprocess.Popen(
            self.enter(*command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=None if log is None else output,
            env={**os.environ, **(environment or {})},
        )
        if not isinstance(output, int):
            output.close()
        self._started = [one for one in self._started if one.poll() is None]
        self._started.append(process)
        return process


def own_user_options() -> Sequence[str]:
    """What `unshare` needs to make namespaces here."""
    said = ""
    for options in ([], ["--user", "--map-root-user"]):
        if not options and os.geteuid() != 0:
            continue
        command = ["unshare", *options, "--net", "--pid", "--time", "--fork", "--mount-proc"]
        try:
            tried = subprocess.run(
                [*command, "ip", "rule"], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise NoNamespacesError(
                f"{error}; on Debian: apt-get install util-linux iproute2"
            ) from error
        if tried.returncode == 0:
            return options
        said = tried.stderr.strip()
    raise NoNamespacesError(f"no namespaces can be made here: {said}")


def _run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float = _COMMAND_SECONDS,
) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=seconds,
    )
    said = f"{shlex.join(command)} ended with {done.returncode}: {done.stdout}"
    assert done.returncode == 0, said
    return done.stdout


def _only_child(parent: subprocess.Popen[bytes]) -> int:
    path = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    deadline = time.monotonic() + _START_SECONDS
    while not (found := path.read_text().split()):
        assert parent.poll() is None, "a machine did not start"
        assert time.monotonic() < deadline, "a machine does not start"
        time.sleep(_POLL_SECONDS)
    return int(found[0])


def _wait_for_program(pid: int, program: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while Path(f"/proc/{pid}/comm").read_text().strip() != program:
        assert time.monotonic() < deadline, f"{program} does not start"
        time.sleep(_POLL_SECONDS)


def _is_stopped(pid: int) -> bool:
    """Or gone, or about to stop: one that has just forked may wait for a child that is stopped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "TZXD"


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
