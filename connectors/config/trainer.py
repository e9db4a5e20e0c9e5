"""The section `[trainer]`: the mathematics of a step, and what it runs on."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from connectors.algorithms import (
    KL,
    MOST_REWARD,
    Advantage,
    Aggregation,
    Correction,
    Level,
    Loss,
    Proximal,
    Rejection,
    estimator,
    policy_loss,
)
from connectors.config.lora import Lora
from connectors.config.section import MOST_STEPS, MOST_TOKENS, YEAR_S, Section

MOST_PACKED: Final = 10 * MOST_TOKENS


class Source(Section):
    """Of a shadow trainer: the log of the run it follows. `headwater shadow` writes it."""

    run: str
    """That run's folder; its broker serves both."""
    grants: str
    """Namespace of the `policy` whose grants give the order of the groups."""
    namespace: str
    """Namespace of the `trajectories` it trains on."""
    starts: list[int]
    """First offset it reads, by partition."""
    ends: list[int] = Field([])
    """Where some of what was granted is not in `trajectories`: a prompt below `limits` that has no
    terminal below `ends` is passed over."""
    limits: list[int] = Field([])


class Overlong(Section):
    """DAPO's soft punishment of long samples: their reward falls linearly over the last `buffer`
    tokens below `max_length`, by `penalty` there and beyond."""

    max_length: int = Field(ge=1, le=MOST_TOKENS)
    """Trainable tokens of a sample, over all its turns and branches."""
    buffer: int = Field(ge=1, le=MOST_TOKENS)
    penalty: float = Field(1.0, ge=0, le=MOST_REWARD)

    @model_validator(mode="after")
    def _within(self) -> Overlong:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer must be at most max_length ({self.max_length}), got {self.buffer}"
            )
        return self


