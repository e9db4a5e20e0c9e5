"""What is simulated: prompts and their lengths, engines, the trainer.

A workload says nothing of the policy; `WORKLOADS` are those known by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from connectors.parameters import Count, Number, Parameter, check
from deploy.simulate.lengths import Lengths, Lognormal
from operators.staleness.preset import MOST, RunShape

MOST_TOKENS: Final = 10**9
"""Of a prompt or a trajectory: simulated tokens are 64-bit integers, and their sums must be."""

Inflight = Literal["keep", "slices", "restart"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """A trajectory is cut into turns of `turn_tokens`. After each turn but the last, with `chance`,
    it leaves its engine for a tool call of exponential length, `pause_s` in the mean."""

    turn_tokens: int
    chance: float
    pause_s: float

    def __post_init__(self) -> None:
        _check(
            "tools",
            self,
            turn_tokens=Count(least=1, most=MOST_TOKENS),
            chance=Number(most=1),
            pause_s=Number(most=MOST),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cohorts:
    """The groups of some batches of prompts take `factor` times as long a token: the first
    `num_batches` of every `every` batches, or of all (None)."""

    factor: float
    num_batches: int
    every: int | None = None

    def __post_init__(self) -> None:
        _check(
            "cohorts",
            self,
            factor=Number(above=True, most=MOST),
            num_batches=Count(),
            every=Count(least=1, optional=True),
        )

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
        what = f"workload {self.name}"
        _check(what, self, **_NUMBERS)
        for rule, holds in _rules(self):
            if not holds:
                raise ValueError(f"{what}: {rule}")

    @property
    def shape(self) -> RunShape:
        return RunShape(
            batch_size=self.batch_size,
            group_size=self.group_size,
            num_slots=self.num_slots,
            num_engines=self.num_engines,
        )


@dataclass(frozen=True, slots=True)
class _Times:
    """One time, or several of which each is as likely."""

    default: float = 0.0

    def check(self, value: Any) -> str | None:
        several = value if isinstance(value, tuple) else (value,)
        broken = (Number(most=MOST).check(time) for time in several)
        return next(filter(None, broken), None) if several else "must hold at least one time"


_NUMBERS: Final[Mapping[str, Parameter]] = {
    "batch_size": Count(least=1),
    "group_size": Count(least=1),
    "num_engines": Count(least=1),
    "num_slots": Count(least=1),
    "token_s": Number(above=True, most=MOST),
    "token_s_per_sequence": Number(most=MOST),
    "kv_tokens": Count(least=1, most=MOST, optional=True),
    "prompt_tokens": Count(most=MOST_TOKENS),
    "prefill_tokens_per_s": Number(above=True, most=MOST, optional=True),
    "reward_s": _Times(),
    "train_s": Number(most=MOST),
    "train_s_per_token": Number(most=MOST),
    "publish_s": Number(most=MOST),
    "slice_tokens": Count(least=1, most=MOST_TOKENS),
    "failure_rate": Number(most=1),
    "time_cap_s": Number(above=True, most=MOST, optional=True),
}


def _check(what: str, of: object, **rules: Parameter) -> None:
    try:
        check(rules, {name: getattr(of, name) for name in rules})
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _rules(w: Workload) -> tuple[tuple[str, bool], ...]:
    """Those over several."""
    longest = w.prompt_tokens + w.lengths.longest
    kv_tokens = longest if w.kv_tokens is None else w.kv_tokens // w.num_engines
    return (
        (
            f"each of {w.num_engines} engines needs a slot: num_slots must be a multiple of "
            f"num_engines, got {w.num_slots}",
            w.num_slots % w.num_engines == 0,
        ),
        (
            f"lengths must be at most {MOST_TOKENS} tokens, got {w.lengths.longest}",
            w.lengths.longest <= MOST_TOKENS,
        ),
        (f"failure_rate must be below 1, got {w.failure_rate}", w.failure_rate < 1),
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
