"""Late labels: what a group that corrects one is worth, and what it changes in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.arrow import decode_group, encode_group
from connectors.branches import BEFORE
from connectors.config import Trainer
from connectors.records import Group, Version
from operators.tracker import Belief, TrackerState, ValueTracker
from tests.trainer.session_groups import correction, session_group
from tests.trainer.training import open_engine
from trainer import batches, credit, late_labels, values
from trainer.credit import no_signal
from trainer.engine import TrainingEngine
from trainer.execute import Execution, execute, untrainable
from trainer.packing import Assignment

FIRST = Version(0, 0)
LABELS = (0.0, 1.0)


@pytest.fixture
def engine(tiny_model_path: Path) -> Iterator[TrainingEngine]:
    with closing(open_engine(tiny_model_path)) as opened:
        yield opened


def session(offset: int, reward: float, **more: Any) -> Group:
    return session_group(f"calls/0/{offset}", FIRST, seed=offset, reward=reward, **more)


def corrected(offset: int, before: float, reward: float, **more: Any) -> Group:
    """The session of that offset, corrected by the feedback of that offset."""
    of = session(offset, before, **more)
    return correction(of, f"said/0/{offset}", before=repr(before), reward=reward)


def trainer(advantage: str, **more: Any) -> Trainer:
    return Trainer(advantage=advantage, learning_rate=1e-3, num_threads=1, **more)


def advantages(groups: Sequence[Group], settings: Trainer) -> list[np.ndarray[Any, Any]]:
    rows = batches.flatten(groups)
    rows = replace(rows, samples=credit.samples_of(groups))
    given = np.full(len(rows), 0.5) if values.takes_values(settings) else None
    return credit.advantages(groups, rows, settings, values=given)


@pytest.mark.parametrize("name", ["spo", "opo", "gpg", "reinforce++", "reinforce++-baseline"])
def test_a_correction_is_worth_the_difference_and_changes_nothing_about_the_others(
    name: str,
) -> None:
    settings = trainer(name)
    sessions = [session(1, 1.0), session(2, 0.0), session(3, 0.25)]
    late = corrected(4, 0.75, 0.25, num_branches=2)
    alone = advantages(sessions, settings)
    found = advantages([sessions[0], late, *sessions[1:]], settings)
    for ours, theirs in zip((found[0], *found[3:]), alone, strict=True):
        assert np.array_equal(ours, theirs)
    for row in found[1:3]:
        assert row.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5, -0.5]


def test_a_correction_by_turns_and_with_a_penalty_for_length_is_still_the_difference() -> None:
    late = corrected(4, 0.0, 1.0)
    settings = trainer("opo", credit="turn", overlong={"max_length": 4, "buffer": 2})
    (row,) = advantages([late], settings)
    assert set(row.tolist()) == {0.0, 1.0}


def test_a_correction_of_no_difference_carries_no_signal() -> None:
    settings = trainer("opo", filter_groups=True)
    assert no_signal(corrected(1, 0.5, 0.5), settings)
    assert not no_signal(corrected(1, 0.5, 0.0), settings)
    assert no_signal(session(1, 0.0), settings), "a lone one of no reward"
    assert not no_signal(session(1, 1.0), settings)


def test_a_label_that_float32_does_not_hold_exactly_is_corrected_by_no_rounding() -> None:
    """As records do: the job says what the label was as Python does."""
    late = decode_group(encode_group(corrected(1, 0.1, 0.1)))
    assert late.trajectories[0].metadata[BEFORE] == "0.1"
    assert late_labels.gain(late) == 0.0


@pytest.mark.parametrize("said", ["", "nan", "much", "1e300"])
def test_a_correction_that_does_not_say_of_which_label_is_untrainable(said: str) -> None:
    whole = corrected(1, 0.5, 1.0)
    rows = tuple(replace(t, metadata={**t.metadata, BEFORE: said}) for t in whole.trajectories)
    why = untrainable(replace(whole, trajectories=rows), trainer("spo"), 1000)
    assert why is not None
    assert f"that label was {said!r} (headwater.before)" in why
    assert untrainable(whole, trainer("spo"), 1000) is None


# --------------------------------------------------------------------------------------- evidence
def test_evidence_moves_by_the_difference_and_no_count_falls_below_zero() -> None:
    tracker, key = ValueTracker(), "a/*"
    learnt = values.learnt(tracker, TrackerState(), [session(1, 1.0)], 0.0)
    before = learnt.beliefs[key]
    after = values.learnt(tracker, learnt, [corrected(1, 1.0, 0.25)], 0.0).beliefs[key]
    assert after == Belief(before.alpha - 0.75, before.beta + 0.75, before.at)
    for _ in range(9):
        learnt = values.learnt(tracker, learnt, [corrected(1, 1.0, 0.0)], 0.0)
    found = learnt.beliefs[key]
    assert (found.alpha, found.beta) == (0.0, before.alpha + before.beta)
    assert tracker.value(learnt, key) == 0.0


def test_a_correction_of_what_nobody_remembers_is_no_evidence() -> None:
    state = values.learnt(ValueTracker(), TrackerState(), [corrected(1, 1.0, 0.0)], 0.0)
    assert state.beliefs == {}


def test_labels_beyond_the_bounds_are_cut_before_they_are_learnt() -> None:
    tracker = values.tracker_of(trainer("opo"), (0.0, 2.0))
    assert tracker is not None
    state = values.learnt(tracker, TrackerState(), [session(1, 7.0)], 0.0)
    assert state.beliefs["a/*"].alpha == 0.48 + 1.0
    again = values.learnt(tracker, state, [corrected(1, 7.0, -3.0)], 0.0)
    assert again.beliefs["a/*"].alpha == pytest.approx(0.48)


# ------------------------------------------------------------------------------------------ steps
def train(engine: TrainingEngine, groups: Sequence[Group], settings: Trainer) -> Execution:
    return execute(engine, groups, settings, seed=1, labels=LABELS)


@pytest.mark.parametrize("name", ["spo", "opo", "reinforce++"])
def test_a_step_of_corrections_alone_trains_and_comes_out_the_same_again(
    engine: TrainingEngine, tmp_path: Path, name: str
) -> None:
    engine.capture().write(tmp_path)
    groups, settings = [corrected(1, 0.0, 1.0)], trainer(name)
    start = engine.digest()
    done = train(engine, groups, settings)
    assert (done.skipped, done.metrics["traffic/corrections"]) == (None, 1.0)
    digest = engine.digest()
    assert digest != start
    engine.load(tmp_path)
    again = execute(
        engine,
        groups,
        settings,
        seed=1,
        assignment=Assignment(micro_batches=done.micro_batches, ranks=()),
        labels=LABELS,
    )
    assert (engine.digest(), again.metrics["loss"]) == (digest, done.metrics["loss"])


def test_up_and_down_a_late_label_moves_the_policy_the_right_way(
    engine: TrainingEngine, tmp_path: Path
) -> None:
    """With advantage 1 the loss, which is of the weights from before the step, is what the
    session's tokens lack in log-probability."""
    plain = trainer("opo", loss="reinforce", correction="none")
    engine.capture().write(tmp_path)
    lacks = []
    for before, reward in ((0.5, 0.5), (0.0, 1.0), (1.0, 0.0)):
        engine.load(tmp_path)
        train(engine, [corrected(1, before, reward)], plain)
        lacks.append(execute(engine, [session(1, 1.0)], plain, seed=2).metrics["loss"])
    same, up, down = lacks
    assert up < same < down


