"""What is simulated: prompts and their lengths, engines, the trainer.

A workload says nothing of the policy; `WORKLOADS` are those known by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from deploy.simulate.lengths import Lengths, Lognormal
from operators.staleness.preset import RunShape

Inflight = Literal["keep", "slices", "restart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """A trajectory is cut into turns of `turn_tokens`. After each turn but the last, with `chance`,
    it leaves its engine for a tool call of exponential length, `pause_s` in the mean."""

    turn_tokens: int
    chance: float
    pause_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cohorts:
    """The groups of some batches of prompts take `factor` times as long a token: the first
    `num_batches` of every `every` batches, or of all (None)."""

    factor: float
    num_batches: int
    every: int | None = None

    def slows(self, batch: int) -> bool:
        return (batch if self.every is None else batch % self.every) < self.num_batches


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`batch_size` groups of `group_size` trajectories make a step.

    num_slots        trajectories that all engines together run at once
    token_s, token_s_per_sequence
                     with c sequences running on an engine, each gets a token every
                     token_s + c * token_s_per_sequence seconds
    kv_tokens        that all engines together hold, None = enough; on overflow the sequence that
                     started last is preempted and prefills again
    prefill_tokens_per_s
                     of one sequence, for its whole context whenever it starts on an engine; None =
                     takes no time
    train_s, train_s_per_token
                     of a step: fixed, and for each token it trains
    reward_s         from a group's last token until it is scored; of several each is as likely
    publish_s        from a step's end until engines hold its weights; trainer and engines go on
    inflight         what a new version does to a running request: `keep` (the next token is of the
                     new version), `slices` (of `slice_tokens`: the next slice is), `restart` (it
                     begins again, its tokens are lost)
    failure_rate     share of groups that fail when they are scored
    time_cap_s       a group that is not through its generation by then is closed
    """

    name: str
    batch_size: int = 32
    group_size: int = 8
    lengths: Lengths
    cohorts: Cohorts | None = None
    num_engines: int = 4
    num_slots: int = 512
    token_s: float = 0.02
    token_s_per_sequence: float = 0.0
    kv_tokens: int | None = None
    prompt_tokens: int = 256
    prefill_tokens_per_s: float | None = None
    tools: Tools | None = None
    reward_s: float | tuple[float, ...] = 0.0
    train_s: float = 60.0
    train_s_per_token: float = 0.0
    publish_s: float = 0.0
    inflight: Inflight = "keep"
    slice_tokens: int = 256
    failure_rate: float = 0.0
    time_cap_s: float | None = None

    def __post_init__(self) -> None:
        for rule, holds in _rules(self):
            if not holds:
                raise ValueError(f"workload {self.name}: {rule}")

    @property
    def shape(self) -> RunShape:
        return RunShape(
            batch_size=self.batch_size,
            group_size=self.group_size,
            num_slots=self.num_slots,
            num_engines=self.num_engines,
        )


def _rules(w: Workload) -> tuple[tuple[str, bool], ...]:
    longest = w.prompt_tokens + w.lengths.longest
    kv_tokens = longest if w.kv_tokens is None else w.kv_tokens // max(1, w.num_engines)
    counts = (w.batch_size, w.group_size, w.num_engines, w.slice_tokens)
    rewards_s = w.reward_s if isinstance(w.reward_s, tuple) else (w.reward_s,)
    times = (w.token_s_per_sequence, *rewards_s, w.train_s, w.train_s_per_token, w.publish_s)
    return (
        (
            "batch_size, group_size, num_engines and slice_tokens must be at least 1",
            min(counts) > 0,
        ),
        (
            f"each of {w.num_engines} engines needs a slot: num_slots must be a multiple of "
            f"num_engines, got {w.num_slots}",
            w.num_slots > 0 and w.num_slots % w.num_engines == 0,
        ),
        (f"token_s must be above 0, got {w.token_s}", w.token_s > 0),
        ("reward_s must hold at least one time", len(rewards_s) > 0),
        ("seconds must not be negative", min(times) >= 0),
        (f"prompt_tokens must not be negative, got {w.prompt_tokens}", w.prompt_tokens >= 0),
        ("prefill_tokens_per_s must be above 0", (w.prefill_tokens_per_s or 1) > 0),
        ("time_cap_s must be above 0", (w.time_cap_s or 1) > 0),
        (f"failure_rate must be in [0, 1), got {w.failure_rate}", 0 <= w.failure_rate < 1),
        (
            f"an engine's share of kv_tokens ({kv_tokens}) must hold prompt and longest "
            f"trajectory ({longest})",
            kv_tokens >= longest,
        ),
    )


_STANDARD = Workload(name="standard", lengths=Lognormal(mu=6.5, sigma=1.0, most=16_000))

WORKLOADS: Final[Mapping[str, Workload]] = {
    workload.name: workload
    for workload in (
        _STANDARD,
        replace(_STANDARD, name="slot-limited", num_slots=128, train_s=20.0),
        replace(_STANDARD, name="cold-start", cohorts=Cohorts(factor=20.0, num_batches=2)),
        replace(
            _STANDARD,
            name="slow-cohorts",
            cohorts=Cohorts(factor=4.0, num_batches=3, every=12),
            train_s=30.0,
        ),
        replace(_STANDARD, name="heavy-tail", lengths=Lognormal(mu=6.5, sigma=1.4, most=32_000)),
        replace(
            _STANDARD,
            name="agentic",
            tools=Tools(turn_tokens=400, chance=0.8, pause_s=5.0),
            num_slots=256,
            token_s=0.015,
            token_s_per_sequence=0.0001,
            kv_tokens=400_000,
            prompt_tokens=1_000,
            prefill_tokens_per_s=8_000.0,
            reward_s=5.0,
            train_s=15.0,
            train_s_per_token=0.0001,
            publish_s=4.0,
            failure_rate=0.02,
        ),
    )
}
