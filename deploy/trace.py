"""`headwater trace`: one trajectory's way from its prompt to the checkpoints that contain it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from connectors.arrow import CorruptRecord
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, OffsetGone, Reader
from connectors.kafka.terminals import UnknownRecord, terminal
from connectors.records import (
    Closed,
    Origin,
    Trajectory,
    parse_group_id,
)
from connectors.run_dir import RunDir
from deploy.history import Follower
from trainer.checkpoint import CheckpointStore
from trainer.step_log import Chain, read_steps


def trace_run(config: Config, run_dir: RunDir, log: Cluster, wanted: str) -> dict[str, Any]:
    """What the log knows of `wanted`, a trajectory's or a group's id. ConfigError when it is no
    id, or its prompt is not in the log."""
    group_id, index = _ids(wanted, log.topic("prompts"))
    origin = parse_group_id(group_id)
    found: dict[str, Any] = {
        "id": wanted,
        "group_id": group_id,
        "origin": {**msgspec.structs.asdict(origin), "prompt": _prompt(log, origin)},
        "terminal": None,
        "closed": None,
        "segments": [],
        "trajectories": [],
        "trained_step": _trained_step(log, group_id),
        "checkpoints": [],
    }
    _add_terminal(found, config, log, origin, index)
    if found["trained_step"] is not None:
        store = CheckpointStore(config.checkpoint.url or run_dir.checkpoints)
        found["checkpoints"] = [step for step in store.steps() if step >= found["trained_step"]]
    return found


def _ids(wanted: str, prompts_topic: str) -> tuple[str, int | None]:
    """Group id, and the trajectory's number within it when one was given."""
    for group_id, index in ((wanted, None), tuple(wanted.rpartition("/")[::2])):
        try:
            if parse_group_id(str(group_id)).topic == prompts_topic:
                return str(group_id), None if index is None else int(index)
        except ValueError:
            continue
    raise ConfigError(
        f"{wanted}: is no id of this run; a group's is {prompts_topic}/PARTITION/OFFSET, a "
        "trajectory's has one more /NUMBER"
    )


def _prompt(log: Cluster, origin: Origin) -> Any:
    """The prompt as JSON, its text when it is none, None where the broker skips the offset."""
    reader = Reader(log, origin.topic, {origin.partition: 0})
    try:
        if not 0 <= origin.offset < reader.ends()[origin.partition]:
            raise ConfigError(f"{origin}: there is no such prompt in the log")
        value = reader.read_at(origin.partition, origin.offset).value
    except OffsetGone:
        return None
    finally:
        reader.close()
    try:
        return msgspec.json.decode(value)
    except msgspec.DecodeError:
        return value.decode(errors="replace")


def _trained_step(log: Cluster, group_id: str) -> int | None:
    chain = Chain()
    for offset, record in read_steps(log):
        chain.observe(offset, record)
    return next(
        (m.step for m in chain.manifests for r in m.records if r.group_id == group_id), None
    )


def _add_terminal(
    found: dict[str, Any], config: Config, log: Cluster, origin: Origin, index: int | None
) -> None:
    """The group's first terminal; a group keeps its prompt's partition, but is looked for in
    all."""
    trajectories = Follower(log, "trajectories", config.kafka.partitions)
    try:
        for record in trajectories.news():
            if record.key == found["group_id"].encode():
                break
        else:
            return
    finally:
        trajectories.close()
    found["terminal"] = str(Origin(record.topic, record.partition, record.offset))
    try:
        ended = terminal(record)
    except (CorruptRecord, UnknownRecord) as error:
        found["closed"] = {"reason": "corrupt", "message": str(error)}
        return
    if isinstance(ended, Closed):
        found["closed"] = {"reason": ended.reason, "message": ended.message}
        return
    rows = ended.trajectories
    if index is not None:
        if not 0 <= index < len(rows):
            raise ConfigError(f"{found['id']}: the group has {len(rows)} trajectories")
        rows = rows[index : index + 1]
    found["trajectories"] = [_described(row) for row in rows]
    found["segments"] = [s for row in found["trajectories"] for s in row["segments"]]


def _described(row: Trajectory) -> dict[str, Any]:
    return {
        "trajectory_id": row.trajectory_id,
        "num_tokens": len(row.tokens),
        "num_trained_tokens": int(row.loss_mask.sum()),
        "reward": row.reward if row.reward == row.reward else None,
        "finish_reason": row.finish_reason,
        "segments": [
            {"trajectory_id": row.trajectory_id, **msgspec.structs.asdict(s)} for s in row.segments
        ],
    }


def trace_lines(found: Mapping[str, Any]) -> list[str]:
    """The trace for reading."""
    origin = found["origin"]
    lines = [
        f"{found['id']}",
        f"  prompt      {origin['topic']}/{origin['partition']}/{origin['offset']}: "
        f"{msgspec.json.encode(origin['prompt']).decode()[:200]}",
    ]
    for row in found["trajectories"]:
        lines.append(
            f"  generated   {row['trajectory_id']}: {row['num_trained_tokens']} tokens by "
            f"{_versions(row['segments'])}, reward {row['reward']}, {row['finish_reason']}"
        )
    lines.append(f"  terminal    {found['terminal'] or 'none yet'}")
    if found["closed"]:
        lines.append(f"  closed      {found['closed']['reason']}: {found['closed']['message']}")
    lines.append(f"  trained     {_step(found['trained_step'])}")
    kept = ", ".join(str(step) for step in found["checkpoints"]) or "none kept"
    lines.append(f"  checkpoints {kept}")
    return lines


def _versions(segments: Iterable[Mapping[str, int]]) -> str:
    return ", ".join(
        f"{s['incarnation']}.{s['number']} ({s['end'] - s['start']} tokens)" for s in segments
    )


def _step(step: int | None) -> str:
    return "not" if step is None else f"in step {step}"
