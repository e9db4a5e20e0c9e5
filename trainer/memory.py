"""Whether a micro-batch fits, said before training starts.

    available ─┐
    ModelState ─┼─▶ budget   the most tokens that fit          max_tokens_per_microbatch = "auto"
    Activations ┘─▶ fits     whether so many do, or MemoryShort with all the numbers

What is predicted of a rank is its peak: what it always holds, with the larger of a backward pass
and an optimizer step. `available` is read before the rank loads anything.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import torch

from trainer.activations import Activations
from trainer.model_state import ModelState

SHARE: Final = 0.8
"""Of what is available, that "auto" fills: the rest is for what else the machine does, for rows
that come and go, and for what the prediction does not count."""
ROUND_TOKENS: Final = 256
"""What "auto" finds is a multiple, so that a few bytes more or less give the same."""
HEAP: Final = 1.3
"""Resident bytes for one of a tensor on a CPU, where the heap between those that live is in pieces;
on CUDA, `CUDA_HEAP`."""
CUDA_HEAP: Final = 1.05
_UNLIMITED: Final = 1 << 60  # of a version 1 cgroup: its largest number of pages


class MemoryShort(ValueError):
    """The training does not fit into memory; the message has the numbers, and what would help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Available:
    """Of a rank, before it loads anything. On a CPU there is only the host's memory.

    device_bytes  where the model trains
    host_bytes    where what is offloaded, copies of checkpoints and published weights lie
    limit         what `device_bytes` are the rest of
    is_cuda       whether the two are different memories
    heap          resident bytes for one of a tensor
    """

    device_bytes: int
    host_bytes: int
    limit: str
    is_cuda: bool = False
    heap: float = HEAP


