"""The training engine on a device."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import numpy as np
import torch

from connectors import weights
from connectors.config import Model, Trainer
from deploy.device.parts import SHAPES, Figures, random_model, require, timed
from trainer.batches import Rows
from trainer.engine import TrainingEngine
from trainer.packing import assign

NUM_STEPS = 3


def steps(device: str, shape: str) -> Figures:
    """bfloat16, ZeRO-1: steps that change the weights and whose loss is finite; executed again from
    a checkpoint they give the same bits; the published bytes have one digest on every device."""
    settings = Trainer(learning_rate=1e-4, num_gpus=float(device == "cuda"))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path, kept = Path(folder, "model"), Path(folder, "checkpoint")
        random_model(shape, 0, torch.bfloat16).save_pretrained(path)
        kept.mkdir()
        engine = TrainingEngine(path, settings, Model(path=str(path), dtype="bfloat16"), 1.0)
        stack.callback(engine.close)
        on_device = next(iter(engine.named_parameters()))[1].device.type
        require(on_device == device, f"the weights lie on {on_device}")
        engine.capture().write(kept)
        seconds, digests = [], [engine.digest()]
        for seed in range(NUM_STEPS):
            seconds.append(timed(device, lambda seed=seed: _train(engine, shape, seed)))  # type: ignore[misc]
            digests.append(engine.digest())
        require(len(set(digests)) == NUM_STEPS + 1, "a step left the weights as they were")
        engine.load(kept)
        require(engine.digest() == digests[0], "the checkpoint gave other weights back")
        for seed in range(NUM_STEPS):
            _train(engine, shape, seed)
        require(engine.digest() == digests[-1], "the same steps gave other bits")
        snapshot = engine.snapshot()
        take_s = timed(device, lambda: engine.snapshot(into=snapshot))
        on_cpu = [(name, tensor.cpu()) for name, tensor in snapshot.named_tensors()]
        require(
            snapshot.digest == digests[-1] == weights.digest(on_cpu, engine.plan),
            "model, snapshot and its copy on the CPU have different digests",
        )
    figures: Figures = {
        "first_step_s": seconds[0],
        "step_s": min(seconds[1:]),
        "tokens_a_step": _rows(shape, 0).num_tokens,
        "snapshot_s": take_s,
    }
    if device == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return figures


def _train(engine: TrainingEngine, shape: str, seed: int) -> None:
    rows = _rows(shape, seed)
    signs = np.where(rows.rewards > 0.5, 1.0, -1.0)
    advantages = [np.full(len(t), sign) for t, sign in zip(rows.tokens, signs, strict=True)]
    done = engine.step(rows, assign(rows, 2048).micro_batches, advantages, seed)
    require(done.skipped is None, f"a step was skipped: {done.skipped}")
    require(done.master_changed, "the optimizer changed nothing")
    require("loss" in done.metrics, "the loss is not finite")


def _rows(shape: str, seed: int) -> Rows:
    """8 made-up answers of a policy whose every log-prob was -6."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(16, 64 if shape == "tiny" else 512, 8)
    masks = tuple(np.arange(n) >= 8 for n in lengths)
    size = SHAPES[shape]["vocab_size"]
    return Rows(
        ids=tuple(map(str, range(8))),
        tokens=tuple(rng.integers(0, size, n).astype(np.int32) for n in lengths),
        masks=masks,
        logprobs=tuple(np.where(m, -6.0, np.nan).astype(np.float32) for m in masks),
        rewards=rng.random(8),
        groups=np.repeat(np.arange(2), 4),
    )
