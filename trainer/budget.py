"""How many tokens a micro-batch takes, settled before training starts: the number asked for, if it
fits, or the most that fit."""

from __future__ import annotations

import logging
from typing import Final

from connectors.config import ConfigError, Model, Trainer
from trainer import memory
from trainer.activations import MemoryUnknown, activations
from trainer.memory import Available
from trainer.model_state import model_state, sizes
from trainer.policy import PolicyModel
from trainer.process_group import World

log = logging.getLogger(__name__)

AUTO_MOST: Final = 65_536
"""What "auto" stops at, unless a trajectory may be longer: more is no faster."""


def settle(
    policy: PolicyModel, trainer: Trainer, model: Model, there: Available, world: World
) -> int:
    """Tokens of a micro-batch, the same on all ranks, which call it together before DeepSpeed wraps
    the policy. MemoryShort, with the numbers, for what does not fit; ConfigError for "auto" where
    the policy's memory cannot be told before it runs."""
    asked, longest = trainer.max_tokens_per_microbatch, model.context_tokens
    most = max(AUTO_MOST, longest) if asked == "auto" else asked
    try:
        taken = activations(
            policy,
            longest=min(longest, most),
            most=most,
            entropy_gradient=trainer.entropy_coefficient > 0,
        )
    except MemoryUnknown as unknown:
        if asked == "auto":
            raise ConfigError(
                f"trainer.max_tokens_per_microbatch: give a number: {unknown}"
            ) from unknown
        log.info("what a micro-batch of %d tokens takes is not known: %s", asked, unknown)
        return asked
    num_parameters, num_trained = sizes(policy.parameters())
    state = model_state(
        trainer,
        num_parameters=num_parameters,
        num_trained=num_trained,
        dtype=model.dtype,
        rank=world.rank,
        is_cuda=there.is_cuda,
    )
    parallel = trainer.sequence_parallel
    if asked == "auto":
        found = memory.budget(
            state, taken, there, longest=longest, most=most, sequence_parallel=parallel
        )
        found = min(world.each(found))
    else:
        memory.fits(
            state, taken, there, num_tokens=asked, longest=min(longest, asked),
            sequence_parallel=parallel,
        )  # fmt: skip
        found = asked
    for line in memory.lines(state, taken, there, num_tokens=found, sequence_parallel=parallel):
        log.info(line)
    return found
