"""The reward `feedback`: it comes with live traffic, and of a prompt's own rollouts there is
none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from connectors.config import Config, parse
from connectors.records import Closed, Group
from operators.rewards import Rewards, RewardTask
from operators.user_code import UserCode
from pipelines.reward import load_scorer
from tests.operators.engine_fake import tokenizer
from tests.trainer.session_groups import session_group


@pytest.fixture
def rewards(tmp_path: Path) -> Rewards:
    config: Config = parse(
        {
            "model": {"path": "m"},
            "tasks": {"a": {"reward": "feedback"}},
            "trainer": {"advantage": "spo"},
            "nearline": {},
        },
        base_dir="/",
    )
    task = RewardTask(score=load_scorer(config, "feedback"), retries=0)
    return Rewards({"a": task}, tokenizer(tmp_path), UserCode("rewards"))


def test_a_session_s_label_is_its_reward(rewards: Rewards) -> None:
    group = session_group("calls/0/1", None, reward=0.25, num_branches=2)
    assert asyncio.run(rewards(group)) == group


def test_a_prompt_s_own_group_closes_with_the_reason(rewards: Rewards) -> None:
    group = session_group("p/0/1", None, reward=float("nan"))
    rows = tuple(replace(row, tokens=row.tokens % 4) for row in group.trajectories)
    ended: Group | Closed = asyncio.run(rewards(replace(group, trajectories=rows)))
    assert isinstance(ended, Closed)
    assert ended.reason == "reward_failed"
    assert "the reward of a is feedback, and nobody says anything about a prompt's" in ended.message
