"""What a rank holds whatever it trains on: a model's size and settings enter, bytes by part leave.

Of N parameters in a dtype of b bytes, A of them trained, on R ranks, a rank holds

    stage   parameters   sum of gradients      optimizer: master weights and two moments, float32
    0       b N          4 A                   8 A  (the parameters are the master weights)
    1       b N          4 A                   12 A / R
    2       b N          4 A / R               12 A / R
    3       b N / R      4 A / R               12 A / R

(Rajbhandari et al. 2020, arXiv 1910.02054, with gradients added up in float32), and for a while
what DeepSpeed 0.19 needs to bring gradients there and to step. Offloaded, it lies in the host's
memory, with gradients there twice. Rank 0 alone holds the weights that are published, twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from connectors.config import Trainer

BUCKET: Final = 500_000_000
"""The most gradients that are reduced at once (DeepSpeed's `reduce_bucket_size`)."""
LIVE: Final = 1_000_000_000
"""Parameters that stage 3 keeps whole at once (`stage3_max_live_parameters`)."""
_BYTES: Final = {"float32": 4, "bfloat16": 2}

When = Literal["always", "backward", "step"]


@dataclass(frozen=True, slots=True)
class Part:
    """`on_host`: not where the model trains, where that is another memory. `when`: always, while
    gradients are made, or while the optimizer steps."""

    name: str
    num_bytes: int
    on_host: bool = False
    when: When = "always"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """Of one rank. The settings it follows from stand beside its parts."""

    parts: tuple[Part, ...]
    zero_stage: int
    num_ranks: int
    offload: str
    gradient_checkpointing: bool

    @property
    def device_bytes(self) -> int:
        """Always there, where the model trains."""
        return self._sum("always", on_host=False)

    @property
    def host_bytes(self) -> int:
        """Of the host's memory, at most."""
        return sum(part.num_bytes for part in self.parts if part.on_host)

    @property
    def backward_bytes(self) -> int:
        """More, where the model trains, while there are activations."""
        return self._sum("backward", on_host=False)

    @property
    def step_bytes(self) -> int:
        """More, where the model trains, while the optimizer steps."""
        return self._sum("step", on_host=False)

    @property
    def total_bytes(self) -> int:
        """Of both memories, without what is there for a while."""
        return sum(part.num_bytes for part in self.parts if part.when == "always")

    def bytes_of(self, name: str) -> int:
        return sum(part.num_bytes for part in self.parts if part.name == name)

    def _sum(self, when: When, *, on_host: bool) -> int:
        return sum(
            part.num_bytes for part in self.parts if (part.when, part.on_host) == (when, on_host)
        )


def model_state(
    trainer: Trainer,
    *,
    num_parameters: int,
    num_trained: int,
    dtype: str,
    rank: int = 0,
    is_cuda: bool = False,
    in_run: bool = True,
) -> ModelState:
    """`num_parameters`: of the model and its adapters, tied ones once, `num_trained` of them
    trained. `dtype`: "float32" or "bfloat16". `in_run`: weights are published and checkpoints
    copied; False of an engine alone."""
    stage, num_ranks = trainer.zero_stage, trainer.num_ranks
    parts: list[Part] = []

    def add(name: str, num_bytes: float, *, on_host: bool = False, when: When = "always") -> None:
        if num_bytes:
            parts.append(Part(name, int(num_bytes), on_host, when))

    size, offloaded = _BYTES[dtype], trainer.offload != "none"
    own = num_trained / num_ranks  # of the optimizer's state, from stage 1 on
    parameters = size * num_parameters / (num_ranks if stage == 3 else 1)
    optimizer = 8 * num_trained if stage == 0 else 12 * own
    bucket = size * min(BUCKET, num_trained)
    add("parameters", parameters, on_host=trainer.offload == "all")
    add("optimizer", optimizer, on_host=offloaded)
    if offloaded:  # their sum, and those of the last micro-batch
        add("gradients", 8 * own, on_host=True)
    elif stage < 2:
        add("gradients", 4 * num_trained)
    else:
        add("gradients", 4 * own)
    if stage >= 2:
        bucket_when: When = "always" if stage == 3 or offloaded else "backward"
        add("the bucket they are summed in", bucket, when=bucket_when)
        add("gradients of a backward pass", size * min(num_trained, BUCKET), when="backward")
    elif dtype == "bfloat16" or offloaded:
        add("gradients of a backward pass", size * num_trained, when="backward")
    if stage == 3:
        add("gathered parameters", size * min(num_parameters, LIVE), when="backward")
    if stage == 1 and not offloaded and dtype == "float32":
        add("the step's gradient", bucket, when="step")
    else:
        add("the step's gradient", 4 * own, on_host=offloaded, when="step")
    if trainer.kl_coefficient and trainer.lora is None:
        add("reference model", size * num_parameters)
    if in_run:
        published = num_trained if trainer.lora is not None else num_parameters
        if rank == 0:
            add("published weights", 2 * size * published)
            add("published weights", size * published if is_cuda else 0, on_host=True)
        # In stage 3 the master weights are all that is saved of the parameters.
        model = size * published if rank == 0 and stage < 3 else 0
        add("checkpoint's copy", model + optimizer, on_host=True)
    return ModelState(
        parts=tuple(parts),
        zero_stage=stage,
        num_ranks=num_ranks,
        offload=trainer.offload,
        gradient_checkpointing=trainer.gradient_checkpointing,
    )


def sizes(parameters: Iterable[object]) -> tuple[int, int]:
    """(all, trained) elements of parameters; of a ZeRO-3 partition those of the whole."""
    num_all = num_trained = 0
    for parameter in parameters:
        num = int(getattr(parameter, "ds_numel", 0) or parameter.numel())  # type: ignore[attr-defined]
        num_all += num
        num_trained += num * bool(parameter.requires_grad)  # type: ignore[attr-defined]
    return num_all, num_trained