class Trainer(Section):
    num_ranks: int = Field(1, ge=1, le=65_536)
    """Processes that train together, each with its share of a step's rows."""
    num_gpus: float = Field(0, ge=0, le=65_536)
    """0, or one for each rank."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What a rank keeps a part of instead of all of it: 1 optimizer state, 2 gradients too, 3
    parameters too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What lies in the host's memory instead of the GPU's: optimizer state (from stage 1 on), or
    parameters too (stage 3)."""
    sequence_parallel: int = Field(1, ge=1, le=65_536)
    """Ranks that share each sequence (DeepSpeed Ulysses), for rows too long for one."""
    gradient_checkpointing: bool = False
    """Keep one hidden state a layer and compute the rest again for the backward pass: less memory,
    about a third more time."""
    lora: Lora | None = None
    """Train adapters instead of the model's own weights."""
    groups_per_step: int = Field(8, ge=1, le=1_000_000)
    learning_rate: float = Field(1e-6, ge=0)
    """The highest one."""
    learning_rate_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the end of the warm-up to `num_steps`."""
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    """Over which the learning rate rises from 0."""
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1)
    """Where the schedule ends, as a share of the learning rate."""
    num_steps: int = Field(100, ge=1, le=MOST_STEPS)
    advantage: Advantage = "grpo"
    advantage_parameters: dict[str, Any] = Field({})
    """Of the advantage, under its own names; of `spo` those of the values it tracks."""
    credit: Literal["sample", "turn"] = "sample"
    """What one advantage is given to: a whole `sample`, or each `turn` the policy took in it, by
    what it and the turns after it earned."""
    discount: float = Field(1.0, ge=0, le=1)
    """Of what later turns earned, a turn, with credit = "turn"."""
    filter_groups: bool = False
    """Drop a group as `filtered`, when it arrives, where all its advantages are 0: it carries no
    reward signal. Its prompt is replaced by the next one."""
    overlong: Overlong | None = None
    """Punish long samples; leave out to reward them as the task does."""
    loss: Loss = "ppo"
    loss_parameters: dict[str, Any] = Field({})
    """Of the loss, under its own names."""
    aggregation: Aggregation = "token-mean"
    """How the losses of a step's tokens become one."""
    num_minibatches: int = Field(1, ge=1, le=1024)
    """Optimizer steps a step: its groups, in order, are cut into so many parts."""
    proximal: Proximal = "reuse"
    """What the loss's ratio is measured from, and r below: the policy at the step's start
    (`reuse`, the forward's own log-probs, with one optimizer step; `recompute`, a forward before
    the first of several), `loglinear` between it and the one that sampled, by age, or that
    `behaviour` itself (then r is 1)."""
    aggregation_constant: float = Field(1.0, gt=0)
    """Of `constant-norm`: what the sum over a sample's tokens is divided by, such as the longest
    sample allowed."""
    correction: Correction = "tis"
    """Of r = exp(prox - behaviour), the weight of a token's loss. `tis`: min(r, cap); `icepop`: r
    from low to cap, else 0; `mis`: the token's own r where r at the level is, else 0; `none`: 1."""
    correction_level: Level = "token"
    """Of r: a token's, the product over its `sequence` or the `geometric` mean over it."""
    correction_low: float = Field(0.5, ge=0)
    correction_cap: float = Field(2.0, gt=0)
    rejection: Rejection = "none"
    """Tokens that leave the loss: r outside low to high (`k1`), (log r)^2 / 2 (`k2`) or r - 1 -
    log r (`k3`) above high, of a token or added up or averaged as the level says."""
    rejection_level: Level = "sequence"
    rejection_low: float = Field(0.5, ge=0)
    rejection_high: float = Field(2.0, gt=0)
    entropy_coefficient: float = Field(0.0, ge=0, le=1e12)
    """Of the mean entropy, which is taken off the loss."""
    kl_coefficient: float = Field(0.0, ge=0, le=1e12)
    """Of the KL to the initial model, which is added to the loss."""
    kl: KL = "k3"
    """How that KL is estimated a token."""
    gap_alert: float = Field(0.1, ge=0, le=1)
    """Share of tokens whose probabilities the trainer and the engine put more than 10% apart, above
    which a step is an alert."""
    max_grad_norm: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_tokens_per_microbatch: Literal["auto"] | Annotated[int, Field(ge=1, le=MOST_PACKED)] = 8192
    """Tokens of one forward pass, a shared prompt counted once; at least `model.context_tokens`.
    "auto": what fits, measured at the start."""
    num_threads: int = Field(1, ge=1, le=1024)
    """CPU threads of the trainer; bits depend on it, so it is recorded in every manifest."""
    source: Source | None = None
    publish_timeout_s: float = Field(60.0, gt=0, le=YEAR_S)
    publish_through: Literal["auto", "memory", "group"] = "auto"
    """How engines get weights: `memory`, which processes of one host share; `group`, a broadcast
    over gloo or NCCL; `auto`: memory where it can be shared, the group elsewhere."""

    def problem(self) -> str | None:
        """What does not go together, by key."""
        if (problem := self._ranks_problem() or self._credit_problem()) is not None:
            return problem
        try:
            loss = policy_loss(self.loss, self.loss_parameters)
        except ValueError as error:
            return f"loss_parameters: {error}"
        for key in ("correction", "rejection"):
            if not loss.corrected and (found := getattr(self, key)) != "none":
                return f"{key}: {self.loss} takes only 'none', got {found!r}"
        if (most := self.groups_per_step) < self.num_minibatches:
            return f"num_minibatches: must be at most groups_per_step ({most}), got " + str(
                self.num_minibatches
            )
        reads = loss.reads_proximal or (self.correction, self.rejection) != ("none", "none")
        if self.num_minibatches > 1 and self.proximal == "reuse" and reads:
            return (
                "proximal: 'reuse' is the policy at the step's start only while num_minibatches is "
                f"1; with {self.num_minibatches} choose recompute, loglinear or behaviour"
            )
        for kind, low, high in (
            (self.correction in ("icepop", "mis"), "correction_low", "correction_cap"),
            (self.rejection == "k1", "rejection_low", "rejection_high"),
        ):
            if kind and getattr(self, low) > getattr(self, high):
                return f"{low}: must be at most {high} ({getattr(self, high)}), got " + str(
                    getattr(self, low)
                )
        return None

    def _ranks_problem(self) -> str | None:
        ranks, stage = self.num_ranks, self.zero_stage
        if self.num_gpus not in (0, ranks):
            return f"num_gpus: one rank trains on one GPU, so 0 or {ranks}, got {self.num_gpus:g}"
        if ranks % self.sequence_parallel:
            return (
                f"sequence_parallel: must divide num_ranks ({ranks}), got {self.sequence_parallel}"
            )
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if stage < least:
            return f"offload: {self.offload!r} needs zero_stage of at least {least}, got {stage}"
        if self.warmup_steps and self.warmup_steps >= self.num_steps:
            return f"warmup_steps: must be below num_steps ({self.num_steps}), got " + str(
                self.warmup_steps
            )
        return None

    def _credit_problem(self) -> str | None:
        name = self.advantage
        try:
            chosen = estimator(name, self.advantage_parameters)
        except ValueError as error:
            return f"advantage_parameters: {error}"
        if self.credit == "turn" and chosen.per_token:
            return f"credit: {name} credits each token, so it takes only 'sample', got 'turn'"
        if self.credit == "turn" and chosen.needs_value:
            return f"credit: {name} values whole samples, so it takes only 'sample', got 'turn'"
        if self.discount != 1 and self.credit != "turn":
            return f"discount: is of turns and needs credit = 'turn', got {self.discount}"
        if self.filter_groups and (chosen.whitens or chosen.needs_value):
            return (
                f"filter_groups: the advantages of {name} are relative to the step, so no group "
                "tells by itself whether it carries a signal"
            )
        if self.overlong is not None and chosen.least > -math.inf:
            return (
                f"overlong: {name} needs rewards of at least {chosen.least:g}, and a penalty may "
                "bring them below"
            )
        return None
