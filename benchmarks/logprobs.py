"""What the log-probs of chosen tokens cost in chunks, beside full logits.

    python -P -m benchmarks.logprobs [--rounds N] [--json FILE]

Forward and backward together, 4,096 rows of SmolLM2's head (576 -> 49,152), float32, one thread.
Each measurement is a process of its own, in turns with the others.

full                  log-softmax of all logits, gathered
full with entropies   and the entropies without gradient, which the chunks always give
chunked               `trainer.logprobs.chosen_logprobs`

cpu_s        processor time of forward and backward
extra_bytes  the highest resident memory above what stood before, less the two gradients, which
             each way returns
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import main, ratio, table

NUM_ROWS, HIDDEN, VOCABULARY = 4096, 576, 49152
WAYS = ("full", "full with entropies", "chunked")


def full(hidden_NH: Tensor, weight_VH: Tensor, tokens_N: Tensor) -> Tensor:
    logp_NV = torch.log_softmax(hidden_NH @ weight_VH.t(), -1)
    return logp_NV.gather(1, tokens_N[:, None])[:, 0]


def full_with_entropies(hidden_NH: Tensor, weight_VH: Tensor, tokens_N: Tensor) -> Tensor:
    logp_NV = torch.log_softmax(hidden_NH @ weight_VH.t(), -1)
    with torch.no_grad():
        logp_NV.exp().mul_(logp_NV).sum(-1).neg_()
    return logp_NV.gather(1, tokens_N[:, None])[:, 0]


def chunked(hidden_NH: Tensor, weight_VH: Tensor, tokens_N: Tensor) -> Tensor:
    from trainer.logprobs import chosen_logprobs

    return chosen_logprobs(hidden_NH, weight_VH, tokens_N)[0]


def measure_one(way: str) -> dict[str, float]:
    """In this process, which has measured nothing before."""
    function = dict(zip(WAYS, (full, full_with_entropies, chunked), strict=True))[way]
    torch.manual_seed(0)
    hidden_NH = torch.randn(NUM_ROWS, HIDDEN, requires_grad=True)
    weight_VH = (torch.randn(VOCABULARY, HIDDEN) * 0.05).requires_grad_()
    tokens_N, outer_N = torch.randint(0, VOCABULARY, (NUM_ROWS,)), torch.randn(NUM_ROWS)
    (function(hidden_NH[:8], weight_VH[:64], tokens_N[:8] % 64) @ outer_N[:8]).backward()  # loads
    hidden_NH.grad = weight_VH.grad = None
    Path("/proc/self/clear_refs").write_text("5")  # the highest is from now on
    before, started = _memory("VmRSS"), time.process_time()
    (function(hidden_NH, weight_VH, tokens_N) @ outer_N).backward()
    cpu_s = time.process_time() - started
    gradients = hidden_NH.nbytes + weight_VH.nbytes
    return {"cpu_s": cpu_s, "extra_bytes": _memory("VmHWM") - before - gradients}


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def in_a_process(way: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks.logprobs", "--one", way],
        stdout=subprocess.PIPE, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(rounds: int) -> tuple[dict[str, Any], str]:
    each: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            each[way].append(in_a_process(way))

    def values(way: str, name: str) -> list[float]:
        return [found[name] for found in each[way]]

    figures = {
        way: {
            "cpu_s": statistics.median(values(way, "cpu_s")),
            "extra_bytes": statistics.median(values(way, "extra_bytes")),
            "time_of_full": ratio(values(way, "cpu_s"), values("full", "cpu_s")),
            "memory_of_full": ratio(values(way, "extra_bytes"), values("full", "extra_bytes")),
        }
        for way in WAYS
    }
    setting = (
        f"log-probs of {NUM_ROWS} tokens, {HIDDEN} -> {VOCABULARY}, float32, forward and backward, "
        f"medians of {rounds}"
    )
    shown = table(
        ("", "cpu s", "extra MB", "time of full", "memory of full"),
        [
            (
                way,
                f"{of['cpu_s']:.2f}",
                f"{of['extra_bytes'] / 1e6:.0f}",
                f"{of['time_of_full']:.2f}",
                f"{of['memory_of_full']:.3f}",
            )
            for way, of in figures.items()
        ],
    )
    found = {"setting": setting, "rounds": rounds, "of": figures, "each": each}
    return {"logprobs": found}, f"{setting}\n{shown}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        torch.set_num_threads(1)
        print(json.dumps(measure_one(sys.argv[2])))
    else:
        main(str(__doc__), [measure])
