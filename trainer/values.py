"""The values of a step's prompts: read from the tracker before the step, learnt from after it.

A prompt is known by `TASK/ID` or, where it has no id, by its task and a digest of its input, so
that one which comes again is the same. What is tracked is the task's own reward: what shaping adds
to it is no part of a prompt's value. A late label moves the evidence of the one it corrects by the
difference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.algorithms import estimator
from connectors.config import Trainer
from connectors.records import Group, Prompt
from operators.tracker import Observation, TrackerState, ValueTracker, moved
from trainer import late_labels
from trainer.credit import samples


def takes_values(trainer: Trainer) -> bool:
    """Whether its estimator does; only then the policy's way is measured, step by step."""
    return estimator(trainer.advantage, {}).needs_value


def tracker_of(trainer: Trainer, labels: tuple[float, float] | None = None) -> ValueTracker | None:
    """The rules that `trainer` asks for; where its estimator takes no values those of labels within
    these bounds, None without."""
    chosen = estimator(trainer.advantage, trainer.advantage_parameters)
    if chosen.needs_value:
        given = {k: p.default for k, p in chosen.tracker.items()} | trainer.advantage_parameters
    elif labels is not None:
        given = dict(zip(("low", "high"), labels, strict=True))
    else:
        return None
    bounds = {key: float(np.float32(given[key])) for key in ("low", "high")}  # as records hold them
    return ValueTracker(**(given | bounds))


def cut(tracker: ValueTracker, reward: float) -> float:
    """To the tracker's bounds. What a step may train is within those its estimator asks for."""
    return min(max(reward, tracker.low), tracker.high)


def values(
    tracker: ValueTracker, state: TrackerState, groups: Sequence[Group]
) -> NDArray[np.float64]:
    """[N], of each row's prompt."""
    found = [tracker.value(state, key_of(group.prompt)) for group in groups]
    return np.repeat(np.array(found, np.float64), [len(group.trajectories) for group in groups])


def learnt(
    tracker: ValueTracker, state: TrackerState, groups: Sequence[Group], drift: float
) -> TrackerState:
    """`state` with the reward of each of the step's samples, in order, after which the step moved
    the policy by `drift`."""
    observations = [
        Observation(
            key=key_of(group.prompt), reward=cut(tracker, reward), before=_before(tracker, group)
        )
        for group in groups
        for reward in rewards_of(group)
    ]
    return moved(tracker.update(state, observations), drift)


def _before(tracker: ValueTracker, group: Group) -> float | None:
    if not late_labels.is_correction(group):
        return None
    return cut(tracker, late_labels.before(group))


def metrics(
    tracker: ValueTracker, before: TrackerState, after: TrackerState, groups: Sequence[Group]
) -> dict[str, float]:
    """How far off the values a step took were of the rewards it had, both mapped to [0, 1]; how
    many prompts are tracked. A late label is no reward that was to be foretold."""
    found = {"value/prompts": float(len(after.beliefs))}
    errors = np.array(
        [
            reward - tracker.value(before, key_of(group.prompt))
            for group in groups
            if not late_labels.is_correction(group)
            for reward in rewards_of(group)
        ]
    ) / (tracker.high - tracker.low)
    if len(errors):
        found["value/brier"] = float(np.mean(errors**2))
        found["value/absolute_error"] = float(np.mean(np.abs(errors)))
    return found


def rewards_of(group: Group) -> list[float]:
    """One a sample, in the order of their first rows."""
    return [rows[0].reward for rows in samples(group)]


def key_of(prompt: Prompt) -> str:
    """By which it is tracked."""
    if prompt.id is not None:
        return f"{prompt.task}/{prompt.id}"
    asked = [prompt.messages, prompt.prompt, prompt.token_ids]
    text = msgspec.json.encode(asked, order="sorted")
    return f"{prompt.task}/{hashlib.sha256(text).hexdigest()[:32]}"
