"""Export: a checkpoint's weights as a plain Hugging Face folder.

newest checkpoint on the chain, or that of one step ──▶ engine ──▶ digest compared ──▶ DIR
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from trainer import gang
from trainer.checkpoint import run_store
from trainer.checkpoint_meta import CheckpointMeta, kept_on_chain
from trainer.engine import TrainingEngine
from trainer.recovery import load_newest
from trainer.step_log import Chain, read_steps


class NothingToExport(ValueError):
    """The run has no such checkpoint."""


class WeightsDiffer(ValueError):
    """The checkpoint does not hold the weights that its step made."""


def export(
    cluster: Cluster, run_dir: RunDir, config: Config, to: Path, step: int | None = None
) -> CheckpointMeta:
    """Writes the model and its tokenizer into the folder `to`, which is not there or empty: all or
    nothing. What the weights are of is returned. ConfigError for a folder that holds something,
    NothingToExport without a whole checkpoint (of `step`) on the chain, WeightsDiffer when its
    weights are not those of the log."""
    check_target(to)
    chain = Chain()
    for offset, record in read_steps(cluster):
        chain.observe(offset, record)
    store = run_store(config, run_dir)
    kept = [meta.step for meta in kept_on_chain(store, chain)]
    wanted = kept[-1:] if step is None else [s for s in kept if s == step]
    if not wanted:
        if kept:
            there = ", ".join(map(str, kept))
            raise NothingToExport(f"the run has no checkpoint of step {step}; it has {there}")
        raise NothingToExport(
            f"the run, now at step {chain.step}, has no checkpoint: it makes one every "
            f"{config.checkpoint.every_steps} steps (checkpoint.every_steps) and where it stops; "
            "go on to the next one"
        )
    with gang.engine(config, cluster, run_dir, role="export") as engine:
        meta = load_newest(store, engine, chain, at_most=wanted[0])
        if meta is None or (step is not None and meta.step != step):
            raise NothingToExport(f"the checkpoint of step {wanted[0]} is damaged")
        if (digest := engine.digest()) != meta.digest:
            raise WeightsDiffer(
                f"the checkpoint of step {meta.step} holds weights with the digest {digest}; the "
                f"log says {meta.digest}"
            )
        write_model(engine, to)
    return meta


def check_target(to: Path) -> None:
    """ConfigError unless a model may be written there."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"{to} is no empty folder (name another one)")


def write_model(engine: TrainingEngine, to: Path) -> None:
    """The model and its tokenizer into the folder `to`, which is not there or empty: all or
    nothing."""
    part = to.with_name(f".{to.name}.{uuid.uuid4().hex}")
    try:
        part.mkdir(parents=True)
        engine.save_pretrained(part)
        for file in part.iterdir():  # safetensors makes its file readable by its owner alone
            file.chmod(part.stat().st_mode & 0o666)
        part.rename(to)
    finally:
        shutil.rmtree(part, ignore_errors=True)
