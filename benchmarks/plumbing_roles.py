"""The two roles of `benchmarks.plumbing` that stand in for a model, as processes of their own.

    engine     the product's HTTP server
    dataflow   the engine's client replaced, in process
    trainer    the product's loop

An engine answers each request at once with one of NUM_CANNED trajectories as long as the request
allows; a training step changes nothing, so that publishing it relabels.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch

from connectors import weights
from connectors.config import Config, load
from connectors.engines import server
from connectors.engines.metrics import Durations
from connectors.engines.sequence import Sequence
from connectors.engines.types import Completion, EngineState, GenerateRequest, Sampling
from connectors.records import Segment, Version
from connectors.run_dir import RunDir
from connectors.weights.holding import Holding
from deploy.lifeline import die_with
from tests.models import SPECIAL_TOKENS

NUM_CANNED: Final = 64
RIGHT: Final = "7"
"""What half of the trajectories end with, and the prompts' reward asks for."""
VOCABULARY: Final = 260  # of `tests.models.tiny_model`: special tokens, then bytes


def canned(num_tokens: int) -> list[tuple[list[int], list[float]]]:
    """Ids (letters, then a digit) and log-probs (float32, as Python's floats)."""
    rng = np.random.default_rng(0)
    letters = len(SPECIAL_TOKENS) + np.array([_byte_id(c) for c in "abcdefghijklmnopqrstuvwxyz "])
    made = []
    for k in range(NUM_CANNED):
        digit = len(SPECIAL_TOKENS) + _byte_id(RIGHT if k % 2 else "3")
        ids = [*rng.choice(letters, num_tokens - 1).tolist(), digit]
        made.append((ids, (-rng.exponential(0.7, num_tokens)).astype(np.float32).tolist()))
    return made


def _byte_id(character: str) -> int:
    """Of the byte-level alphabet in order, which begins with the printable ones."""
    return ord(character) - ord("!") if character != " " else ord("_") - ord("!")


class CannedDecoder:
    """A `Decoder` that decodes nothing."""

    kind: ClassVar[str] = "hf"
    vocab_size = VOCABULARY
    kv_use = 0.0
    alive = True
    device = torch.device("cpu")

    def __init__(self, config: Config, version: Callable[[], Version | None]) -> None:
        self.context_tokens = config.model.context_tokens
        self.num_tokens = 0
        self._canned = canned(config.sampling.max_tokens)
        self._version = version

    def listen(self, *, on_finished: Callable[[Sequence], None], **_: Any) -> None:
        self._finished = on_finished

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def refuses(self, sampling: Sampling) -> str | None: ...
    def remove(self, sequence: Sequence) -> None: ...

    def add(self, sequence: Sequence) -> None:
        version = self._version()
        assert version is not None
        ids, logprobs = self._canned[sequence.seed % NUM_CANNED]
        sequence.versions += [version] * len(ids)
        sequence.logprobs += logprobs
        sequence.token_ids += ids
        self.num_tokens += len(ids)
        asyncio.get_running_loop().call_soon(self._finished, sequence)


class LabelledWeights(Holding):
    """`Weights` that are never sent: versions are told by relabelling."""

    num_ranks = 1

    def __init__(self) -> None:
        super().__init__(digest=StillEngine().digest())
        self.on_version: Callable[[], None] = lambda: None
        self.update_durations, self.pause_durations = Durations(), Durations()
        self.update_seconds: dict[str, float] = {}

    def relabel(self, request: weights.RelabelRequest) -> weights.Ack:
        held = super().relabel(request)
        self.on_version()
        return held

    def join(self, request: weights.JoinRequest) -> None:
        raise NotImplementedError("the weights never change")

    update = load = join

    def close(self) -> None: ...


class CannedEngine:
    """An `Engine` in the dataflow's own process, of whatever version it is asked for."""

    def __init__(self, config: Config) -> None:
        self._canned = [
            (tuple(ids), tuple(logprobs)) for ids, logprobs in canned(config.sampling.max_tokens)
        ]

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        version = request.min_version or Version(0, 0)
        ids, logprobs = self._canned[(request.sampling.seed or 0) % NUM_CANNED]
        segment = Segment(0, len(ids), version.incarnation, version.number)
        done = Completion(
            token_ids=ids, logprobs=logprobs, segments=(segment,), finish_reason="length"
        )
        return (done,) * request.num_samples

    async def attach(self, request_id: str) -> tuple[Completion, ...] | None:
        return None

    async def cancel(self, request_id: str) -> tuple[Completion, ...]:
        return ()

    def held_up(self, request_id: str) -> bool:
        return False

    async def state(self) -> EngineState:
        raise NotImplementedError


class StillEngine:
    """A `TrainingEngine` whose steps change nothing."""

    vocabulary_size = VOCABULARY
    max_tokens, num_shares = 1 << 20, 1

    def __init__(self) -> None:
        from operators.tracker import TrackerState

        self.tracker = TrackerState()
        self._named = [("weight", torch.nn.Parameter(torch.zeros(8)))]
        self._plan = weights.plan(weights.shapes_of(self._named), torch.float32)

    def step(self, rows: Any, *_: Any, **__: Any) -> Any:
        from trainer.engine import StepResult

        return StepResult(metrics={}, skipped=None, seconds={}, master_changed=False)

    def snapshot(self, into: weights.Snapshot | None = None) -> weights.Snapshot:
        return weights.Snapshot.take(self._named, self._plan, into=into)

    def digest(self) -> str:
        return weights.digest(self._named, self._plan)

    def capture(self, into: Any = None) -> Any:
        from trainer.state_copy import StateCopy

        return into or StateCopy()

    def load(self, folder: Path) -> None: ...
    def save_pretrained(self, folder: Path) -> None: ...

    def environment(self) -> dict[str, str]:
        return {
            "device": "none", "ranks": "1", "zero_stage": "1", "dtype": "float32", "lora": "none",
        }  # fmt: skip

    def check(self) -> None: ...
    def close(self) -> None: ...


def serve_engine(config: Config, run_dir: RunDir) -> None:
    held = LabelledWeights()
    decoder = CannedDecoder(config, lambda: held.version)
    engine = server.EngineServer(decoder, held, max_running=config.engine.max_running)
    asyncio.run(server.serve(engine, run_dir, "engine-0", 0))


def run_dataflow(config: Config, run_dir: RunDir) -> None:
    from pipelines import job

    job.run_dataflow(config, run_dir, {"rollout", "reward"}, engine=CannedEngine(config))


def train(config: Config, run_dir: RunDir) -> None:
    from trainer import gang, loop

    gang.engine = lambda *_: nullcontext(StillEngine())  # type: ignore
    loop.train(config, run_dir)


ROLES: Final = {"engine": serve_engine, "dataflow": run_dataflow, "trainer": train}

if __name__ == "__main__":
    role, config_file, folder, supervisor = sys.argv[1:]
    die_with(int(supervisor))
    ROLES[role](load(config_file), RunDir(folder))
