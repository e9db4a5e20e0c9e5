"""Workloads from a name, from a configuration or from a run's log.

    --workload NAME  one of WORKLOADS
    CONFIG           its sizes and limits; lengths and seconds are `standard`'s, to scale
    --from-run RUN   its sizes too, and lengths and seconds as its log has them

`notes` say what was measured, from what, and what is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from connectors.config import Config, ConfigError
from deploy.simulate.calibrate import Decode, Training, decode_times, train_times
from deploy.simulate.lengths import Lognormal, Trace
from deploy.simulate.subjects import Configured
from deploy.simulate.workload import WORKLOADS, Workload
from trainer.staleness import (
    configured_parameters,
    configured_policy,
    granted_per_step,
    shape_of,
)

if TYPE_CHECKING:
    from connectors.kafka.client import Cluster
    from deploy.simulate.observed import Rollouts, Steps

FAILED: Final = ("reward_failed", "reward_nan", "reward_timeout", "agent_failed", "engine_failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """`measured`: what the run itself came to, by the names of an outcome's JSON."""

    workload: Workload
    configured: Configured | None = None
    notes: tuple[str, ...] = ()
    measured: Mapping[str, Any] | None = None


def named(name: str) -> Source:
    if name not in WORKLOADS:
        raise ConfigError(f"--workload: there is no {name!r}; known: {', '.join(WORKLOADS)}")
    return Source(workload=WORKLOADS[name])


def from_config(config: Config) -> Source:
    workload, notes = _sized(config)
    standard = WORKLOADS["standard"]
    longest = config.sampling.max_tokens
    lengths = Lognormal(mu=math.log(longest / 4), sigma=1.0, most=longest)
    step_tokens = standard.batch_size * standard.group_size * standard.lengths.mean()
    workload = replace(
        workload,
        lengths=lengths,
        token_s=standard.token_s,
        train_s=0.0,
        train_s_per_token=standard.train_s / step_tokens,
    )
    notes += (
        f"assumed: log-normal lengths of {lengths.mean():.0f} tokens on average, the median a "
        f"quarter of sampling.max_tokens = {longest}; as in the workload standard "
        f"{1000 * workload.token_s:.0f} ms a token and {1 / workload.train_s_per_token:.0f} "
        "trained tokens a second; --from-run RUN measures them",
    )
    return Source(workload=workload, configured=configured(config), notes=notes)


def from_run(config: Config, folder: str, cluster: Cluster) -> Source:
    """Of the run whose log `cluster` serves. ConfigError when it is too short to be measured."""
    from deploy.simulate.observed import Rollouts, Steps

    rollouts, steps = Rollouts.of(cluster, config.kafka.partitions), Steps.of(cluster)
    sizes, notes = _sized(config)
    try:
        decode = decode_times(
            np.array(rollouts.started), np.array(rollouts.ended), np.array(rollouts.tokens, float),
            num_slots=sizes.num_slots, num_engines=sizes.num_engines,
        )  # fmt: skip
        training = train_times(np.array(steps.seconds), np.array(steps.tokens))
    except ValueError as error:
        raise ConfigError(f"--from-run {folder}: is too short to be measured: {error}") from error
    workload = _measured(sizes, rollouts, steps, decode, training)
    return Source(
        workload=workload,
        configured=configured(config),
        notes=(*notes, *_measurements(workload, rollouts, steps, decode, training)),
        measured=steps.came_to(),
    )


def configured(config: Config) -> Configured:
    """ConfigError for what a run would not start with."""
    configured_policy(config)
    section = config.staleness
    return Configured(name=section.policy, parameters=configured_parameters(section))


def _sized(config: Config) -> tuple[Workload, tuple[str, ...]]:
    """What a configuration fixes; the rest is to be replaced. ConfigError for more than can be
    simulated."""
    if not granted_per_step(config):
        raise ConfigError(
            "simulate: live traffic has every group of a step (nearline.share), so there is no "
            "prompt whose staleness could be simulated"
        )
    shape = shape_of(config)
    try:
        workload = Workload(
            name=config.run.name,
            batch_size=shape.batch_size,
            group_size=shape.group_size,
            lengths=WORKLOADS["standard"].lengths,
            num_engines=shape.num_engines,
            num_slots=shape.num_slots,
            inflight=config.rollout.inflight,
            slice_tokens=config.rollout.slice_tokens,
            time_cap_s=config.staleness.time_cap_s,
        )
    except ValueError as error:
        raise ConfigError(f"simulate: {error}") from error
    notes = []
    if len({task.group_size for task in config.tasks.values()}) > 1:
        notes.append(f"assumed: groups of {shape.group_size}, the largest of the tasks'")
    if config.nearline is not None:
        notes.append(
            f"left out: live traffic, so a step is {shape.batch_size} groups of "
            f"{config.trainer.groups_per_step}"
        )
    return workload, tuple(notes)


def _measured(
    sizes: Workload, rollouts: Rollouts, steps: Steps, decode: Decode, training: Training
) -> Workload:
    prompt_tokens = max(1, round(float(np.median(rollouts.prompt_tokens))))
    failed = sum(rollouts.closed[reason] for reason in FAILED)
    return replace(
        sizes,
        lengths=Trace(tokens=tuple(rollouts.tokens)),
        token_s=max(decode.token_s, 1e-9),
        token_s_per_sequence=decode.per_running_s,
        prompt_tokens=prompt_tokens,
        prefill_tokens_per_s=prompt_tokens / decode.overhead_s if decode.overhead_s > 0 else None,
        reward_s=tuple(rollouts.reward_s),
        train_s=training.fixed_s,
        train_s_per_token=training.token_s,
        publish_s=float(np.median(steps.publish_s)),
        failure_rate=failed / (failed + rollouts.num_groups),
    )


def _measurements(
    workload: Workload, rollouts: Rollouts, steps: Steps, decode: Decode, training: Training
) -> tuple[str, ...]:
    lengths, w = workload.lengths, workload
    notes = [
        f"measured: {len(rollouts.tokens)} lengths, {lengths.mean():.0f} tokens on average, up to "
        f"{lengths.longest}; {rollouts.num_groups} groups",
        f"measured: {_time(w.token_s)} a token and {_time(w.token_s_per_sequence)} more for each "
        f"sequence beside it, {_time(decode.overhead_s)} a request, from {decode.how}",
        f"measured: {_time(w.train_s)} a step and {_time(1000 * w.train_s_per_token)} for 1000 "
        f"trained tokens, from {training.how}",
        f"measured: rewards {_time(float(np.median(rollouts.reward_s)))} and publishing "
        f"{_time(w.publish_s)} in the median, rewards up to {_time(max(rollouts.reward_s))}, "
        f"{w.failure_rate:.1%} of the groups failed",
        "measured: the run itself, from one step's end to the next: what it took to start and "
        "to start again is left out",
        "assumed: lengths of a group are independent, engines have room for the context of all "
        "slots, checkpoints cost nothing",
    ]
    if rollouts.closed["time_cap"]:
        notes.append(
            f"assumed: the {rollouts.closed['time_cap']} groups closed at the time cap were like "
            "the others; their lengths are not in the log"
        )
    if max(rollouts.turns) > 1:
        notes.append("assumed: tool calls are part of a token's time")
    return tuple(notes)


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
