"""Every preset, at settings that show its rules in a small run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from operators.staleness import PRESETS, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import StalenessPolicy
from tests.trainer.ledger_world import World

GROUP_SIZE: Final = 2


@dataclass(frozen=True)
class Case:
    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.parameters.values())])

    def policy(self, batch_size: int) -> StalenessPolicy[Any]:
        shape = RunShape(
            batch_size=batch_size, group_size=GROUP_SIZE, num_slots=6 * batch_size * GROUP_SIZE
        )
        return policy_for(self.name, shape, **self.parameters)

    def world(self, batch_size: int, num_partitions: int) -> World:
        return World(
            lambda: self.policy(batch_size),
            batch_size,
            num_partitions,
            group_size=GROUP_SIZE,
            drops=True,
        )


CASES: Final = (
    Case("sync"),
    Case("one-step-off"),
    Case("n-step-off", {"n": 3}),
    Case("deadline", {"bound": 3, "lookahead": 1}),
    Case("deadline", {"bound": 2, "lookahead": "auto"}),
    Case("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "mask"}),
    Case("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "drop"}),
    Case("deadline", {"bound": 1, "lookahead": 1, "at_deadline": "reweight"}),
    Case("verl-drop", {"max_off_policy_threshold": 2}),
    Case("verl-wait", {"max_off_policy_threshold": 3, "num_warmup_batches": 2}),
    Case("trl", {"max_staleness": 2}),
    Case("areal"),
    Case("areal", {"max_head_offpolicyness": 2, "max_concurrent_rollouts": 100}),
    Case("skyrl", {"max_staleness_steps": 2}),
    Case("openrlhf", {"async_queue_size": 2}),
    Case("slime", {"sglang_server_concurrency": 12}),
    Case("roll", {"async_generation_ratio": 1}),
    Case("roll", {"async_generation_ratio": 1.5, "is_use_additional_prompts": True}),
    Case("prime-rl", {"max_off_policy_steps": 1}),
    Case("dressage", {"dressage_staleness_keep_versions": 2, "max_partial_rollout_preempts": 1}),
    Case("nemo-windowed", {"max_staleness_versions": 1}),
    Case("nemo-weight-fifo", {"max_staleness_versions": 2}),
    Case("nemo-ready-first", {"max_staleness_versions": 2}),
    Case("nemo-in-order", {"max_lookahead_versions": 2}),
    Case("psrl-roc", {"staleness": 2}),
    Case("psrl-roc", {"staleness": 2, "proactive_filter": "retry"}),
    Case("psrl-roc", {"staleness": 2, "proactive_filter": "truncate"}),
    Case("windowed-fifo", {"target_offpolicy_steps": 1, "window_size": 2}),
    Case("over-generate", {"then": "close"}),
    Case("over-generate", {"then": "requeue"}),
)

assert {case.name for case in CASES} == PRESETS.keys()
