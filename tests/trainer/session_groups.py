"""Groups of live traffic, as the near-line job writes them; a function of their arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from connectors.branches import BEFORE, CORRECTS, LABEL, SERVED, SESSION
from connectors.records import (
    Behaviour,
    Group,
    Prompt,
    Segment,
    Trajectory,
    Version,
    parse_group_id,
)


def session_group(
    group_id: str,
    version: Version | None,
    *,
    seed: int = 0,
    reward: float = 1.0,
    label: str = "final",
    key: str = "*",
    task: str = "a",
    num_branches: int = 1,
    behaviour: Behaviour = "exact",
    **more: Any,
) -> Group:
    """One sample of as many rows of eight tokens, the last five written by `version` (text, which
    none wrote, without one). `more`: of each row."""
    rng = np.random.default_rng(seed)
    segments = () if version is None else (Segment(3, 8, version.incarnation, version.number),)
    metadata = {SESSION: f"s{seed}", LABEL: label}
    if version is not None:
        metadata[SERVED] = str(version)
    logprobs = np.where(np.arange(8) < 3, np.nan, -5.0).astype(np.float32)
    rows = tuple(
        Trajectory(
            trajectory_id=f"{group_id}/0" + (f"/{branch}" if branch else ""),
            group_id=group_id,
            task=task,
            tokens=rng.integers(4, 260, 8).astype(np.int32),
            loss_mask=np.array([0, 0, 0, 1, 1, 1, 1, 1], np.int8),
            logprobs=np.full(8, np.nan, np.float32) if version is None else logprobs,
            segments=segments,
            origin=parse_group_id(group_id),
            source="traffic",
            behaviour="text" if version is None else behaviour,
            reward=reward,
            metadata=metadata,
            **more,
        )
        for branch in range(num_branches)
    )
    prompt = Prompt(task=task, id=key, messages=[{"role": "user", "content": f"ask {seed}"}])
    return Group(group_id=group_id, prompt=prompt, trajectories=rows)


def correction(of: Group, group_id: str, *, before: str, reward: float) -> Group:
    """Its rows again, with the label `reward` in place of `before`."""
    rows = tuple(
        replace(
            row,
            trajectory_id=row.trajectory_id.replace(of.group_id, group_id),
            group_id=group_id,
            origin=parse_group_id(group_id),
            reward=reward,
            metadata={**row.metadata, CORRECTS: of.group_id, BEFORE: before},
        )
        for row in of.trajectories
    )
    return replace(of, group_id=group_id, trajectories=rows)
