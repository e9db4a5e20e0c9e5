"""`headwater trace`: one trajectory's way from its prompt, or the call of live traffic that names
its group, to the checkpoints that contain it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

import msgspec
import numpy as np

from connectors.arrow import CorruptRecord
from connectors.branches import BEFORE, CALLS, CORRECTS, LABEL, OWN_METADATA, SERVED, SESSION
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, OffsetGone, Reader, Record
from connectors.kafka.tail import PolicyTail
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import Begin, Closed, Origin, Trajectory, parse_group_id
from connectors.run_dir import RunDir
from connectors.text import Text
from deploy.base import StepRecords, Survey, counted, surveyed
from deploy.history import CLOCK_SKEW_S, Follower
from trainer.checkpoint import run_store
from trainer.checkpoint_meta import kept_on_chain
from trainer.traffic import topics_of

SHOWN_CHARS: Final = 200
"""Of a prompt and of an answer; --json has all of them."""
_TOLD: Final = (SESSION, CALLS, SERVED, LABEL, CORRECTS, BEFORE)


def trace_run(config: Config, run_dir: RunDir, log: Cluster, wanted: str) -> dict[str, Any]:
    """What the log knows of `wanted`: the id of a trajectory, of a group, or a prompt's own.
    ConfigError when it is none, or its prompt is not in the log. Of live traffic `traffic` says
    which session it is of, and the origin's `prompt` is the call, or the feedback, that names it.
    `trimmed` lists what retention or trimming removed of the way; what of it is `unknown` for that
    is None."""
    group_ids = _group_ids(log, config.kafka.partitions, wanted)
    origin = parse_group_id(group_ids[0])
    trimmed: list[str] = []
    asked = _prompt(log, origin, trimmed)
    found: dict[str, Any] = {
        "id": wanted,
        "group_id": group_ids[0],
        "same_prompt": group_ids[1:],
        "origin": {**msgspec.structs.asdict(origin), "prompt": asked},
        "traffic": None if origin.topic == log.topic("prompts") else _session(asked),
        "granted": _grant(log, origin) if origin.topic == log.topic("prompts") else None,
        "rollout": None,
        "terminal": None,
        "closed": None,
        "segments": [],
        "trajectories": [],
        "trained_step": None,
        "given_up_steps": [],
        "dropped_step": None,
        "excluded_by": [],
        "checkpoints": [],
        "trimmed": trimmed,
        "unknown": [],
    }
    survey = _add_steps(found, log)
    rollout = _first(found, log, "rollouts", origin, "rollout")
    found["rollout"] = _place(rollout)
    ended = _first(found, log, "trajectories", origin, "terminal")
    if ended is not None:
        _add_terminal(found, ended, config)
    if found["trained_step"] is not None:
        kept = kept_on_chain(run_store(config, run_dir), survey.chain)
        found["checkpoints"] = [k.step for k in kept if k.step >= found["trained_step"]]
    return found


def _group_ids(log: Cluster, num_partitions: int, wanted: str) -> list[str]:
    """The group `wanted` names, or those of the prompt whose own id it is, in log order."""
    topic, known = log.topic("prompts"), (log.topic("prompts"), *topics_of(log))
    parts = wanted.split("/")
    for length in (3, 4, 5):  # a group's id, a trajectory's, a branch's
        candidate = "/".join(parts[: len(parts) - length + 3])
        try:
            if len(parts) >= length and parse_group_id(candidate).topic in known:
                return [candidate]
        except ValueError:
            continue
    with closing(Follower(log, "prompts", range(num_partitions))) as prompts:
        found = [_place(r) or "" for r in prompts.news() if wanted == _own_id(r)]
    if not found:
        raise ConfigError(
            f"{wanted}: is no id of this run; a group's is {topic}/PARTITION/OFFSET, a "
            f"trajectory's has one more /NUMBER (of live traffic it begins with {known[1]} or "
            f"{known[2]}), and no prompt has it for its own"
        )
    return found


def _session(asked: Any) -> dict[str, str]:
    """Of the call or feedback that names a group."""
    session = asked.get("session") if isinstance(asked, Mapping) else None
    return {"session": session} if isinstance(session, str) else {}


def _own_id(record: Record) -> str | None:
    """The prompt's own id."""
    if record.key:
        return record.key.decode(errors="replace")
    try:
        prompt = msgspec.json.decode(record.value)
    except msgspec.DecodeError:
        return None
    own = prompt.get("id") if isinstance(prompt, dict) else None
    return own if isinstance(own, str) else None


