"""Rows and engines for the tests of training, and a plain torch loop to compare DeepSpeed with.

`python -m tests.trainer.training MODEL STORE FIRST LAST` loads the store's newest checkpoint in a
process of its own, trains steps FIRST to LAST and prints step, digest and a random number for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from connectors.config import Model, Trainer
from trainer.advantages import advantage
from trainer.batches import Rows
from trainer.checkpoint import CheckpointStore
from trainer.engine import StepResult, TrainingEngine
from trainer.packing import assign

TEMPERATURE = 0.9
SETTINGS = Trainer(learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5, num_threads=1)


def open_engine(model: Path, *, dtype: str = "float32", **settings: Any) -> TrainingEngine:
    trainer = SETTINGS.model_copy(update=settings)
    return TrainingEngine(model, trainer, Model(path=str(model), dtype=dtype), TEMPERATURE)


def random_rows(
    seed: int,
    num_groups: int = 3,
    group_size: int = 4,
    lengths: Sequence[int] | None = None,
) -> Rows:
    """Rows of 6 to 40 tokens, or of `lengths`, with masks in mid-sequence; the sampling policy is a
    made-up one."""
    rng = np.random.default_rng(seed)
    count = num_groups * group_size
    lengths = rng.integers(6, 41, count).tolist() if lengths is None else lengths
    masks = [np.concatenate([np.zeros(3, bool), rng.random(n - 3) < 0.8]) for n in lengths]
    return Rows(
        ids=tuple(f"g/{i}" for i in range(count)),
        tokens=tuple(rng.integers(4, 260, n).astype(np.int32) for n in lengths),
        masks=tuple(masks),
        logprobs=tuple(
            np.where(m, -6 - rng.random(len(m)), np.nan).astype(np.float32) for m in masks
        ),
        rewards=rng.random(count),
        groups=np.repeat(np.arange(num_groups), group_size),
    )


def advantages_of(rows: Rows) -> list[NDArray[Any]]:
    return advantage("grpo", rows.rewards, rows.groups, rows.masks)  # type: ignore[no-any-return]


def train(engine: TrainingEngine, seed: int, *, max_tokens: int = 120) -> StepResult:
    """One step on `random_rows(seed)`."""
    return step(engine, random_rows(seed), seed, max_tokens=max_tokens)


def step(
    engine: TrainingEngine, rows: Rows, seed: int = 0, *, max_tokens: int = 120, **settings: Any
) -> StepResult:
    """One step on `rows`, with other settings than the engine's where given."""
    trainer = engine._trainer.model_copy(update=settings)
    micro_batches = cut(rows, max_tokens, trainer.num_minibatches)
    return engine.step(rows, micro_batches, advantages_of(rows), seed, trainer)


def cut(rows: Rows, max_tokens: int = 120, num_minibatches: int = 1) -> tuple[tuple[int, ...], ...]:
    """Micro-batches for one rank."""
    return assign(rows, max_tokens, num_minibatches).micro_batches


class PlainLoop:
    """The same training by transformers and torch alone: row by row, full logits, plain AdamW."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=SETTINGS.learning_rate,
            weight_decay=SETTINGS.weight_decay,
        )

    def step(
        self,
        rows: Rows,
        advantages: Sequence[NDArray[Any]],
        *,
        chosen: Sequence[int] | None = None,
        prox: Callable[[int, Tensor], Tensor] = lambda i, current: current,
        reference: PlainLoop | None = None,
        kl_coefficient: float = 0.0,
    ) -> float:
        """One optimizer step on the rows `chosen`. `prox`: the proximal policy's log-probs of row
        i's trained tokens, from the current ones."""
        self.optimizer.zero_grad()
        losses = []
        for i in range(len(rows)) if chosen is None else chosen:
            trained = torch.from_numpy(rows.masks[i])
            current = self._current(rows, i)
            start = prox(i, current.detach())
            weight = (start - torch.from_numpy(rows.logprobs[i])[trained]).exp().clamp(max=2.0)
            gain = torch.from_numpy(advantages[i])[trained]
            ratio = (current - start).exp()
            surrogate = torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2))
            losses.append(-(weight * surrogate))
            if reference is not None:
                gap = torch.from_numpy(reference.logprobs(rows, [i])) - current
                losses[-1] = losses[-1] + kl_coefficient * (gap.exp() - 1 - gap)
        loss = torch.cat(losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), SETTINGS.max_grad_norm)
        self.optimizer.step()
        return float(loss.item())

    @torch.no_grad()
    def logprobs(self, rows: Rows, chosen: Sequence[int]) -> NDArray[np.float64]:
        """Of the trained tokens of the rows `chosen`, one after the other."""
        return np.concatenate([self._current(rows, i).numpy() for i in chosen])

    def _current(self, rows: Rows, i: int) -> Tensor:
        tokens = torch.from_numpy(rows.tokens[i].astype(np.int64))[None]
        logits = self.model(input_ids=tokens).logits[0, :-1].double() / TEMPERATURE
        current = torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0]
        return current[torch.from_numpy(rows.masks[i][1:])]


def main(model: str, store_path: str, first: str, last: str) -> None:
    engine = open_engine(Path(model))
    store = CheckpointStore(store_path)
    newest = store.newest()
    assert newest is not None
    engine.load(store.read(newest)[0])
    for step in range(int(first), int(last) + 1):
        train(engine, step)
        print(step, engine.digest(), float(torch.rand(())), flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
