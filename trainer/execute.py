"""One step's mathematics, the same for live training, recovery and replay: groups in, new weights
and metrics out. A function of (engine state, groups, micro-batches, seed) and the configuration."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from connectors.algorithms import MOST_REWARD, estimator, needs_behaviour
from connectors.config import Overlong, Trainer
from connectors.records import Coordinate, Group, Manifest, Trajectory
from operators.tracker import TrackerState
from trainer import batches, credit, late_labels, packing, prequential, values
from trainer.ages import Ages
from trainer.engine import TrainingEngine
from trainer.overdue import Weights, counts
from trainer.packing import Assignment
from trainer.shares import Origin

SETTINGS: Final = (
    "advantage", "advantage_parameters", "credit", "discount", "filter_groups", "overlong",
    "loss", "loss_parameters", "aggregation", "aggregation_constant", "correction",
    "correction_level", "correction_low", "correction_cap", "proximal", "rejection",
    "rejection_level", "rejection_low", "rejection_high", "entropy_coefficient", "kl_coefficient",
    "kl", "num_minibatches", "learning_rate", "weight_decay", "max_grad_norm",
)  # fmt: skip
"""Keys of `[trainer]` that a step's groups and weights depend on; recorded in its manifest."""
_TABLES: Final = ("advantage_parameters", "filter_groups", "loss_parameters", "overlong")


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """micro_batches  as executed, for the manifest
    skipped        why the optimizer did not step, or None
    metrics        by name, seconds included as `seconds/NAME`
    master_changed whether the optimizer's own weights changed
    """

    micro_batches: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    skipped: str | None
    metrics: Mapping[str, float]
    master_changed: bool


def settings(trainer: Trainer, temperature: float) -> dict[str, float | str]:
    """What a manifest records of the mathematics."""
    return {**{key: _text(getattr(trainer, key)) for key in SETTINGS}, "temperature": temperature}


def recorded(trainer: Trainer, manifest: Manifest) -> Trainer:
    """`trainer` with the settings the manifest's step was trained with."""
    update = {key: manifest.settings[key] for key in SETTINGS}
    for key in _TABLES:
        update[key] = msgspec.json.decode(str(update[key]))
    # Validated, because a manifest knows one kind of number.
    return Trainer.model_validate(trainer.model_dump() | update, strict=False)


def _text(value: Any) -> float | str:
    """A table, a flag or none as JSON: a manifest holds numbers and text."""
    if isinstance(value, float | int | str) and not isinstance(value, bool):
        return value
    return msgspec.json.encode(
        value.model_dump() if isinstance(value, Overlong) else value
    ).decode()


def execute(
    engine: TrainingEngine,
    groups: Sequence[Group],
    trainer: Trainer,
    seed: int,
    *,
    records: Sequence[Coordinate] = (),
    assignment: Assignment | None = None,
    ages: Ages | None = None,
    weights: Weights | None = None,
    labels: tuple[float, float] | None = None,
) -> Execution:
    """Trains one step on `groups`, in order, as `trainer` says; `untrainable` refused none of them.
    `records`: of the groups, where other ranks read theirs. `assignment`: a manifest's, to execute
    it again, ValueError when it is one of other rows; None packs the rows by the engine's budget.
    `ages`: of the groups' versions, read by `loglinear` and for the gap. `weights`: of tokens over
    age; each one's advantage is multiplied by its own, what has 0 is as if it were no token of the
    policy's. `labels`: the bounds of live traffic's labels, where the run has any: then values are
    tracked whatever the estimator. Elsewhere a step whose estimator takes no values forgets those
    of earlier ones: it moves the policy unseen."""
    weights = weights or {}
    rows = batches.flatten(groups, weights, ages=ages)
    rows = replace(rows, samples=credit.samples_of(groups))
    too_few = credit.too_few(groups, rows, trainer)
    if too_few is not None:  # so that the engine trains none of it
        rows = late_labels.alone(rows, groups)
    if assignment is None:
        assignment = packing.assign(
            rows, engine.max_tokens, trainer.num_minibatches, engine.num_shares
        )
    else:
        packing.check_assignment(rows, assignment.micro_batches, trainer.num_minibatches)
    tracker, before = values.tracker_of(trainer, labels), engine.tracker
    takes_values = values.takes_values(trainer)
    baselines = None
    if tracker is not None and takes_values:
        baselines = values.values(tracker, before, groups)
    advantages = credit.advantages(groups, rows, trainer, weights=weights, values=baselines)
    result = engine.step(
        rows,
        assignment.micro_batches,
        advantages,
        seed,
        trainer,
        ranks=assignment.ranks,
        origin=Origin(records=records, ages=ages or {}, weights=weights),
        measure_drift=takes_values,
    )
    metrics = {**result.metrics, **counts(groups, weights)}
    if tracker is None:
        engine.tracker = TrackerState()
    else:
        engine.tracker = values.learnt(tracker, before, groups, result.drift or 0.0)
        metrics |= prequential.metrics(tracker, before, groups)
        if takes_values:
            metrics |= values.metrics(tracker, before, engine.tracker, groups)
    seconds = {f"seconds/{name}": value for name, value in result.seconds.items()}
    return Execution(
        micro_batches=assignment.micro_batches,
        ranks=assignment.ranks if engine.num_shares > 1 else (),
        skipped=result.skipped if rows.num_trained else too_few,
        metrics={**metrics, **seconds},
        master_changed=result.master_changed,
    )


