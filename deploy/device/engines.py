"""A real engine process on a device: weights are published to it, then it is asked for tokens."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import tomli_w
import torch

from connectors import weights
from connectors.engines.client import HttpEngine
from connectors.engines.types import Completion, EngineState, GenerateRequest, Sampling
from connectors.engines.vllm import version
from connectors.records import Version
from connectors.run_dir import RunDir
from connectors.weights.calls import ask
from connectors.weights.sender import Through
from deploy import gpus
from deploy.device.parts import (
    REPEATS,
    SHAPES,
    Figures,
    Skipped,
    random_model,
    rate,
    require,
    seconds_of_a_copy,
    synchronize,
)
from deploy.launcher import LocalLauncher, Member, last_line

MEAN_GAP: Final = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Largest mean difference of a log-prob, in nats, between an engine and a plain forward pass."""
OTHER_MODEL: Final = 0.5
"""Two models differ by more than this."""
START_S: Final = 400.0
PUBLISH_S: Final = 60.0

Sampled = list[tuple[tuple[int, ...], Completion]]
"""Prompts and what came of each."""


def publish_and_generate(
    device: str, shape: str, *, kind: Literal["hf", "vllm"], through: Through
) -> Figures:
    """An engine that started with one model gets another's weights; what it samples then has the
    other's log-probs. On several GPUs the engine has the last one and we the first."""
    if kind == "vllm" and (problem := version.problem()) is not None:
        raise Skipped(problem)
    if through == "group" and device == "cuda" and torch.cuda.device_count() == 1:
        raise Skipped("one GPU: NCCL wants one for each rank")
    dtype = torch.bfloat16 if (kind, device) == ("vllm", "cuda") else torch.float32
    old, new = random_model(shape, 0, dtype), random_model(shape, 1, dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model")
        old.save_pretrained(path)
        began = time.perf_counter()
        with _engine(Path(folder), kind, device, dtype) as url:
            figures: Figures = {"start_s": time.perf_counter() - began}
            old, new = old.to(device), new.to(device)
            figures |= _publish(url, new, device, through)
            seconds, sampled = asyncio.run(_generate(url, SHAPES[shape]["vocab_size"]))
    figures["tokens_per_s"] = sum(len(c.token_ids) for _, c in sampled) / seconds
    figures["gap"], figures["gap_to_old"] = _gap(new, sampled), _gap(old, sampled)
    require(figures["gap"] <= MEAN_GAP[dtype], f"the log-probs differ: {figures}")
    require(figures["gap_to_old"] > OTHER_MODEL, f"the weights are still the old ones: {figures}")
    return figures


@contextlib.contextmanager
def _engine(folder: Path, kind: str, device: str, dtype: torch.dtype) -> Iterator[str]:
    """Its URL, once it serves FOLDER/model."""
    config, run_dir = folder / "config.toml", RunDir(folder / "run")
    on_gpu = device == "cuda"
    table: dict[str, Any] = {
        "model": {
            "path": str(folder / "model"),
            "dtype": str(dtype).removeprefix("torch."),
            "context_tokens": 512,
        },
        # A share: with one GPU the engine and this process have it together.
        "engine": {"kind": kind, "num_gpus": 0.5 if on_gpu else 0, "max_running": 32},
        "tasks": {"t": {"reward": "exact_match"}},
    }
    config.write_text(tomli_w.dumps(table))
    arguments = ["engine", str(config), "--run-dir", str(run_dir.path), "--name", "engine-0"]
    member = Member(
        name="engine-0", arguments=arguments, gpus=gpus.visible()[-1] if on_gpu else None
    )
    process = LocalLauncher(run_dir).start(member)
    try:
        deadline = time.monotonic() + START_S
        while (url := run_dir.url("engine-0")) is None:
            said = last_line(run_dir.log_file("engine-0"))
            require(process.poll() is None, f"the engine ended with {process.poll()}: {said}")
            require(time.monotonic() < deadline, f"the engine does not start: {said}")
            time.sleep(0.05)
        yield url
    finally:
        process.kill()


def _publish(url: str, model: Any, device: str, through: Through) -> Figures:
    """The median of a few; the first one, which forms the group, apart."""
    state = ask(url, "GET", "/state", None, EngineState, PUBLISH_S)
    peers = [weights.Peer(url, state.host, state.device, state.num_ranks)]
    parameters = dict(model.named_parameters())
    layout = weights.plan(weights.shapes_of(parameters), model.dtype)
    sender = weights.WeightsSender(PUBLISH_S, through)
    snapshot, seconds = None, []
    with contextlib.closing(sender):
        for number in range(1, REPEATS + 2):
            snapshot = weights.Snapshot.take(parameters, layout, into=snapshot, device=device)
            synchronize(device)
            started = time.perf_counter()
            answer = sender.publish(snapshot, Version(0, number), 1, peers)[url]
            seconds.append(time.perf_counter() - started)
            require(isinstance(answer, weights.Ack), f"publish {number}: {answer}")
    assert snapshot is not None
    copy_s = seconds_of_a_copy(snapshot.buckets, state.device)
    return {
        "first_publish_s": seconds[0],
        **rate(layout.num_bytes, statistics.median(seconds[1:]), copy_s),
    }


async def _generate(url: str, vocabulary: int) -> tuple[float, Sampled]:
    """Seconds and what 32 random prompts gave, decoded together."""
    rng = np.random.default_rng(0)
    prompts = [tuple(map(int, rng.integers(0, vocabulary, 16))) for _ in range(32)]
    requests = [
        GenerateRequest(
            request_id=str(i), token_ids=prompt, sampling=Sampling(max_tokens=32, seed=i)
        )
        for i, prompt in enumerate(prompts)
    ]
    engine = HttpEngine(url)
    started = time.perf_counter()
    try:
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
    finally:
        await engine.close()
    seconds = time.perf_counter() - started
    return seconds, [(p, only) for p, (only,) in zip(prompts, answers, strict=True)]


@torch.no_grad()
def _gap(model: Any, sampled: Sampled) -> float:
    """Mean distance of the engine's log-probs from those of a forward pass of `model`, in nats."""
    gaps = []
    for prompt, completion in sampled:
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=model.device)
        scores = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        answer = slice(len(prompt), None)
        own = scores[len(prompt) - 1 : -1].gather(1, ids[0, answer, None])[:, 0]
        gaps.append((own.cpu() - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(gaps).mean())
