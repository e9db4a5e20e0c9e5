"""One step's mathematics, the same for live training, recovery and replay: groups in, new weights
and metrics out. A function of (engine state, groups, micro-batches, seed) and the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.algorithms import estimator, needs_behaviour
from connectors.config import Config, Trainer
from connectors.records import Group, Manifest, Trajectory
from trainer import batches
from trainer.advantages import advantage
from trainer.ages import Ages
from trainer.engine import TrainingEngine
from trainer.overdue import Weights, counts, row_weights

SETTINGS: Final = (
    "advantage", "advantage_parameters", "loss", "loss_parameters", "aggregation",
    "aggregation_constant", "correction", "correction_level", "correction_low", "correction_cap",
    "proximal", "rejection", "rejection_level", "rejection_low", "rejection_high",
    "entropy_coefficient", "kl_coefficient", "kl", "num_minibatches", "learning_rate",
    "weight_decay", "max_grad_norm",
)  # fmt: skip
"""Keys of `[trainer]` that a step's weights depend on; recorded in its manifest."""
_TABLES: Final = ("advantage_parameters", "loss_parameters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """micro_batches  as executed, for the manifest
    skipped        why the optimizer did not step, or None
    metrics        by name, seconds included as `seconds/NAME`
    master_changed whether the optimizer's own weights changed
    """

    micro_batches: tuple[tuple[int, ...], ...]
    skipped: str | None
    metrics: Mapping[str, float]
    master_changed: bool


def training_engine(config: Config) -> TrainingEngine:
    """The engine a configuration asks for, holding the initial model: the state before step 1."""
    return TrainingEngine(
        config.resolve(config.model.path),
        config.trainer,
        config.model,
        config.sampling.temperature,
    )


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
    """A table as JSON: a manifest holds numbers and text."""
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value


def execute(
    engine: TrainingEngine,
    groups: Sequence[Group],
    trainer: Trainer,
    seed: int,
    *,
    micro_batches: Sequence[Sequence[int]] | None = None,
    ages: Ages | None = None,
    weights: Weights | None = None,
) -> Execution:
    """Trains one step on `groups`, in order, as `trainer` says. `micro_batches`: a manifest's, to
    execute it again; None cuts them by `trainer.max_tokens_per_microbatch`. `ages`: of the groups'
    versions, read by `loglinear` and for the gap. `weights`: of tokens over age; each one's loss is
    multiplied by its own, what has 0 is as if it were no token of the policy's."""
    weights = weights or {}
    samples = np.array([_sample(t) for t in _rows(groups)], np.int64)
    rows = batches.flatten(groups, weights, ages=ages, needs_behaviour=_needs_behaviour(trainer))
    rows = replace(rows, samples=samples)
    if micro_batches is None:
        micro_batches = batches.assign(rows, trainer.max_tokens_per_microbatch)
    advantages = _advantages(rows, trainer)
    if any(weights.values()):  # a policy gradient's loss is proportional to the advantage
        advantages = [
            a * row_weights(t, weights) for a, t in zip(advantages, _rows(groups), strict=True)
        ]
    result = engine.step(rows, micro_batches, advantages, seed, trainer)
    seconds = {f"seconds/{name}": value for name, value in result.seconds.items()}
    return Execution(
        micro_batches=tuple(tuple(batch) for batch in micro_batches),
        skipped=result.skipped,
        metrics={**result.metrics, **counts(groups, weights), **seconds},
        master_changed=result.master_changed,
    )


def _advantages(rows: batches.Rows, trainer: Trainer) -> list[NDArray[np.float64]]:
    if rows.num_trained == 0:  # the engine skips such a step
        return [np.zeros(len(mask)) for mask in rows.masks]
    found: list[NDArray[np.float64]] = advantage(
        trainer.advantage,
        rewards=rows.rewards,
        groups=rows.groups,
        mask=rows.masks,
        samples=rows.samples,
        row_names=rows.ids,
        **trainer.advantage_parameters,
    )
    return found


def _needs_behaviour(trainer: Trainer) -> str | None:
    return needs_behaviour(
        loss=trainer.loss,
        proximal=trainer.proximal,
        correction=trainer.correction,
        rejection=trainer.rejection,
    )


def untrainable(group: Group, trainer: Trainer, vocabulary_size: int) -> str | None:
    """Why `group` cannot be trained, or None: what the feed asks of each group before it may enter
    a step, so that a bad record closes its group instead of stopping the trainer."""
    try:
        batches.flatten([group], needs_behaviour=_needs_behaviour(trainer))
    except batches.BadTrajectory as error:
        return str(error)
    for trajectory in group.trajectories:
        tokens = trajectory.tokens
        if len(tokens) == 0 or tokens.min() < 0 or tokens.max() >= vocabulary_size:
            return f"{trajectory.trajectory_id}: no tokens, or ids outside [0, {vocabulary_size})"
    samples: dict[int, float] = {}
    for trajectory in group.trajectories:
        if not _is_sample(trajectory):
            return f"{trajectory.trajectory_id} is no id of group {group.group_id}"
        if samples.setdefault(_sample(trajectory), trajectory.reward) != trajectory.reward:
            return f"branches of {trajectory.trajectory_id} differ in reward"
    needs = estimator(trainer.advantage, {})
    if needs.needs_group and len(samples) < 2:
        return f"{trainer.advantage} needs at least two trajectories a group, got {len(samples)}"
    if min(samples.values(), default=0.0) < needs.least:
        return f"{trainer.advantage} needs rewards of at least {needs.least:g}"
    return None


def _rows(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _is_sample(trajectory: Trajectory) -> bool:
    parts = trajectory.trajectory_id.removeprefix(trajectory.group_id).split("/")
    return parts[0] == "" and len(parts) in (2, 3) and all(p.isdecimal() for p in parts[1:])


def _sample(trajectory: Trajectory) -> int:
    """k of `GROUP/k` or `GROUP/k/branch`: branches of one sample share it."""
    return int(trajectory.trajectory_id.removeprefix(trajectory.group_id + "/").split("/")[0])