def available(
    device: torch.device,
    *,
    ranks_here: int = 1,
    root: Path = Path("/"),
) -> Available:
    """The least of what limits this process; what all of `ranks_here` share is cut evenly between
    them. Ranks read it before any of them loads. `root`: where /proc and /sys lie."""
    limits = {"the machine": psutil.virtual_memory().available // ranks_here}
    for name, left in _cgroup_limits(root):
        limits[name] = left // ranks_here
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits["RLIMIT_AS (ulimit -v)"] = soft - psutil.Process().memory_info().vms
    limit = min(limits, key=lambda name: limits[name])
    host_bytes = max(0, limits[limit])
    if device.type != "cuda":
        return Available(device_bytes=host_bytes, host_bytes=host_bytes, limit=limit)
    free, _ = torch.cuda.mem_get_info(device)
    return Available(
        device_bytes=free, host_bytes=host_bytes, limit=str(device), is_cuda=True, heap=CUDA_HEAP
    )


def _cgroup_limits(root: Path) -> Iterator[tuple[str, int]]:
    """What is left below the limits of this process's cgroup and of those it lies in, version 2
    and 1. Files' cache that can be dropped counts as left."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            cache = "inactive_file "
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache = "total_inactive_file "
        else:
            continue
        folder = mount / path.lstrip("/")
        while folder.is_relative_to(mount):
            left = _left(folder, files, cache)
            if left is not None:
                yield f"the cgroup ({folder / files[0]})", left
            folder = folder.parent


def _left(folder: Path, files: tuple[str, str], cache: str) -> int | None:
    """None where there is no limit, or no cgroup as seen from here."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in files)
        stat = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    if limit == "max" or int(limit) >= _UNLIMITED:
        return None
    dropped = next((int(line.split()[1]) for line in stat if line.startswith(cache)), 0)
    return int(limit) - int(used) + dropped


# ---------------------------------------------------------------------------------------- budget
def peak_bytes(
    state: ModelState,
    taken: Activations,
    there: Available,
    num_tokens: int,
    *,
    num_shared: int = 0,
    sequence_parallel: int = 1,
) -> int:
    """Of a rank that trains micro-batches of `num_tokens`, where the model trains."""
    passes = taken.peak_bytes(num_tokens, num_shared)
    fixed = taken.peak_bytes(0)
    passes = fixed + (passes - fixed) // sequence_parallel
    host = 0 if there.is_cuda else state.host_bytes
    busiest = max(state.backward_bytes + passes, state.step_bytes)
    return int(there.heap * (state.device_bytes + host + busiest))


def budget(
    state: ModelState,
    taken: Activations,
    there: Available,
    *,
    longest: int,
    most: int,
    sequence_parallel: int = 1,
    share: float = SHARE,
) -> int:
    """The most tokens of a micro-batch whose predicted peak stays within `share` of what there is:
    a multiple of 256, at least `longest` (model.context_tokens), at most `most`. MemoryShort when
    `longest` does not fit.

    It decides how a step is cut, and so its bits. Equal models, settings and torch give the same
    prediction anywhere; what is available differs from start to start. So ranks take the least of
    theirs, and every manifest records the micro-batches that were made of it: steps are executed
    again as recorded, but a run that starts anew on the same data may be cut otherwise. Who needs
    that to be the same gives a number."""
    fits(
        state,
        taken,
        there,
        num_tokens=longest,
        longest=longest,
        sequence_parallel=sequence_parallel,
        share=share,
    )

    def fit(num_tokens: int) -> bool:
        peak = peak_bytes(state, taken, there, num_tokens, sequence_parallel=sequence_parallel)
        return peak <= share * there.device_bytes

    if fit(most):
        return max(longest, most)
    low, high = longest, max(longest, most)  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fit(middle) else (low, middle)
    return max(longest, low // ROUND_TOKENS * ROUND_TOKENS)


def fits(
    state: ModelState,
    taken: Activations,
    there: Available,
    *,
    num_tokens: int,
    longest: int,
    sequence_parallel: int = 1,
    share: float = 1.0,
) -> None:
    """MemoryShort when micro-batches of `num_tokens` need more than `share` of what there is, or
    take no trajectory of `longest` tokens."""
    if num_tokens < longest:
        raise MemoryShort(
            f"trainer.max_tokens_per_microbatch: is {num_tokens}, and a trajectory may have "
            f"{longest} tokens (model.context_tokens)"
        )
    need = peak_bytes(state, taken, there, num_tokens, sequence_parallel=sequence_parallel)
    short = []
    if need > share * there.device_bytes:
        short.append(
            f"needs {gib(need)} and {gib(share * there.device_bytes)} of "
            f"{gib(there.device_bytes)} ({there.limit}) may be used"
        )
    if there.is_cuda and state.host_bytes > there.host_bytes:
        short.append(
            f"needs {gib(state.host_bytes)} of the host's memory and {gib(there.host_bytes)} "
            "are left"
        )
    if short:
        each = taken.token_bytes / sequence_parallel
        raise MemoryShort(
            f"a micro-batch of {num_tokens} tokens {' and '.join(short)}: "
            f"{gib(there.heap * state.total_bytes)} for the model, "
            f"{there.heap * each / 2**20:.2f} MiB a token; the longest trajectory has {longest}. "
            f"What helps: {', '.join(_remedies(state, there, num_tokens, longest))}"
        )


def _remedies(state: ModelState, there: Available, num_tokens: int, longest: int) -> Iterator[str]:
    if num_tokens > longest:
        yield "fewer trainer.max_tokens_per_microbatch"
    if not state.gradient_checkpointing:
        yield "trainer.gradient_checkpointing = true"
    if state.num_ranks > 1 and state.zero_stage < 3:
        yield "a higher trainer.zero_stage"
    yield "more ranks (trainer.num_ranks)"
    if state.offload == "none" and there.is_cuda:
        yield "trainer.offload"
    yield "trainer.sequence_parallel"
    yield "a shorter model.context_tokens"


# ------------------------------------------------------------------------------------- for people
def lines(
    state: ModelState,
    taken: Activations,
    there: Available,
    *,
    num_tokens: int,
    sequence_parallel: int = 1,
) -> list[str]:
    """What is logged at start."""
    peak = peak_bytes(state, taken, there, num_tokens, sequence_parallel=sequence_parallel)
    parts = ", ".join(f"{part.name} {gib(part.num_bytes)}" for part in state.parts)
    each = there.heap * taken.token_bytes / sequence_parallel
    return [
        f"a micro-batch of {num_tokens} tokens takes about {gib(peak)} at its peak; "
        f"{gib(there.device_bytes)} were free ({there.limit})",
        f"a token takes {each / 2**20:.3f} MiB, the model {gib(there.heap * state.total_bytes)}: "
        f"{parts}",
    ]


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.1f} MiB"
