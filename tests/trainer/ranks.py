"""Several ranks in processes of their own, each with an engine and all calling the same methods.

python -m tests.trainer.ranks JSON      is one rank, which does jobs one after another, see `run`
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
from numpy.typing import NDArray

from connectors.config import Model, Trainer
from tests.trainer.training import TEMPERATURE, advantages_of, random_rows
from trainer.engine import TrainingEngine
from trainer.packing import assign
from trainer.process_group import World
from trainer.shares import split

TIMEOUT_S = 540.0
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.5}

Job = dict[str, Any]
"""model, folder  paths; the model is left in folder/model, a captured state in folder/state
settings       of the trainer, beside SETTINGS
dtype          of the model, float32 if left out
last           the last step; steps begin at `first` (1), `load` names a state to begin from
groups         [number, size] of each step's rows
lengths        of each row, random ones if left out
max_tokens     of a micro-batch, 120 if left out
save_at        the step whose state is captured
nan_at         a step in which a gradient of the last rank is not finite
inf_at         a step whose loss is not finite"""


def run(num_ranks: int, jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """By job, what each rank says. AssertionError with the error of a rank that failed."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    what = {"num_ranks": num_ranks, "port": store.port, "jobs": list(jobs)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.trainer.ranks", json.dumps({**what, "rank": rank})],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    said = []
    try:
        for process in ranks:
            out, err = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, err[-3000:]
            said.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [list(of_job) for of_job in zip(*said, strict=True)]


def do(job: Job, world: World) -> dict[str, Any]:
    """The steps of one rank, the digest after them, and what its bits depend on."""
    settings = Trainer(num_ranks=world.num_ranks, **SETTINGS | job["settings"])
    model = Model(path=job["model"], dtype=job.get("dtype", "float32"))
    engine = TrainingEngine(job["model"], settings, model, TEMPERATURE, world=world)
    folder, done = Path(job["folder"]), []
    folder.mkdir(parents=True, exist_ok=True)
    if (load := job.get("load")) is not None:
        engine.load(Path(load))
    for step in range(job.get("first", 1), job["last"] + 1):
        hooks = []
        if step == job.get("nan_at") and world.rank == world.num_ranks - 1:
            _, parameter = list(engine._engine.module.named_parameters())[3]
            hooks.append(parameter.register_hook(lambda gradient: gradient * float("nan")))
        result = _step(engine, job, step, world.rank)
        for hook in hooks:
            hook.remove()
        done.append(
            {
                "metrics": dict(result.metrics),
                "skipped": result.skipped,
                "changed": result.master_changed,
                "drift": result.drift,
            }
        )
        if step == job.get("save_at"):
            engine.capture().write(folder / "state")
    digest, environment = engine.digest(), engine.environment()
    engine.save_pretrained(folder / "model")
    engine.close()
    return {"steps": done, "digest": digest, "environment": environment}


def _step(engine: TrainingEngine, job: Job, step: int, rank: int) -> Any:
    """Cut as rank 0 would cut it; every rank takes its own share."""
    settings = engine._trainer
    rows = random_rows(step, *job.get("groups", (3, 4)), lengths=job.get("lengths"))
    cut = assign(rows, job.get("max_tokens", 120), settings.num_minibatches, engine.num_shares)
    advantages = advantages_of(rows)
    if step == job.get("inf_at"):
        advantages = [np.full(len(mask), 3e38) for mask in rows.masks]
    shares = split(rows, cut.micro_batches, cut.ranks, advantages, settings, engine.num_shares)
    share = shares[rank // settings.sequence_parallel]
    return engine.train(share, step, settings, measure_drift=True)


def weights_in(folder: Path) -> NDArray[np.float64]:
    """All weights of a model folder, one after another, by name."""
    from safetensors.torch import load_file

    found = load_file(folder / "model.safetensors")
    return torch.cat([found[name].flatten().double() for name in sorted(found)]).numpy()


def distance(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Relative, in L2."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def main(what: dict[str, Any]) -> None:
    store = dist.TCPStore("127.0.0.1", what["port"], None, is_master=False)
    said = []
    for i, job in enumerate(what["jobs"]):
        world = World(
            rank=what["rank"],
            num_ranks=what["num_ranks"],
            local_rank=what["rank"],
            store=dist.PrefixStore(str(i), store),
        )
        said.append(do(job, world))
    print(json.dumps(said))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
