"""The whole service, as the servers of a cluster say together: one status, one set of figures.

Each server is asked when somebody wants to know; one that does not answer in time is a problem of
the service. Names of processes are those of their server with their own behind: `jobs-1/router`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pinlaterd.coordinator.processes import ProcessStatus, ShardStatus, Status
from pinlaterd.stats import StatsSnapshot


class Answer(msgspec.Struct, frozen=True):
    """What one server says of itself."""

    status: Status
    stats: Mapping[str, StatsSnapshot]  # by process


def whole_status(own: Status, answers: Mapping[str, Answer | None]) -> Status:
    """`answers`: of the other servers that belong to the cluster, None where one gave none."""
    statuses = {own["server"]: own}
    statuses |= {name: answer.status for name, answer in answers.items() if answer is not None}
    shards = [_of_owner(shard, statuses) for shard in own["shards"]]
    problems = [
        *_from_each(statuses, "problems"),
        *(f"{name}: does not answer" for name, answer in answers.items() if answer is None),
        *(f"shard {s['name']} has no owner" for s in shards if s["server"] not in statuses),
    ]
    return {
        **own,
        "healthy": not problems,
        "problems": problems,
        "config_problems": _from_each(statuses, "config_problems"),
        "needs_restart": _from_each(statuses, "needs_restart"),
        "warnings": _from_each(statuses, "warnings"),
        "processes": [
            _named(process, name)
            for name in sorted(statuses)
            for process in statuses[name]["processes"]
        ],
        "shards": shards,
    }


def whole_stats(
    server: str, own: Mapping[str, StatsSnapshot], answers: Mapping[str, Answer | None]
) -> Mapping[str, StatsSnapshot]:
    stats = {server: own}
    stats |= {name: answer.stats for name, answer in answers.items() if answer is not None}
    return {
        f"{name}/{process}": snapshot
        for name in sorted(stats)
        for process, snapshot in stats[name].items()
    }


def _from_each(statuses: Mapping[str, Status], key: str) -> Sequence[str]:
    """Of all servers; what all say alike is said once, and of nobody."""
    texts: dict[str, list[str]] = {}
    for name in sorted(statuses):
        for text in statuses[name][key]:  # type: ignore[literal-required]
            texts.setdefault(text, []).append(name)
    return [
        text if len(names) == len(statuses) else f"{', '.join(names)}: {text}"
        for text, names in texts.items()
    ]


def _named(process: ProcessStatus, server: str) -> ProcessStatus:
    return {**process, "name": f"{server}/{process['name']}"}


def _of_owner(shard: ShardStatus, statuses: Mapping[str, Status]) -> ShardStatus:
    """As its owner's server says."""
    owner = statuses.get(shard["server"])
    found = [] if owner is None else [s for s in owner["shards"] if s["name"] == shard["name"]]
    return found[0] if found else shard
