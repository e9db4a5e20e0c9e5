"""What a micro-batch takes beside the model: a policy enters, bytes by number of tokens leave.

Forward and backward run on shapes alone (torch's meta device): each operator of the real policy is
called in its real order, gradient checkpointing and the head's chunks included, and the bytes of
all tensors alive are counted, but no number is computed. So it takes about two CPU seconds a size
for 30 layers, whatever the number of tokens, needs no memory, and leaves weights, gradients and
random state as they are: none of them is touched.

Counted so, the peak of a float32 pass on a CPU was that of torch's own record of its allocations
(the profiler's) to 0.1 MiB at 512 and 1,024 tokens of a 4-layer model, and 3 MiB more than it at
64. Resident memory says less: it moves with what the heap kept of earlier work
(`memory.HEAP`), and needs a run at full size, which takes minutes on a CPU.

Not counted are an operator's inner buffers, such as cuBLAS's work space, and what rounding and
fragmentation cost an allocator.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer import attention
from trainer.batches import Rows
from trainer.packing import Pack, pack
from trainer.policy import PolicyModel

_ATTENTION: Final = "scaled_dot_product_attention"


class MemoryUnknown(ValueError):
    """The policy's forward pass depends on numbers, so shapes alone do not tell its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """The most that forward and backward pass hold beside parameters and the sum of gradients.

    fixed_bytes    of any micro-batch: above all the gradient of the output embedding
    token_bytes    of each computed token (P of `packing`)
    shared_bytes   of each token of a row that is not computed again (E - P)
    error          how far the line was from a third size, which it was not drawn through, as a
                   share of what that size takes
    """

    fixed_bytes: float
    token_bytes: float
    shared_bytes: float
    error: float

    def peak_bytes(self, num_tokens: int, num_shared: int = 0) -> int:
        return int(
            self.fixed_bytes + self.token_bytes * num_tokens + self.shared_bytes * num_shared
        )


def activations(
    policy: PolicyModel, *, longest: int, most: int, entropy_gradient: bool = False
) -> Activations:
    """By a line through micro-batches of `longest` and `most` tokens (`longest` and half of it,
    where they are the same), raised to a third size between them where that takes more. Before
    DeepSpeed wraps the policy: its hooks would run. `entropy_gradient`: the loss has an entropy.

    All positions of a sequence count, whatever ranks share it. A pure function of the policy's
    shapes, settings and torch's release, so it is the same on every rank and in every restart.
    MemoryUnknown for a model whose shapes depend on numbers (a router of experts)."""
    low, high = (longest, most) if most > longest else (max(2, longest // 2), max(3, longest))
    middle = (low + high) // 2

    def peak(packed: Pack) -> int:
        return _peak_bytes(policy, packed, entropy_gradient)

    at_low, at_middle, at_high = (peak(_one_row(size)) for size in (low, middle, high))
    token_bytes = (at_high - at_low) / (high - low)
    gap = at_middle - (at_low + token_bytes * (middle - low))
    shared = _same_row_twice(low)
    num_shared = shared.starts[-1] - len(shared.tokens_P)
    return Activations(
        fixed_bytes=at_low - token_bytes * low + max(0.0, gap),
        token_bytes=token_bytes,
        shared_bytes=max(0.0, (peak(shared) - at_low) / num_shared),
        error=abs(gap) / at_middle,
    )


def _one_row(num_tokens: int) -> Pack:
    return _pack([np.zeros(num_tokens, np.int32)])


def _same_row_twice(num_tokens: int) -> Pack:
    """All but the last token are shared."""
    first, second = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    second[-1] = 1
    return _pack([first, second])


def _pack(tokens: list[Any]) -> Pack:
    """Rows of one group, all tokens trained, on the meta device."""
    rows = Rows(
        ids=tuple(map(str, range(len(tokens)))),
        tokens=tuple(tokens),
        masks=tuple(np.arange(len(row)) > 0 for row in tokens),
        logprobs=tuple(np.zeros(len(row), np.float32) for row in tokens),
        rewards=np.zeros(len(tokens)),
        groups=np.zeros(len(tokens), np.int64),
    )
    return pack(rows, range(len(tokens)), [np.zeros(len(row)) for row in tokens]).to("meta")


def _peak_bytes(policy: PolicyModel, packed: Pack, entropy_gradient: bool) -> int:
    counting, shapes = _Counting(), {}
    whole = _Pass(policy, entropy_gradient)
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        shape = getattr(tensor, "ds_shape", tensor.shape)  # ZeRO-3 keeps a part of a parameter
        shapes[name] = torch.empty(
            shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
        )
        counting.leave_out(shapes[name])
        if tensor.requires_grad:
            # What becomes of a gradient is DeepSpeed's, so counted with the model.
            shapes[name].register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    try:
        with _as_trained(policy), _attention_in_linear_memory(), counting:
            torch.func.functional_call(whole, shapes, (packed,))
    except (RuntimeError, NotImplementedError) as error:
        raise MemoryUnknown(
            f"{type(policy.model).__name__}: its memory cannot be told from shapes alone "
            f"({str(error).partition(chr(10))[0]}); set trainer.max_tokens_per_microbatch"
        ) from error
    return counting.most


class _Pass(torch.nn.Module):
    """Both ways at once: what is computed again in the backward pass must see the same shapes."""

    def __init__(self, policy: PolicyModel, entropy_gradient: bool) -> None:
        super().__init__()
        self.policy = policy
        self.entropy_gradient = entropy_gradient

    def forward(self, packed: Pack) -> None:
        logprobs_N, entropy_N = self.policy(packed, self.entropy_gradient)
        loss = logprobs_N.sum()
        if self.entropy_gradient:
            loss = loss + entropy_N.sum()
        loss.backward()


@contextmanager
def _as_trained(policy: PolicyModel) -> Iterator[None]:
    """As in training, and with whole sequences: no rank talks to another."""
    was_training, group = policy.training, policy.sequence_group
    policy.train()
    policy.sequence_group = None
    try:
        yield
    finally:
        policy.train(was_training)
        policy.sequence_group = group


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors alive that operators made, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def leave_out(self, tensor: Tensor) -> None:
        self._known.add(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, storage.nbytes())

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


@contextmanager
def _attention_in_linear_memory() -> Iterator[None]:
    """For the meta device torch would choose the attention that makes a [T, T] matrix. By name, for
    torch's own way to stand in for a function does not reach what a backward pass computes
    again."""
    own = vars(attention)[_ATTENTION]
    setattr(attention, _ATTENTION, _flash)
    try:
        yield
    finally:
        setattr(attention, _ATTENTION, own)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel of CPUs; it knows fewer heads of keys by itself."""
    found: Tensor
    found, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return found
