"""The audit's answer, for --json and for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from deploy.findings import Audit
from deploy.history import fork_text

MAX_LISTED: Final = 100
"""Entries listed a violation."""
_SHOWN: Final = 5
"""Of those for people."""

_LISTS: Final = (
    "lost", "trained_twice", "settled_twice", "ungranted", "excluded_trained", "wrong_records",
    "bound_violations", "overgrants", "chain_breaks", "unreadable",
)  # fmt: skip


def as_json(found: Audit) -> dict[str, Any]:
    """The pinned keys, and those that say more."""
    return {
        "ok": found.ok,
        "from_step": found.from_step,
        "to_step": found.to_step,
        "groups": found.groups,
        "traffic": found.traffic,
        "credit_balance": found.credit_balance,
        "digest_chain_ok": found.digest_chain_ok,
        "lost": list(found.lost)[:MAX_LISTED],
        "why_lost": dict(list(found.lost.items())[:MAX_LISTED]),
        "trained_twice": found.trained_twice[:MAX_LISTED],
        "settled_twice": found.settled_twice[:MAX_LISTED],
        "ungranted": found.ungranted[:MAX_LISTED],
        "excluded_trained": found.excluded_trained[:MAX_LISTED],
        "wrong_records": dict(list(found.wrong_records.items())[:MAX_LISTED]),
        "bound_violations": [asdict(v) for v in found.bound_violations[:MAX_LISTED]],
        "overgrants": [
            {**asdict(o), "version": str(o.version)} for o in found.overgrants[:MAX_LISTED]
        ],
        "chain_breaks": found.chain_breaks[:MAX_LISTED],
        "unreadable": found.unreadable[:MAX_LISTED],
        "lineage": found.lineage,
        "given_up": found.given_up,
        "void": found.num_void,
        "closed_by_reason": dict(found.closed_by_reason),
        "dropped_by_reason": dict(found.dropped_by_reason),
        "grants_checked": found.grants_checked,
        "bound_checked": found.bound_checked,
        "unprovable": None,
    }


def unprovable(why: str) -> dict[str, Any]:
    """The answer when the log that is left proves nothing: no list is a proof then."""
    return {
        **as_json(Audit()),
        "ok": False,
        "from_step": None,
        "to_step": None,
        "digest_chain_ok": False,
        "grants_checked": False,
        "bound_checked": False,
        "unprovable": why,
    }


def audit_lines(found: Mapping[str, Any]) -> list[str]:
    """The audit for reading."""
    if found["unprovable"]:
        return [f"cannot be proven: {found['unprovable']}", "audit FAILED"]
    groups, given_up = found["groups"], found["given_up"]
    first, last = found["from_step"], found["to_step"]
    since = f" after step {last}" if last else ""
    trained = f"steps {first} to {last}" if first <= last else f"no step yet{since}"
    lines = [
        trained + ("" if first == 1 else " (the log before was trimmed; its checkpoint counts)"),
        f"granted {groups['granted']} = {groups['trained']} trained + {groups['closed']} closed + "
        f"{groups['dropped']} dropped + {groups['open']} open (balance {found['credit_balance']})",
        *_traffic(found["traffic"]),
        *_dropped(found["dropped_by_reason"]),
        f"lost {len(found['lost'])}, trained twice {len(found['trained_twice'])}, "
        f"bound violations {len(found['bound_violations'])}, "
        f"overgrants {len(found['overgrants'])}",
        "digest chain ok" if found["digest_chain_ok"] else "digest chain BROKEN",
    ]
    if not found["grants_checked"]:
        lines.append("grants not checked: the policy's hang on more than the log shows")
    if not found["bound_checked"]:
        lines.append("staleness not checked: the policy has no bound")
    lines += [f"incarnation {fork_text(fork)}" for fork in found["lineage"]]
    if given_up["steps"]:
        lines.append(f"given up: {given_up['steps']} steps of {given_up['groups']} groups")
    for name in _LISTS:
        entries = found["why_lost"] if name == "lost" else found[name]
        if isinstance(entries, Mapping):
            entries = [f"{group_id}: {why}" for group_id, why in entries.items()]
        lines += [f"  {name}: {entry}" for entry in entries[:_SHOWN]]
        if len(entries) > _SHOWN:
            lines.append(f"  {name}: and {len(entries) - _SHOWN} more (--json lists them)")
    lines.append("audit ok" if found["ok"] else "audit FAILED")
    return lines


def _traffic(ended: Mapping[str, int]) -> list[str]:
    if not any(ended.values()):
        return []
    hows = ("trained", "closed", "dropped", "queued")
    told = " + ".join(f"{ended[how]} {how}" for how in hows)
    again = f" ({ended['duplicates']} more were second ones)" if ended["duplicates"] else ""
    scoring = f", {ended['scoring']} more wait for their reward" if ended["scoring"] else ""
    return [f"live traffic {sum(ended[how] for how in hows)} = {told}{again}{scoring}"]


def _dropped(by_reason: Mapping[str, int]) -> list[str]:
    told = ", ".join(f"{reason} {count}" for reason, count in by_reason.items())
    return [f"dropped, as the steps list them: {told}"] if told else []
