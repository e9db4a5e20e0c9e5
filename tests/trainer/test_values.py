"""spo on a real engine: the values it takes, what it learns, and steps it cannot take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from connectors.config import Trainer
from connectors.records import Group, Prompt, Version
from operators.tracker import Belief, Observation, TrackerState, ValueTracker, moved
from tests.trainer.groups import trainable_group
from tests.trainer.training import open_engine
from trainer.engine import TrainingEngine
from trainer.execute import Execution, execute
from trainer.packing import Assignment
from trainer.values import key_of, learnt, metrics, rewards_of, tracker_of

SPO = Trainer(
    advantage="spo", advantage_parameters={"half_life": 1e-6}, learning_rate=1e-3, num_threads=1
)


@pytest.fixture
def engine(tiny_model_path: Path) -> Iterator[TrainingEngine]:
    with closing(open_engine(tiny_model_path)) as opened:
        yield opened


def asked(offset: int, prompt_id: str, reward: float = 1.0) -> Group:
    """Two samples of the prompt with that id, of rewards 0 and `reward`."""
    made = trainable_group(f"p/0/{offset}", Version(0, 0), seed=offset, reward=reward)
    return replace(made, prompt=Prompt(task="a", prompt="x", id=prompt_id))


def train(engine: TrainingEngine, steps: range) -> list[Execution]:
    """Each on a prompt of its own and one that comes again in the step after the next."""
    done = []
    for step in steps:
        groups = [asked(2 * step, f"new {step}"), asked(2 * step + 1, f"again {step % 2}", 0.5)]
        done.append(execute(engine, groups, SPO, seed=step))
    return done


def test_a_prompt_is_known_by_task_and_id_or_by_its_input() -> None:
    assert key_of(Prompt(task="t", prompt="x", id="7")) == "t/7"
    chat = [{"role": "user", "content": "x"}]
    turned = [{"content": "x", "role": "user"}]
    keys = [
        key_of(Prompt(task="t", prompt="x")),
        key_of(Prompt(task="u", prompt="x")),
        key_of(Prompt(task="t", messages=chat)),
        key_of(Prompt(task="t", token_ids=[1, 2])),
    ]
    assert len(set(keys)) == 4
    assert key_of(Prompt(task="t", messages=turned, reward="19", metadata={"a": "b"})) == keys[2]


def test_a_step_s_rewards_go_in_in_order_and_then_the_policy_moves() -> None:
    tracker = tracker_of(SPO)
    assert tracker == ValueTracker(half_life=1e-6)
    groups = [asked(0, "p"), asked(1, "q", 0.5), asked(2, "p")]
    state = learnt(tracker, TrackerState(), groups, drift=0.25)
    rewards = [("a/p", 0.0), ("a/p", 1.0), ("a/q", 0.0), ("a/q", 0.5), ("a/p", 0.0), ("a/p", 1.0)]
    expected = tracker.update(TrackerState(), [Observation(key=k, reward=r) for k, r in rewards])
    assert state == moved(expected, 0.25)
    assert state.length == 0.5
    assert list(state.beliefs) == ["a/q", "a/p"]


def test_a_step_is_scored_by_the_values_it_took() -> None:
    tracker = ValueTracker(low=0.0, high=2.0)
    before = TrackerState(beliefs={"a/p": Belief(3.0, 1.0)})  # says 1.5
    groups = [asked(0, "p", 2.0), asked(1, "q", 1.0)]  # errors -0.75, 0.25; -0.5, 0
    found = metrics(tracker, before, TrackerState(beliefs={"x": Belief()}), groups)
    assert found == {
        "value/brier": (0.5625 + 0.0625 + 0.25) / 4,
        "value/absolute_error": 1.5 / 4,
        "value/prompts": 1.0,
    }


def test_branches_of_a_sample_are_one_reward() -> None:
    whole = asked(0, "p")
    first, second = whole.trajectories
    branch = replace(first, trajectory_id=f"{first.trajectory_id}/1")
    assert rewards_of(replace(whole, trajectories=(first, second, branch))) == [0.0, 1.0]


def test_a_run_recovered_from_a_checkpoint_goes_on_with_equal_values_and_weights(
    engine: TrainingEngine, tiny_model_path: Path, tmp_path: Path
) -> None:
    train(engine, range(3))
    engine.capture().write(tmp_path)
    start = engine.tracker
    done = train(engine, range(3, 6))
    digest, tracker = engine.digest(), engine.tracker
    engine.close()
    with closing(open_engine(tiny_model_path)) as again:
        again.load(tmp_path)
        assert again.tracker == start
        same = train(again, range(3, 6))
        assert (again.digest(), again.tracker) == (digest, tracker)
    for one, other in zip(done, same, strict=True):
        for name in ("value/brier", "value/absolute_error", "value/prompts", "kl/update", "loss"):
            assert one.metrics[name] == other.metrics[name]
    assert len(tracker.beliefs) == 6 + 2
    later = tracker.length - start.length
    assert later == pytest.approx(sum(math.sqrt(one.metrics["kl/update"]) for one in done))
    assert later > 0


def test_the_values_are_in_the_gradient(engine: TrainingEngine, tmp_path: Path) -> None:
    engine.capture().write(tmp_path)
    groups = [asked(0, "p"), asked(1, "q")]
    digests = []
    for tracker in (TrackerState(), TrackerState(beliefs={"a/p": Belief(9.0, 1.0)})):
        engine.load(tmp_path)
        engine.tracker = tracker
        assert execute(engine, groups, SPO, seed=1).skipped is None
        digests.append(engine.digest())
    assert digests[0] != digests[1]


def test_values_are_forgotten_over_a_step_of_another_estimator(engine: TrainingEngine) -> None:
    execute(engine, [asked(0, "p"), asked(1, "q")], SPO, seed=1)
    assert engine.tracker.beliefs
    grpo = SPO.model_copy(update={"advantage": "grpo", "advantage_parameters": {}})
    execute(engine, [asked(2, "r")], grpo, seed=2)
    assert engine.tracker == TrackerState(), "the policy moved, nobody measured how far"


@pytest.mark.parametrize(
    ("name", "num_tokens", "reason"),
    [
        ("spo", 5, "one_sample"),
        ("reinforce++", 1, "one_token"),
        ("reinforce++-baseline", 1, "one_token"),
        ("spo", 0, "no_tokens"),
        ("reinforce++", 0, "no_tokens"),
        ("opo", 0, "no_tokens"),
    ],
)
def test_a_step_with_too_few_to_normalise_over_is_skipped_with_the_reason(
    engine: TrainingEngine, name: str, num_tokens: int, reason: str
) -> None:
    whole = asked(0, "p")
    mask = np.array([0, 0, 0, *[1] * num_tokens, *[0] * (5 - num_tokens)], np.int8)
    alone = replace(whole, trajectories=(replace(whole.trajectories[1], loss_mask=mask),))
    before = engine.digest()
    trainer = SPO.model_copy(update={"advantage": name, "advantage_parameters": {}})
    done = execute(engine, [alone], trainer, seed=1)
    assert (done.skipped, done.micro_batches, done.master_changed) == (reason, (), False)
    assert engine.digest() == before
    assert all(map(math.isfinite, done.metrics.values()))
    learns = name == "spo"  # from a skipped step's rewards too, and the policy stays
    expected = TrackerState({"a/p": Belief(0.48 + 1, 0.48)})
    assert engine.tracker == (expected if learns else TrackerState())
    assignment = Assignment(micro_batches=done.micro_batches, ranks=())
    again = execute(engine, [alone], trainer, seed=1, assignment=assignment)
    assert again.skipped == reason
