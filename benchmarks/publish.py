"""What a publish costs, beside a copy in memory and a bare gloo broadcast of the same buckets.

    python -P -m benchmarks.publish                  the hf engine
    python -P -m benchmarks.publish --engine vllm    another kind (`make vllm` first)

A model of 135 million float32 parameters (SmolLM2's shape, random weights) is published to one
engine process through memory and by the group, while it is idle and while it generates. Everything
is measured in the same run, in turns, so that a busy machine is busy for all of it; shown are
medians.

of copy, of broadcast   speed relative to theirs

publish   from the call until the engine acknowledged version and digest
pause     how long the engine generated nothing for it, by its own clock; then where the rest went
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch
from prometheus_client.parser import text_string_to_metric_families

from connectors.engines.types import Completion, EngineState, GenerateRequest, Sampling
from connectors.records import Version
from connectors.weights import Ack, Peer, Plan, Snapshot, WeightsSender, plan, shapes_of
from connectors.weights.calls import Call, ask
from connectors.weights.group import Group, join_store, serve_store
from tests.connectors.engine_process import EngineProcess

MEDIA = ("memory", "group")
NUM_REQUESTS = 4
WAIT_S = 600.0


# --------------------------------------------------------------------------------------- the model
def build_model(folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape)
    model.save_pretrained(folder)
    return model


def two_snapshots(model: Any) -> list[Snapshot]:
    """Of different bytes, to be published in turns."""
    parameters = dict(model.named_parameters())
    layout = plan(shapes_of(parameters), torch.float32)
    first = Snapshot.take(parameters, layout)
    with torch.no_grad():
        next(iter(parameters.values())).add_(1e-3)
    return [first, Snapshot.take(parameters, layout)]


# ---------------------------------------------------------------------------------------- the least
class BareBroadcast:
    """A process that receives the buckets and does nothing with them."""

    def __init__(self, layout: Plan) -> None:
        self._store = serve_store("127.0.0.1", WAIT_S)
        self._pipe, there = multiprocessing.Pipe()
        receiver = multiprocessing.get_context("spawn").Process(
            target=_receive, args=(self._store.port, layout, there), daemon=True
        )
        receiver.start()
        self._group = _group(self._store, rank=0)
        self._process = receiver

    def seconds(self, snapshot: Snapshot) -> float:
        started = time.perf_counter()
        self._group.broadcast(snapshot.buckets, time.monotonic() + WAIT_S, lambda: False)
        self._pipe.recv()
        return time.perf_counter() - started

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _receive(port: int, layout: Plan, pipe: Connection) -> None:
    torch.set_num_threads(1)
    group = _group(join_store("127.0.0.1", port, WAIT_S), rank=1)
    buckets = layout.empty()
    while True:
        group.broadcast(buckets, time.monotonic() + WAIT_S, lambda: False)
        pipe.send("received")


def _group(store: Any, rank: int) -> Group:
    return Group(
        store,
        "bare",
        rank,
        2,
        backend="gloo",
        address="127.0.0.1",
        timeout_s=WAIT_S,
        device=torch.device("cpu"),
    )


def copy_seconds(snapshot: Snapshot, into: list[torch.Tensor]) -> float:
    started = time.perf_counter()
    for bucket, copy in zip(snapshot.buckets, into, strict=True):
        copy.copy_(bucket)
    return time.perf_counter() - started


# --------------------------------------------------------------------------------------- the engine
class Published:
    """An engine and the trainer's side of it."""

    def __init__(self, engine: EngineProcess) -> None:
        self._url = engine.url
        state = self.state()
        self._peer = Peer(engine.url, state.host, state.device, state.num_ranks)
        self._senders = {medium: WeightsSender(WAIT_S, medium) for medium in MEDIA}
        self._number = 0

    def state(self) -> EngineState:
        return ask(self._url, "GET", "/state", None, EngineState, WAIT_S)

    def publish(self, snapshot: Snapshot, medium: str) -> dict[str, float]:
        """Seconds, by name. RuntimeError when the engine does not take the weights."""
        self._number += 1
        version, before = Version(0, self._number), self._paused_s()
        started = time.perf_counter()
        answers = self._senders[medium].publish(snapshot, version, 1, [self._peer])
        seconds = time.perf_counter() - started
        if answers[self._url] != Ack(version=version, digest=snapshot.digest):
            raise RuntimeError(f"not published: {answers[self._url]}")
        parts = self.state().info["update_seconds"]
        return {"publish": seconds, "pause": self._paused_s() - before} | {
            f"  {name}": float(value) for name, value in parts.items() if name != "pause"
        }

    def _paused_s(self) -> float:
        text = urlopen(f"{self._url}/metrics", timeout=WAIT_S).read().decode()
        return next(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "headwater_engine_pause_seconds_sum"
        )

    @contextmanager
    def generating(self) -> Iterator[None]:
        """The engine has requests to work on inside."""
        names = [f"{self._number}-{index}" for index in range(NUM_REQUESTS)]
        calls = [self._generate(name, index) for index, name in enumerate(names)]
        tokens = self.state().num_tokens
        while self.state().num_tokens < tokens + 2 * NUM_REQUESTS:
            time.sleep(0.02)
        try:
            yield
        finally:
            for name in names:
                ask(self._url, "POST", "/cancel", {"request_id": name}, list, WAIT_S)
            while any(call.answer is None for call in calls):
                time.sleep(0.02)

    def _generate(self, name: str, seed: int) -> Call[list[Completion]]:
        request = GenerateRequest(
            request_id=name,
            token_ids=tuple(range(10, 42)),
            sampling=Sampling(max_tokens=1900, seed=seed),
        )
        return Call(self._url, "POST", "/generate", request, list[Completion], WAIT_S)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()


