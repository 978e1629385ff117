"""Where everything of a deployment lies, relative to its folder DIR.

Every process makes DIR its current folder first (`enter`), so that the paths of Unix sockets
stay short: the kernel allows them 107 bytes.
"""

from __future__ import annotations

import os
from pathlib import Path

ETC = Path("etc")
RUN = Path("run")
DATA = Path("data")

SERVER_FILE = "pinlaterd.yaml"
SHARDS_FILE = "shards.yaml"
QUEUES_FILE = "queues.yaml"
SUPERVISORD_FILE = "supervisord.conf"
CONFIG_FILES = (SERVER_FILE, SHARDS_FILE, QUEUES_FILE)

LOGS = RUN / "log"
SHARD_PROGRAMS = RUN / "supervisord.d"
STATS_SOCKET = RUN / "stats.sock"
SUPERVISOR_SOCKET = RUN / "supervisor.sock"
SUPERVISOR_PID_FILE = RUN / "supervisord.pid"
COORDINATOR_LOCK = RUN / "coordinator.lock"
SNAPSHOT_FILE = RUN / "snapshot.json"
CONFIG_FILE = RUN / "config.json"
CONFIG_LOCK = RUN / "config.lock"
PROGRAMS_LOCK = RUN / "programs.lock"
PROGRAMS_DUE = RUN / "programs.due"
RATES_FILE = RUN / "rates.json"
SERVER_SET_COPY = RUN / "server_set"

_HANDOVER = "-handover"

COORDINATOR_ENDPOINT = f"ipc://{RUN}/coordinator.ipc"


def handover_program(router: str) -> str:
    """The name of the process that serves in a router's place while that one is restarted."""
    return f"{router}{_HANDOVER}"


def is_handover_peer(program: str) -> bool:
    # A shard's name may end so, too.
    return program.startswith("router") and program.endswith(_HANDOVER)


def counterpart(router: str) -> str:
    """The router that a handover peer serves for, or the handover peer of a router."""
    return router.removesuffix(_HANDOVER) if is_handover_peer(router) else handover_program(router)


def listener_socket(router: str) -> Path:
    """Where a router's process hands out its listening sockets."""
    return RUN / f"{router}.listener"


def shard_endpoint(shard: str) -> str:
    """The ZeroMQ address at which a shard's owner takes calls."""
    return f"ipc://{RUN}/shard-{shard}.ipc"


def clock_file(shard: str) -> Path:
    """Where a shard notes the time each second, for its successor."""
    return RUN / f"{shard_program(shard)}.clock"


def move_lock(shard: str) -> Path:
    """Held by the command that moves a shard's jobs."""
    return RUN / f"move-{shard}.lock"


def shard_program(shard: str) -> str:
    """The name of a shard's process, in supervisord and in reports."""
    return f"shard-{shard}"


def enter(etc: Path) -> Path:
    """Make the deployment that `etc` (DIR/etc) belongs to the current folder.

    Returns what `etc` is called from there. Creates DIR/run and DIR/data, for their owner only."""
    etc = Path(os.path.abspath(etc))  # noqa: PTH100  (resolve() would follow a linked etc away)
    os.chdir(etc.parent)
    for folder in (RUN, DATA):
        folder.mkdir(mode=0o700, exist_ok=True)
    return Path(etc.name)
