"""ZeroMQ on virtual time, as far as `pinlaterd.wire` uses it: DEALER to ROUTER over ipc.

A connection delivers in order, after a random delay each way, until either process dies. What was
under way to a DEALER is lost then; what was under way to a ROUTER is lost or, at random, reaches
that one's successor, as ZeroMQ may have it. A DEALER connects again as long as it is open. What is
sent to a frozen process waits for it. These sockets stand in for `zmq.Context` and `zmq.Socket`; a
shard's end, which polls, is `SimulatedShardEnd`.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import zmq

from pinlaterd.wire.envelope import Received
from tests.simulation.world import AsyncProcess, Process, World

_CONNECT_SECONDS = 0.05
_TICK_SECONDS = 1e-6
_KEPT_FOR_SUCCESSOR = 0.5


class Network:
    """All endpoints and connections. `delay` draws how long a message takes, in seconds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.slowest_seconds = 0.001
        self._bound: dict[str, RouterSocket] = {}
        self._numbers = count(1)

    def delay(self) -> float:
        return self.world.rng.random() * self.slowest_seconds

    def number(self) -> int:
        return next(self._numbers)

    def bind(self, endpoint: str, router: RouterSocket) -> None:
        self._bound[endpoint] = router

    def connect(self, dealer: DealerSocket) -> None:
        """Try now, and again and again while it is not connected."""
        if dealer.closed or not dealer.process.alive or dealer.connection is not None:
            return
        router = self._bound.get(dealer.endpoint)
        if router is None or router.closed or not router.process.alive:
            self.world.after(_CONNECT_SECONDS, lambda: self.connect(dealer))
            return
        connection = Connection(self, dealer, router)
        dealer.connection = connection
        router.connections[connection.identity] = connection
        left, dealer.left = dealer.left, []
        for frame in left:
            connection.carry(frame, to_router=True)
        dealer.monitored(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.on_connect()
        dealer.process.wake()

    def process_ended(self, process: Process) -> None:
        """Its connections end, as the kernel ends them."""
        for router in self._bound.values():
            for connection in list(router.connections.values()):
                if process in (router.process, connection.dealer.process):
                    connection.end()


class Connection:
    def __init__(self, network: Network, dealer: DealerSocket, router: RouterSocket) -> None:
        self.network = network
        self.dealer = dealer
        self.router = router
        self.identity = struct.pack(">I", network.number())
        self.open = True
        self.on_end: list[Callable[[], None]] = []  # of the router's side
        self._last_arrival = {True: 0.0, False: 0.0}  # by direction: to the router

    def carry(
        self, frame: bytes, *, to_router: bool, on_lost: Callable[[], None] | None = None
    ) -> bool:
        """False if the connection has ended; `on_lost` is called if it ends before the arrival."""
        if not self.open:
            return False
        world = self.network.world
        # In order: at the same moment the world would draw the order.
        arrival = max(
            world.now + self.network.delay(), self._last_arrival[to_router] + _TICK_SECONDS
        )
        self._last_arrival[to_router] = arrival

        def arrive() -> None:
            if not self.open:
                if on_lost is not None:
                    on_lost()
                elif to_router and self.network.world.rng.random() < _KEPT_FOR_SUCCESSOR:
                    self.dealer.left.append(frame)
                return
            if to_router:
                self.router.arrived((self.identity, frame))
            else:
                self.dealer.arrived((frame,))

        world.at(arrival, arrive)
        return True

    def end(self) -> None:
        if not self.open:
            return
        self.open = False
        self.router.connections.pop(self.identity, None)
        for notify in self.on_end:
            notify()
        self.router.process.wake()
        self.dealer.connection = None
        self.dealer.monitored(zmq.EVENT_DISCONNECTED)
        self.dealer.on_end()
        self.dealer.process.wake()
        self.network.world.after(_CONNECT_SECONDS, lambda: self.network.connect(self.dealer))


class _Socket:
    """What both kinds share: an inbox, and a descriptor that is readable once for each arrival."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network = network
        self.process = process
        self.closed = False
        self._inbox: deque[tuple[bytes, ...]] = deque()
        self._descriptor = 1_000_000 + network.number()

    def setsockopt(self, option: int, value: int) -> None:
        """High-water marks and time-outs are the network's."""

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self._descriptor
        assert option == zmq.EVENTS
        return int(zmq.POLLIN) if self._inbox else 0

    def arrived(self, frames: tuple[bytes, ...]) -> None:
        if not self.closed:
            self._inbox.append(frames)
            self._edge()

    def _edge(self) -> None:
        if isinstance(self.process, AsyncProcess):
            self.process.loop.edge(self._descriptor)
        else:
            self.process.edges.add(self._descriptor)
            self.process.wake()

    def recv_multipart(self, flags: int = 0) -> Sequence[bytes]:
        if not self._inbox:
            raise zmq.Again
        return self._inbox.popleft()

    def recv(self, flags: int = 0) -> bytes:
        (frame,) = self.recv_multipart(flags)
        return frame

    def close(self, linger: int | None = None) -> None:
        self.closed = True


class _Monitor(_Socket):
    pass


class DealerSocket(_Socket):
    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        self.connection: Connection | None = None
        self.endpoint = ""
        self.left: list[bytes] = []  # undelivered when the connection ended
        self.on_connect: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None  # of its connection
        self._monitor: _Monitor | None = None

    def connect(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.network.world.after(self.network.delay(), lambda: self.network.connect(self))

    def get_monitor_socket(self, events: int) -> _Monitor:
        self._monitor = _Monitor(self.network, self.process)
        return self._monitor

    def disable_monitor(self) -> None:
        self._monitor = None

    def monitored(self, event: int) -> None:
        if self._monitor is not None:
            self._monitor.arrived((struct.pack("=hi", event, 0), self.endpoint.encode()))

    def send(self, frame: bytes, flags: int = 0) -> None:
        if self.connection is None:
            raise zmq.Again
        self.connection.carry(frame, to_router=True)

    def close(self, linger: int | None = None) -> None:
        super().close()
        if self.connection is not None:
            self.connection.end()


class RouterSocket(_Socket):
    def __init__(self, network: Network, process: Process) -> None:
        super().__init__(network, process)
        self.connections: dict[bytes, Connection] = {}

    def bind(self, endpoint: str) -> None:
        self.network.bind(endpoint, self)

    def send_multipart(self, frames: Sequence[bytes], flags: int = 0) -> None:
        identity, frame = frames
        connection = self.connections.get(identity)
        if connection is not None:
            connection.carry(frame, to_router=False)

    def close(self, linger: int | None = None) -> None:
        super().close()
        for connection in list(self.connections.values()):
            connection.end()


class SimulatedContext:
    """Stands in for `zmq.Context` in one process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def socket(self, kind: int) -> Any:
        made = RouterSocket if kind == zmq.ROUTER else DealerSocket
        return made(self._network, self._process)


class SimulatedShardEnd:
    """Stands in for `wire.envelope.ShardEnd`: the same promises, on virtual time."""

    def __init__(self, network: Network, process: Process) -> None:
        self._socket = RouterSocket(network, process)
        self._process = process

    def bind(self, endpoint: str) -> None:
        self._socket.bind(endpoint)

    def bind_again(self) -> None: ...

    def watch(self, descriptor: int) -> None: ...

    def forget(self, descriptor: int) -> None: ...

    def wait(self, until: Callable[[], float]) -> frozenset[int]:
        if not self._socket.getsockopt(zmq.EVENTS):
            seconds = until()
            if seconds > 0:
                self._process.sleep(seconds)
        edges, self._process.edges = self._process.edges, set()
        return frozenset(edges)

    def receive(self, most_frames: int, most_bytes: int) -> list[Received]:
        received: list[Received] = []
        while len(received) < most_frames and self._socket.getsockopt(zmq.EVENTS):
            router, frame = self._socket.recv_multipart()
            received.append(Received(router, frame))
        return received

    def send(self, router: bytes, frame: bytes) -> bool:
        connection = self._socket.connections.get(router)
        if connection is None:
            return False
        connection.carry(frame, to_router=False)
        return True

    def close(self) -> None:
        self._socket.close()
