"""What a checkpoint costs training, and what a recovery takes.

    python -P -m benchmarks.saving            a table
    python -P -m benchmarks.saving --json     one JSON object

A model of 135 million float32 parameters (SmolLM2's shape, random weights) with its optimizer is
saved as the trainer saves it, in turns with the least there can be: copying the same bytes in
memory. Shown are medians of the same run.

pause   how long training stands still: the copy of model, optimizer and random state
write   how long the background then takes until the checkpoint is published, and retires another

Then a trainer of a small run recovers in a fresh process, from a checkpoint some steps back:

start     from the process's start until its engine stands
load      reading and verifying the checkpoint, and the log's fold
again     executing the steps after it, beside what they took when they were trained
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.publish import build_model
from connectors.config import Model, Trainer
from connectors.records import Manifest
from connectors.run_dir import RunDir
from deploy.log import opened
from deploy.run_folder import load_run
from tests.models import tiny_model
from tests.small_run import SmallRun
from tests.trainer.training import train
from trainer.checkpoint import CheckpointStore, run_store
from trainer.engine import TrainingEngine
from trainer.recovery import recover
from trainer.saving import Saver
from trainer.step_log import StepLog

NUM_STEPS, STEPS_AGAIN = 10, 4


def measure_saving(folder: Path, rounds: int) -> dict[str, Any]:
    build_model(folder / "model")
    engine = TrainingEngine(
        folder / "model", Trainer(num_threads=1), Model(path=str(folder / "model")), 1.0
    )
    train(engine, 0)  # only then the optimizer has all its state
    store = CheckpointStore(folder / "store", keep=1)
    store.clean()
    saver = Saver(store, engine)
    state = engine.capture()
    plain = [torch.empty_like(tensor) for tensor in state.tensors]
    seconds: dict[str, list[float]] = {"copy": [], "pause": [], "write": []}
    for turn in range(-1, rounds):  # the first touches memory
        copied = copy_seconds(state.tensors, plain)
        saver.save(turn + 1, b"")
        saver.wait()
        if turn >= 0:
            for name, value in (
                ("copy", copied), ("pause", saver.pause_s), ("write", saver.write_s),
            ):  # fmt: skip
                seconds[name].append(value)
    engine.close()
    shutil.rmtree(folder / "store")
    medians = {f"{name}_s": statistics.median(values) for name, values in seconds.items()}
    return {
        "bytes": state.num_bytes,
        "rounds": rounds,
        **medians,
        "pause_of_copy": medians["pause_s"] / medians["copy_s"],
    }


def copy_seconds(tensors: list[Tensor], into: list[Tensor]) -> float:
    started = time.perf_counter()
    for tensor, copy in zip(tensors, into, strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - started


# --------------------------------------------------------------------------------------- recovery
def measure_recovery(folder: Path) -> dict[str, Any]:
    """A small run to its end, whose last checkpoint is then taken away."""
    folder.mkdir()
    settings = {
        "trainer.num_steps": NUM_STEPS,
        "checkpoint.every_steps": NUM_STEPS - STEPS_AGAIN,
    }
    run = SmallRun(folder, tiny_model(folder / "model"), settings=settings)
    run.run_to_end()
    shutil.rmtree(run.run_dir.checkpoints / f"step-{NUM_STEPS:08d}")
    with opened(load_run(run.run_dir), run.run_dir):
        started = time.time()
        done = subprocess.run(
            [sys.executable, "-P", "-m", "benchmarks.saving", "--recover", str(run.run_dir.path)],
            stdout=subprocess.PIPE, text=True, check=True,
            env={**os.environ, "HEADWATER_STARTED": str(started)},
        )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def recover_here(run: str) -> dict[str, Any]:
    """What the trainer does when it starts, and when it had done what."""
    started = float(os.environ["HEADWATER_STARTED"])
    run_dir = RunDir(run)
    config = load_run(run_dir)
    with opened(config, run_dir) as cluster:
        engine = TrainingEngine.of(config)
        stands = time.time()
        again: list[Manifest] = []
        loaded_at = stands
        load = engine.load

        def timed(checkpoint: Path) -> None:
            nonlocal loaded_at
            load(checkpoint)
            loaded_at = time.time()

        engine.load = timed  # type: ignore[method-assign]
        steps = StepLog(cluster)
        recover(config, cluster, engine, run_store(config, run_dir), steps, again.append)
        done = time.time()
        steps.close()
        engine.close()
    trained = sum(
        m.metrics["seconds/logprobs"] + m.metrics["seconds/update"] + m.metrics["seconds/snapshot"]
        for m in again
    )
    return {
        "steps_again": len(again),
        "start_s": stands - started,
        "load_s": loaded_at - stands,
        "again_s": done - loaded_at,
        "trained_s": trained,
        "recovery_s": done - started,
    }


def show(found: dict[str, Any]) -> None:
    saving, recovery = found["saving"], found["recovery"]
    print(f"{found['machine']}\n")
    print(f"{saving['bytes'] / 1e9:.2f} GB of state, medians of {saving['rounds']}")
    for name in ("copy", "pause", "write"):
        seconds = saving[f"{name}_s"]
        print(
            f"{name:<8}{seconds:8.3f} s {saving['bytes'] / seconds / 1e9:8.2f} GB/s"
            f" {seconds / saving['copy_s']:8.2f} x copy"
        )
    print(
        f"\na recovery of the tiny model, {recovery['steps_again']} steps executed again\n"
        f"start   {recovery['start_s']:8.2f} s\nload    {recovery['load_s']:8.2f} s\n"
        f"again   {recovery['again_s']:8.2f} s   ({recovery['trained_s']:.2f} s when trained)\n"
        f"in all  {recovery['recovery_s']:8.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--recover", metavar="RUN", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.recover:
        print(json.dumps(recover_here(arguments.recover)))
        return
    with tempfile.TemporaryDirectory() as name:
        machine = (
            f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
            f"load {os.getloadavg()[0]:.1f}"
        )
        found = {
            "machine": machine,
            "saving": measure_saving(Path(name), arguments.rounds),
            "recovery": measure_recovery(Path(name) / "run"),
        }
    if arguments.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()
