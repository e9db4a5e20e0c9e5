"""A run's log read for the audit, and the audit's answer for people and for --json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from connectors.arrow import CorruptRecord, checksum
from connectors.config import Config
from connectors.kafka.client import Cluster, Record
from connectors.kafka.tail import PolicyTail
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import (
    Closed,
    Group,
    Version,
)
from deploy.audit import Audit, History, Terminal, audit
from deploy.history import Follower
from trainer.staleness import configured_policy
from trainer.step_log import read_steps

MAX_LISTED: Final = 100
"""Ids listed a violation."""


def audit_run(config: Config, cluster: Cluster) -> dict[str, Any]:
    """The audit of a run's log as `headwater audit --json` prints it.

    Of a run at work it is a snapshot: manifests are read first, so that whatever they trained has
    its grant and its terminal in what is read after them."""
    trajectories = Follower(cluster, "trajectories", config.kafka.partitions)
    tail = PolicyTail(cluster)
    try:
        steps = list(read_steps(cluster))
        announcements = [announcement for _, announcement in tail.catch_up()]
        found = audit(
            History(
                prompts_topic=cluster.topic("prompts"),
                announcements=announcements,
                steps=steps,
                terminals=map(terminal_of, trajectories.news()),
                bound=configured_policy(config).bound,
                trajectory_starts=trajectories.starts,
            )
        )
    finally:
        for reader in (trajectories, tail):
            reader.close()
    return as_json(found)


def terminal_of(record: Record) -> Terminal:
    """A record of `trajectories`, its group decoded only to find the oldest trained version."""
    kind: Literal["group", "closed", "corrupt"]
    oldest = None
    try:
        ended = terminal(record)
    except (CorruptRecord, UnknownRecord):
        kind = "corrupt"
    else:
        kind = "closed" if isinstance(ended, Closed) else "group"
        oldest = None if isinstance(ended, Closed) else oldest_trained(ended)
    return Terminal(
        group_id=(record.key or b"").decode(errors="replace"),
        partition=record.partition,
        offset=record.offset,
        crc=checksum(record.value),
        kind=kind,
        oldest=oldest,
    )


def oldest_trained(group: Group) -> Version | None:
    """The oldest version that wrote a token with loss_mask 1."""
    return min(
        (
            segment.version
            for trajectory in group.trajectories
            for segment in trajectory.segments
            if trajectory.loss_mask[segment.start : segment.end].any()
        ),
        default=None,
    )


def as_json(found: Audit) -> dict[str, Any]:
    """The pinned keys, and those that say more."""
    return {
        "ok": found.ok,
        "groups": dict(found.groups),
        "lost": list(found.lost[:MAX_LISTED]),
        "trained_twice": list(found.trained_twice[:MAX_LISTED]),
        "settled_twice": list(found.settled_twice[:MAX_LISTED]),
        "ungranted": list(found.ungranted[:MAX_LISTED]),
        "bound_violations": [
            {"group_id": v.group_id, "step": v.step, "staleness": v.staleness}
            for v in found.bound_violations[:MAX_LISTED]
        ],
        "credit_balance": found.credit_balance,
        "digest_chain_ok": found.digest_chain_ok,
        "chain_breaks": list(found.chain_breaks[:MAX_LISTED]),
    }


def audit_lines(found: Mapping[str, Any]) -> list[str]:
    """The audit for reading."""
    groups = found["groups"]
    lines = [
        f"granted {groups['granted']} = {groups['trained']} trained + {groups['closed']} closed + "
        f"{groups['dropped']} dropped + {groups['open']} open"
        + (f" (balance {found['credit_balance']})" if found["credit_balance"] else ""),
        f"lost {len(found['lost'])}, trained twice {len(found['trained_twice'])}, "
        f"bound violations {len(found['bound_violations'])}, "
        f"credit balance {found['credit_balance']}",
        "digest chain ok" if found["digest_chain_ok"] else "digest chain BROKEN",
    ]
    for name in (
        "lost",
        "trained_twice",
        "settled_twice",
        "ungranted",
        "bound_violations",
        "chain_breaks",
    ):
        lines += [f"  {name}: {entry}" for entry in found[name][:5]]
    lines.append("audit ok" if found["ok"] else "audit FAILED")
    return lines