# ------------------------------------------------------------------------------------------ the run
def measure(kind: str, rounds: int) -> None:
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        snapshots = two_snapshots(build_model(folder / "model"))
        engine = EngineProcess(
            folder / "run", folder / "model", kind=kind, context_tokens=2048, max_running=8
        )
        opened.callback(engine.stop)
        published = Published(engine)
        opened.callback(published.close)
        bare = BareBroadcast(snapshots[0].plan)
        opened.callback(bare.close)
        copy = snapshots[0].plan.empty()
        describe(kind, snapshots[0], rounds)

        seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for turn in range(-1, rounds):  # the first warms up: memory is touched, the group formed
            each = Turn(seconds if turn >= 0 else defaultdict(list), snapshots)
            published.publish(each.next(), "memory")  # ends what the engine still worked on
            each.add("", {"copy": copy_seconds(each.next(), copy)})
            each.add("", {"broadcast": bare.seconds(each.next())})
            for medium in MEDIA:
                each.add(medium, published.publish(each.next(), medium))
            with published.generating():
                for medium in MEDIA:
                    each.add(f"{medium}, busy", published.publish(each.next(), medium))
        show(seconds, snapshots[0].plan.num_bytes)


class Turn:
    """One round: bytes that differ from those before, and where the figures go."""

    def __init__(
        self, seconds: dict[tuple[str, str], list[float]], snapshots: list[Snapshot]
    ) -> None:
        self._seconds, self._snapshots = seconds, snapshots

    def next(self) -> Snapshot:
        self._snapshots.reverse()
        return self._snapshots[0]

    def add(self, how: str, seconds: dict[str, float]) -> None:
        for name, value in seconds.items():
            self._seconds[how, name].append(value)


def describe(kind: str, snapshot: Snapshot, rounds: int) -> None:
    layout = snapshot.plan
    print(
        f"engine {kind}, {layout.num_bytes / 1e6:.0f} MB of {layout.dtype} in "
        f"{len(layout.buckets)} buckets, one thread a process, medians of {rounds}\n"
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.1f}; busy: {NUM_REQUESTS} requests generate"
    )


def show(seconds: dict[tuple[str, str], list[float]], num_bytes: int) -> None:
    median = {key: statistics.median(values) for key, values in seconds.items()}
    copy, broadcast = median["", "copy"], median["", "broadcast"]
    print(f"\n{'':<28}{'s':>8}{'GB/s':>8}{'of copy':>9}{'of broadcast':>14}")
    for (how, name), value in median.items():
        line = f"{how:<16}{name:<12}{value:8.3f}"
        if name in ("copy", "broadcast", "publish"):
            line += f"{num_bytes / value / 1e9:8.2f}{copy / value:9.2f}{broadcast / value:14.2f}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"], help="the engine's kind")
    parser.add_argument("--rounds", type=int, default=7, help="how often everything is measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure(arguments.engine, arguments.rounds)


if __name__ == "__main__":
    main()