def _prompt(log: Cluster, origin: Origin, trimmed: list[str]) -> Any:
    """The prompt as JSON, its text when it is none, None where there is no record (any more)."""
    with closing(Reader(log, origin.topic, {origin.partition: 0})) as reader:
        if not 0 <= origin.offset < reader.ends()[origin.partition]:
            raise ConfigError(f"{origin}: there is no such record in the log")
        try:
            value = reader.read_at(origin.partition, origin.offset).value
        except OffsetGone:
            if origin.offset < reader.starts()[origin.partition]:
                trimmed.append(f"the prompt {origin}")
            return None
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value.decode(errors="replace")


def _grant(log: Cluster, origin: Origin) -> dict[str, Any] | None:
    """The version that was published when the prompt was granted, and when; None while it is
    not."""
    with closing(PolicyTail(log)) as tail:
        for _, said in tail.catch_up():
            if (
                len(said.limits) > origin.partition
                and said.limits[origin.partition] > origin.offset
            ):
                version = msgspec.structs.asdict(said.version)
                return {"version": version, "announced_at": said.announced_at}
    return None


def _add_steps(found: dict[str, Any], log: Cluster) -> Survey:
    """What the steps say of the group: trained on the chain, by steps given up since, dropped,
    excluded."""
    steps, group_id = StepRecords.now(log), found["group_id"]
    survey = surveyed(steps)
    for record in counted(steps, survey):
        if isinstance(record, Begin):
            if group_id in record.excluded:
                found["excluded_by"].append(record.incarnation)
            continue
        given_up = survey.given_up_by(record)
        if any(r.group_id == group_id for r in record.records):
            if given_up is None:
                found["trained_step"] = record.step
            else:
                version = msgspec.structs.asdict(record.version)
                found["given_up_steps"].append({"step": record.step, "version": version})
        if given_up is None and group_id in record.dropped:
            found["dropped_step"] = record.step
    if survey.first is not None and survey.first.step > 1 and found["trained_step"] is None:
        found["unknown"].append("trained_step")
        found["trimmed"].append(
            f"steps before {survey.first.step}, one of which may have trained it"
        )
    return survey


def _first(
    found: dict[str, Any], log: Cluster, topic: str, origin: Origin, name: str
) -> Record | None:
    """The group's first record in a topic, which `found` names `name`, looked for from the time of
    its grant on; a group keeps its prompt's partition."""
    key = found["group_id"].encode()
    with closing(Follower(log, topic, [origin.partition])) as follower:
        if found["granted"] is not None:
            follower.seek_time(found["granted"]["announced_at"] - CLOCK_SKEW_S)
        for record in follower.news():
            if record.key == key:
                return record
        if start := follower.starts[origin.partition]:
            found["unknown"].append(name)
            found["trimmed"].append(f"{log.topic(topic)}/{origin.partition} before {start}")
    return None


def _place(record: Record | None) -> str | None:
    return str(Origin(record.topic, record.partition, record.offset)) if record else None


def _add_terminal(found: dict[str, Any], record: Record, config: Config) -> None:
    found["terminal"] = _place(record)
    try:
        ended = terminal(record)
    except (CorruptRecord, UnknownRecord) as error:
        found["closed"] = {"reason": "corrupt", "message": str(error)}
        return
    if isinstance(ended, Closed):
        found["unknown"] = [name for name in found["unknown"] if name != "trained_step"]
        found["closed"] = {"reason": ended.reason, "message": ended.message}
        return
    rows = list(ended.trajectories)
    if found["traffic"] is not None:
        said = rows[0].metadata
        found["traffic"] |= {n.removeprefix(OWN_METADATA): said[n] for n in _TOLD if n in said}
    if found["id"].startswith(found["group_id"] + "/"):
        rows = [row for row in rows if row.trajectory_id == found["id"]]
        if not rows:
            ids = ", ".join(row.trajectory_id for row in ended.trajectories)
            raise ConfigError(
                f"{found['id']}: the group has {len(ended.trajectories)} trajectories: {ids}"
            )
    text = _text(config)
    found["trajectories"] = [_described(row, text) for row in rows]
    found["segments"] = [s for row in found["trajectories"] for s in row["segments"]]