def untrainable(
    group: Group, trainer: Trainer, vocabulary_size: int, max_tokens: int | None = None
) -> str | None:
    """Why `group` cannot be trained, or None: what the feed asks of each group before it may enter
    a step, so that a bad record closes its group instead of stopping the trainer. `max_tokens`: of
    a micro-batch."""
    if not group.trajectories:
        return "it has no trajectories"
    if (why := late_labels.problem(group)) is not None:
        return why
    needed_by = needs_behaviour(
        loss=trainer.loss,
        proximal=trainer.proximal,
        correction=trainer.correction,
        rejection=trainer.rejection,
    )
    samples: dict[int, float] = {}
    for trajectory in group.trajectories:
        if (why := _malformed(trajectory, group, vocabulary_size)) is not None:
            return f"{trajectory.trajectory_id}{why}"
        if needed_by and (why := batches.lacks_behaviour(trajectory, needed_by)) is not None:
            remedy = f" ({_text_needs(trainer)})" if trajectory.behaviour == "text" else ""
            return f"{trajectory.trajectory_id}: {why}{remedy}"
        if max_tokens is not None and len(trajectory.tokens) > max_tokens:
            return (
                f"{trajectory.trajectory_id}: it has {len(trajectory.tokens)} tokens, a "
                f"micro-batch takes {max_tokens} (trainer.max_tokens_per_microbatch)"
            )
        k, reward = credit.sample_of(trajectory), trajectory.reward
        if samples.setdefault(k, reward) != reward:
            return f"branches of {trajectory.trajectory_id} differ in reward"
    names = Counter(trajectory.trajectory_id for trajectory in group.trajectories)
    if (most := names.most_common(1)[0])[1] > 1:
        return f"{most[0]} is the id of {most[1]} of its trajectories"
    return _unsuited(group, list(samples.values()), trainer)


def _text_needs(trainer: Trainer) -> str:
    """What to set so that text is trained on."""
    wanted = {"loss": "imitation", "correction": "none", "rejection": "none"}
    others = [f'trainer.{k} = "{v}"' for k, v in wanted.items() if getattr(trainer, k) != v]
    return f"text takes {', '.join(others)}"


def _malformed(trajectory: Trajectory, group: Group, vocabulary_size: int) -> str | None:
    """What no step can take, to be said after the trajectory's id."""
    tokens, reward = trajectory.tokens, trajectory.reward
    if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocabulary_size:
        return f": no tokens, or ids outside [0, {vocabulary_size})"
    for token, part, name in trajectory.rewards:
        if not (0 <= token < len(tokens) and abs(part) <= MOST_REWARD):
            return f": its reward {name!r} is {part} at token {token}"
    if not abs(reward) <= MOST_REWARD:
        return f": its reward is {reward:g}, which is beyond {MOST_REWARD:g}"
    if trajectory.group_id != group.group_id or not credit.is_sample(trajectory):
        return f" is no id of group {group.group_id}"
    return None


def _unsuited(group: Group, rewards: Sequence[float], trainer: Trainer) -> str | None:
    """What the estimator refuses of a group whose samples have these rewards."""
    name, needs = trainer.advantage, estimator(trainer.advantage, {})
    if needs.needs_group and len(rewards) < 2:
        return f"{name} needs at least two trajectories a group, got {len(rewards)}"
    if min(rewards) < needs.least:
        return f"{name} needs rewards of at least {needs.least:g}"
    tracker = values.tracker_of(trainer)
    if tracker is not None and not tracker.low <= min(rewards) <= max(rewards) <= tracker.high:
        return (
            f"{name} takes rewards between {tracker.low:g} and {tracker.high:g}, "
            f"got {min(rewards):g} to {max(rewards):g}"
        )
    if trainer.credit == "turn" and (needs.needs_group or needs.least > -math.inf):
        try:
            credit.alone(group, trainer)
        except ValueError as error:
            return str(error)
    return None