def test_a_lone_session_beside_corrections_does_not_cost_them_their_step(
    engine: TrainingEngine,
) -> None:
    done = train(engine, [session(1, 1.0), corrected(2, 0.0, 1.0)], trainer("spo"))
    assert done.skipped is None
    assert done.metrics["rows/untrained"] == 1.0
    alone = train(engine, [session(3, 1.0)], trainer("spo"))
    assert alone.skipped == "one_sample"


# ------------------------------------------------------------------------------------------- text
def test_text_is_refused_by_name_with_what_to_set_and_trained_by_imitation(
    engine: TrainingEngine,
) -> None:
    text = session_group("calls/0/1", None, reward=1.0)
    why = untrainable(text, Trainer(advantage="spo", rejection="k1"), 1000)
    assert why is not None
    assert "it is text, which no policy sampled, and correction 'tis' needs" in why
    assert why.endswith(
        '(text takes trainer.loss = "imitation", trainer.correction = "none", '
        'trainer.rejection = "none")'
    )
    settings = trainer("opo", loss="imitation", correction="none")
    assert untrainable(text, settings, 1000) is None
    start = engine.digest()
    done = train(engine, [text], settings)
    assert done.skipped is None
    assert engine.digest() != start


def test_sessions_of_one_sample_suit_what_compares_over_the_step_and_no_comparison_of_groups() -> (
    None
):
    for name in ("spo", "opo", "gpg", "reinforce++", "reinforce++-baseline"):
        assert untrainable(session(1, 1.0), trainer(name), 1000) is None
    why = untrainable(session(1, 1.0), trainer("grpo"), 1000)
    assert why == "grpo needs at least two trajectories a group, got 1"
