import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from connectors.config import Overlong, Trainer
from connectors.records import (
    Group,
    Manifest,
    Origin,
    Prompt,
    Segment,
    Trajectory,
    Version,
    decode_as,
    encode,
)  # fmt: skip
from tests.trainer.training import open_engine
from trainer.aggregation import AGGREGATIONS
from trainer.corrections import CORRECTIONS, LEVELS, PROXIMALS, REJECTIONS
from trainer.estimators import ESTIMATORS
from trainer.execute import execute, recorded, settings, untrainable
from trainer.packing import Assignment
from trainer.regularisers import KLS
from trainer.surrogates import LOSSES


def row(k: int | str, reward: float = 1.0, segments: tuple[Segment, ...] = ()) -> Trajectory:
    return Trajectory(
        trajectory_id=f"p/0/3/{k}",
        group_id="p/0/3",
        task="a",
        tokens=np.array([1, 2, 3, 4], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.int8),
        logprobs=np.array([np.nan, np.nan, -1, -1], np.float32),
        segments=segments,
        origin=Origin("p", 0, 3),
        reward=reward,
    )


def group(*rows: Trajectory) -> Group:
    return Group(group_id="p/0/3", prompt=Prompt(task="a", prompt="x"), trajectories=rows)


def test_a_whole_group_is_trainable() -> None:
    assert untrainable(group(row(0), row(1, 0.0)), Trainer(advantage="grpo"), 5) is None
    assert untrainable(group(row(0), row("0/1"), row(1, 0.0)), Trainer(advantage="grpo"), 5) is None
    far = group(row(0), row("999999999"), row("10/10", 0.0))
    assert untrainable(far, Trainer(advantage="grpo"), 5) is None


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (group(row(0)), "at least two"),
        (group(row(0), row("0/1")), "at least two"),
        (group(row(0), row(1, math.nan)), "p/0/3/1: its reward is nan"),
        (group(row(0), row(1, math.inf)), "p/0/3/1: its reward is inf"),
        (group(row(0), row("0/1", 0.5), row(1)), "differ in reward"),
        (group(row(0), row(1, 0.0), row(1, 0.0)), "p/0/3/1 is the id of 2 of its trajectories"),
        (group(row(0), replace(row(1), tokens=np.array([1, 2, 3, 5], np.int32))), "p/0/3/1: no"),
        (group(row(0), replace(row(1), tokens=np.array([1, 2, -3, 4], np.int32))), "p/0/3/1: no"),
        (group(row(0), replace(row(1), trajectory_id="foreign-id")), "foreign-id is no id of"),
        (group(row(0), row("x")), "p/0/3/x is no id of group p/0/3"),
        (group(row(0), row("00")), "p/0/3/00 is no id of group p/0/3"),
        (group(row(0), row("0/01")), "p/0/3/0/01 is no id of group p/0/3"),
        (group(row(0), row("1/2/3")), "p/0/3/1/2/3 is no id of group p/0/3"),
        (group(row(0), row("\u0661")), "p/0/3/\u0661 is no id of group p/0/3"),
        (group(row(0), row("1\n")), "p/0/3/1\n is no id of group p/0/3"),
        (group(row(0), row("99999999999999999999")), "/99999999999999999999 is no id of"),
        (group(row(0), row("1" * 5000)), "is no id of group p/0/3"),
        (
            group(row(0), replace(row(1), group_id="p/0/4", trajectory_id="p/0/4/1")),
            "p/0/4/1 is no id of group p/0/3",
        ),
        (group(row(0), replace(row(1), logprobs=np.full(4, np.nan, np.float32))), "token 2"),
    ],
)
def test_a_group_that_would_stop_the_trainer_is_named_before_it_enters_a_step(
    bad: Group, why: str
) -> None:
    reason = untrainable(bad, Trainer(advantage="grpo"), 5)
    assert reason is not None
    assert why in reason


def test_what_is_trainable_follows_the_estimator() -> None:
    assert untrainable(group(row(0)), Trainer(advantage="reinforce++"), 5) is None
    assert untrainable(group(row(0), row(1, -1.0)), Trainer(advantage="rloo"), 5) is None
    assert untrainable(group(), Trainer(advantage="opo"), 5) == "it has no trajectories"
    below = untrainable(group(row(0), row(1, -1.0)), Trainer(advantage="maxrl"), 5)
    assert below == "maxrl needs rewards of at least 0"


def test_an_assignment_of_other_rows_is_refused(tiny_model_path: Path) -> None:
    two, one = group(row(0), row(1, 0.0)), Assignment(micro_batches=((0,),), ranks=(0,))
    with (
        closing(open_engine(tiny_model_path)) as engine,
        pytest.raises(ValueError, match="do not cover the 2 trained rows once"),
    ):
        execute(engine, [two], Trainer(advantage="grpo"), seed=0, assignment=one)


def test_text_is_trainable_by_what_reads_no_log_probs() -> None:
    text = group(row(0), replace(row(1, 0.0), behaviour="text"))
    why = untrainable(text, Trainer(advantage="grpo"), 5)
    assert why is not None
    assert why.startswith("p/0/3/1: it is text, which no policy sampled, and correction 'tis'")
    assert untrainable(text, Trainer(advantage="grpo", correction="none"), 5) is None


def test_a_manifest_s_settings_give_the_same_mathematics_back() -> None:
    trainer = Trainer(
        advantage="grpo", advantage_parameters={"epsilon": 1e-4}, learning_rate=0.5,
        num_minibatches=4, proximal="recompute", kl_coefficient=0.01, kl="k2", filter_groups=True,
        overlong=Overlong(max_length=9, buffer=2),
    )  # fmt: skip
    written = settings(trainer, 0.7)
    manifest = Manifest(
        step=1, epoch=0, version=Version(0, 1), records=(), micro_batches=(), seed=0,
        digest_before="", digest="", settings=written,
    )  # fmt: skip
    reread: Manifest = decode_as(encode(manifest), Manifest)
    found = recorded(Trainer(learning_rate=0.1), reread)
    assert found == trainer
    assert isinstance(found.num_minibatches, int)


def test_the_configuration_names_every_algorithm_there_is() -> None:
    for key, known in (
        ("advantage", ESTIMATORS),
        ("loss", LOSSES),
        ("aggregation", AGGREGATIONS),
        ("correction", CORRECTIONS),
        ("correction_level", LEVELS),
        ("rejection", REJECTIONS),
        ("rejection_level", LEVELS),
        ("proximal", PROXIMALS),
        ("kl", KLS),
    ):
        assert set(get_args(Trainer.model_fields[key].annotation)) == set(known), key
