"""Several ranks in processes of their own, each with an engine and all calling the same methods.

python -m tests.trainer.ranks JSON      is one rank: a `Job`, see `run`
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from connectors.config import Model, Trainer
from tests.trainer.training import TEMPERATURE, advantages_of, random_rows
from trainer.batches import Rows
from trainer.engine import TrainingEngine
from trainer.packing import assign
from trainer.process_group import World
from trainer.shares import split

TIMEOUT_S = 240.0


def run(model: Path, folder: Path, num_ranks: int, **job: Any) -> list[dict[str, Any]]:
    """What each rank says of `steps` steps under `settings` ({} means DeepSpeed's first stage).
    Rank 0 leaves the model in `folder`/model. `rows`: (seed, groups, group size, steps first to
    last). AssertionError with the error of a rank that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [
                sys.executable, "-P", "-m", "tests.trainer.ranks",
                json.dumps(
                    {
                        "model": str(model), "folder": str(folder), "rank": rank,
                        "num_ranks": num_ranks, "port": store.port, **job,
                    }
                ),
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    answers = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, err[-3000:]
            answers.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return answers


def rows_of(job: dict[str, Any], step: int) -> Rows:
    num_groups, group_size = job.get("groups", [3, 4])
    return random_rows(step, num_groups, group_size)


def one_step(engine: TrainingEngine, rows: Rows, seed: int, max_tokens: int, rank: int) -> Any:
    """Cut as rank 0 would cut it; every rank takes its own share."""
    settings = engine._trainer
    cut = assign(rows, max_tokens, settings.num_minibatches, engine.num_shares)
    shares = split(
        rows, cut.micro_batches, cut.ranks, advantages_of(rows), settings, engine.num_shares
    )
    share = shares[rank // settings.sequence_parallel]
    return engine.train(share, seed, settings, measure_drift=True)


def main(job: dict[str, Any]) -> None:
    rank, num_ranks = job["rank"], job["num_ranks"]
    world = World(
        rank=rank,
        num_ranks=num_ranks,
        local_rank=rank,
        store=dist.TCPStore("127.0.0.1", job["port"], None, is_master=False),
    )
    settings = Trainer(
        num_ranks=num_ranks,
        **{"learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.5} | job["settings"],
    )
    dtype = job.get("dtype", "float32")
    engine = TrainingEngine(
        job["model"], settings, Model(path=job["model"], dtype=dtype), TEMPERATURE, world=world
    )
    folder, done = Path(job["folder"]), []
    if (load := job.get("load")) is not None:
        engine.load(Path(load))
    for step in range(job.get("first", 1), job["last"] + 1):
        result = one_step(engine, rows_of(job, step), step, job.get("max_tokens", 120), rank)
        done.append({"metrics": dict(result.metrics), "skipped": result.skipped,
                     "changed": result.master_changed, "drift": result.drift})  # fmt: skip
        if step == job.get("save_at"):
            engine.capture().write(folder / "state")
    digest = engine.digest()
    engine.save_pretrained(folder / "model")
    engine.close()
    print(json.dumps({"steps": done, "digest": digest}))


def weights_in(folder: Path) -> np.ndarray[Any, Any]:
    """All weights of a model folder, one after another, by name."""
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    return torch.cat([found[name].flatten().double() for name in sorted(found)]).numpy()


def distance(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """Relative, in L2."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def closest(numbers: Sequence[float], to: float) -> float:
    return max(abs(number - to) for number in numbers)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
