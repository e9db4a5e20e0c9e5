"""The ground the training engine stands on: a world of one process or several, deterministic and
quiet.

To be imported before anything that starts CUDA or imports deepspeed: both read their environment
then.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: deterministic cuBLAS

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
import transformers
from deepspeed.ops import __compatible_ops__
from torch._C._distributed_c10d import HashStore, Store

COLLECTIVE_S: Final = 1800.0
"""How long a rank waits for the others within a step; a rank that died is noticed at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process's place among those that train together. `store`: where they meet; None for a
    process alone."""

    rank: int = 0
    num_ranks: int = 1
    local_rank: int = 0
    store: Store | None = None

    @property
    def device(self) -> torch.device:
        """Its own."""
        return torch.device("cuda", self.local_rank) if torch.cuda.is_available() else CPU

    def sum(self, number: float) -> float:
        """Of what each rank gives; all call it."""
        if self.num_ranks == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total)

    def each(self, thing: Any) -> list[Any]:
        """What each rank gives, by rank; all call it."""
        if self.num_ranks == 1:
            return [thing]
        found: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(found, thing)
        return found


ALONE: Final = World()
CPU: Final = torch.device("cpu")


def running() -> dict[str, str]:
    """What runs here: device, threads, number of ranks and libraries, which bits depend on."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "ranks": str(dist.get_world_size()),
        "torch": str(torch.__version__),
        "deepspeed": deepspeed.__version__,
        "transformers": transformers.__version__,
    }


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def start_process_group(world: World = ALONE) -> None:
    """Over the world's store, or one in memory: no port to find free, none left open. DeepSpeed
    finds the group and takes it; it still reads the launcher's variables."""
    os.environ.update(
        {
            "RANK": str(world.rank),
            "LOCAL_RANK": str(world.local_rank),
            "WORLD_SIZE": str(world.num_ranks),
            "MASTER_ADDR": "127.0.0.1",
        }
    )
    os.environ.setdefault("MASTER_PORT", "29500")  # never opened
    # DeepSpeed would compile its shared-memory collectives for the CPU (40 s, and a compiler is
    # needed).
    __compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed 0.19 calls what torch 2.13 has under other names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=world.store or HashStore(),
            rank=world.rank,
            world_size=world.num_ranks,
            timeout=timedelta(seconds=COLLECTIVE_S),
        )
    with quiet_deepspeed():
        deepspeed.init_distributed()


def sequence_group(world: World, size: int) -> dist.ProcessGroup | None:
    """The ranks that share each sequence with this one, `size` neighbours; None for one alone. All
    ranks call it."""
    if size == 1:
        return None
    firsts = range(0, world.num_ranks, size)
    groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
    mine: dist.ProcessGroup = groups[world.rank // size]
    return mine


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Its progress lines and its use of deprecated torch calls say nothing to our reader."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
