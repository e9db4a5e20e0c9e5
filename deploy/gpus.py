"""Which role gets which GPUs of this machine.

`run` places every role that asks for some (`engine.num_gpus`, `trainer.num_gpus`) and names them to
it in CUDA_VISIBLE_DEVICES; a role that asks for none sees none, wherever it is started. torch is
imported only where somebody asks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Final

from connectors.config import Config
from deploy.errors import EnvironmentFailure

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def visible() -> list[str]:
    """The GPUs this process may use, as the variable names them."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get(VARIABLE)
    return [str(i) for i in range(count)] if named is None else named.split(",")[:count]


def placed(config: Config) -> dict[str, str]:
    """What the trainer and each engine that a run starts may see. EnvironmentFailure when the
    machine has too few GPUs for them."""
    engines = range(0 if config.engine.urls else config.engine.count)
    wanted = {
        "trainer": config.trainer.num_gpus,
        **{f"engine-{i}": config.engine.num_gpus for i in engines},
    }
    return place(wanted, visible() if any(wanted.values()) else ())


def place(wanted: Mapping[str, float], gpus: Sequence[str]) -> dict[str, str]:
    """For each role, in the order given, what it may see. Whole numbers get GPUs of their own (1.5
    is two); shares of one are put together, in the first that has room. EnvironmentFailure when
    there are too few."""
    free = dict.fromkeys(gpus, 1.0)
    found = {}
    for role, count in wanted.items():
        share = count if count < 1 else 1.0
        fitting = [gpu for gpu, left in free.items() if left >= share - 1e-9]
        number = math.ceil(count)
        if number > len(fitting):
            asked = ", ".join(f"{name} {n:g}" for name, n in wanted.items() if n)
            raise EnvironmentFailure(
                f"{len(gpus)} GPUs are visible, too few for what engine.num_gpus and "
                f"trainer.num_gpus ask for: {asked}"
            )
        for gpu in fitting[:number]:
            free[gpu] -= share
        found[role] = ",".join(fitting[:number])
    return found


def claim(key: str, count: float) -> None:
    """For this process, before CUDA is touched: with a `count` of 0 it sees no GPU.
    EnvironmentFailure when there are fewer than `count`."""
    if count == 0:
        os.environ[VARIABLE] = ""
    elif len(found := visible()) < count:
        raise EnvironmentFailure(f"{key} = {count:g}, but torch finds {len(found)} GPUs here")
