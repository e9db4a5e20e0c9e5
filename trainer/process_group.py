"""The ground the training engine stands on: a world of one process, deterministic and quiet.

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

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # before CUDA starts: deterministic cuBLAS

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch.distributed as dist
from deepspeed.ops import __compatible_ops__
from torch._C._distributed_c10d import HashStore


def be_deterministic() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def start_process_group() -> None:
    """A world of this process alone, over a store in memory: no port to find free, none left open.
    DeepSpeed finds the group and takes it; it still reads the launcher's variables."""
    os.environ.update(
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    )
    os.environ.setdefault("MASTER_PORT", "29500")  # never opened
    # DeepSpeed would compile its shared-memory collectives for the CPU (40 s, and a compiler is
    # needed).
    __compatible_ops__["deepspeed_shm_comm"] = False
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    with quiet_deepspeed():
        deepspeed.init_distributed()


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
