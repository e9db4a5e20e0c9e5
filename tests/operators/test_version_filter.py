"""Which groups are stale."""

from __future__ import annotations

import numpy as np
import pytest

from connectors.records import Group, Origin, Prompt, Segment, Trajectory, Version
from operators.version_filter import is_stale


@pytest.mark.parametrize(
    ("drop_before", "stale"),
    [(None, False), (Version(0, 3), False), (Version(0, 4), True), (Version(1, 0), True)],
)
def test_a_group_is_as_old_as_its_oldest_token(drop_before: Version | None, stale: bool) -> None:
    origin = Origin("p", 0, 1)
    row = Trajectory(
        trajectory_id="p/0/1/0",
        group_id="p/0/1",
        task="t",
        tokens=np.zeros(4, np.int32),
        loss_mask=np.ones(4, np.int8),
        logprobs=np.zeros(4, np.float32),
        segments=(Segment(0, 2, 0, 3), Segment(2, 4, 0, 5)),
        origin=origin,
    )
    group = Group(group_id="p/0/1", prompt=Prompt(task="t", prompt="q"), trajectories=(row,))
    assert is_stale(group, drop_before) is stale