def _text(config: Config) -> Text | None:
    """The run's tokenizer, None where the model's folder is gone."""
    try:
        return Text(config.resolve(config.model.path))
    except ConfigError:
        return None


def _described(row: Trajectory, text: Text | None) -> dict[str, Any]:
    """`written`: each stretch of trained tokens as text; their ids without a tokenizer."""
    at = np.flatnonzero(np.diff(row.loss_mask)) + 1
    parts = zip(np.split(row.tokens, at), np.split(row.loss_mask, at), strict=True)
    stretches = [tokens.tolist() for tokens, mask in parts if mask.any()]
    return {
        "trajectory_id": row.trajectory_id,
        "num_tokens": len(row.tokens),
        "num_trained_tokens": int(row.loss_mask.sum()),
        "written": [s if text is None else text.decode(s, special=True) for s in stretches],
        "reward": row.reward if row.reward == row.reward else None,
        "reward_parts": dict(row.reward_parts),
        "finish_reason": row.finish_reason,
        "segments": [
            {"trajectory_id": row.trajectory_id, **msgspec.structs.asdict(s)} for s in row.segments
        ],
    }


def trace_lines(found: Mapping[str, Any]) -> list[str]:
    """The trace for reading."""
    origin, granted = found["origin"], found["granted"]
    lines = [
        f"{found['id']}",
        f"  prompt      {origin['topic']}/{origin['partition']}/{origin['offset']}: "
        f"{msgspec.json.encode(origin['prompt']).decode()[:SHOWN_CHARS]}",
    ]
    if found["traffic"] is None:
        told = f"at version {_version(granted['version'])}" if granted else "not yet"
        lines.append(f"  granted     {told}")
    else:
        told = ", ".join(f"{name} {value}" for name, value in found["traffic"].items())
        lines.append(f"  traffic     {told[:SHOWN_CHARS] or 'of no known session'}")
    lines.append(f"  rollout     {found['rollout'] or _none(found, 'rollout', 'none')}")
    for row in found["trajectories"]:
        by = ", ".join(f"{_version(s)} ({s['end'] - s['start']} tokens)" for s in row["segments"])
        parts = "".join(f", {name} {value:.4g}" for name, value in row["reward_parts"].items())
        lines.append(
            f"  generated   {row['trajectory_id']}: {row['num_trained_tokens']} trained tokens, by "
            f"{by or 'no version of ours'}, reward {row['reward']}{parts}, {row['finish_reason']}"
        )
        lines += [
            f"  wrote       {msgspec.json.encode(written).decode()[:SHOWN_CHARS]}"
            for written in row["written"]
        ]
    lines.append(f"  terminal    {found['terminal'] or _none(found, 'terminal', 'none yet')}")
    if found["closed"]:
        lines.append(f"  closed      {found['closed']['reason']}: {found['closed']['message']}")
    lines += [f"  given up    step {g['step']} of {_version(g['version'])} trained it"
              for g in found["given_up_steps"]]  # fmt: skip
    lines += [f"  excluded    by the fork to incarnation {i}" for i in found["excluded_by"]]
    step = found["trained_step"]
    in_step = _none(found, "trained_step", "not") if step is None else f"in step {step}"
    lines.append(f"  trained     {in_step}")
    if found["dropped_step"] is not None:
        lines.append(f"  dropped     in step {found['dropped_step']}")
    kept = ", ".join(str(step) for step in found["checkpoints"]) or "none kept"
    lines.append(f"  checkpoints {kept}")
    lines += [f"  trimmed     {what}" for what in found["trimmed"]]
    lines += [f"  same prompt {group_id}" for group_id in found["same_prompt"]]
    return lines


def _none(found: Mapping[str, Any], name: str, otherwise: str) -> str:
    return "unknown (trimmed)" if name in found["unknown"] else otherwise


def _version(version: Mapping[str, int]) -> str:
    return f"{version['incarnation']}.{version['number']}"
