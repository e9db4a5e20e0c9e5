"""The weights of the `vllm` engine: a real vLLM on the CPU takes them from a trainer that does only
what it is told. What all engines promise is in test_engine_contract_weights.py."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.engines.sequence import Sequence, run_lengths
from connectors.records import Version
from connectors.weights import (
    Ack,
    JoinRequest,
    LoadRequest,
    Plan,
    RelabelRequest,
    Snapshot,
    UpdateRequest,
    WeightsError,
    plan,
    shapes_of,
)
from connectors.weights.group import Group, ready_key, serve_store
from connectors.weights.wire import UpdateAborted, UpdateInterrupted
from tests.connectors.vllm_bench import Decoding, config, sequence
from tests.models import tiny_model
from tests.vllm_gate import requires_vllm

pytestmark = [requires_vllm, pytest.mark.xdist_group("vllm")]

BUCKET_BYTES = 1 << 16  # many, so that most layers lie in several
TOLERANCE = 1e-3
WAIT_S = 60.0
NEVER_S = 600.0  # longer than any test takes

by_medium = pytest.mark.parametrize("through", ["memory", "group"])


class Model:
    """One the trainer publishes, and what it makes of tokens by itself."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        named = dict(self.plain.named_parameters())
        self.snapshot = Snapshot.take(named, plan(shapes_of(named), torch.float32, BUCKET_BYTES))

    def logprobs(self, one: Sequence) -> torch.Tensor:
        start = len(one.prompt_ids)
        with torch.no_grad():
            ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
            scores = self.plain(ids).logits[0, start - 1 : -1].log_softmax(-1)
        return scores.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]


class Trainer:
    """Rank 0 of a group with the engine's workers, and nothing it does not have to send."""

    def __init__(self, weights: Any, layout: Plan, epoch: int, timeout_s: float = WAIT_S) -> None:
        self._weights, self._epoch = weights, epoch
        self._threads = ThreadPoolExecutor(max_workers=2)
        self._store = serve_store("127.0.0.1", timeout_s)
        world = 1 + weights.num_ranks
        asked = JoinRequest(
            epoch=epoch, group=secrets.token_hex(4), store_host="127.0.0.1",
            store_port=self._store.port, rank=1, world=world, timeout_s=timeout_s, plan=layout,
            num_ranks=weights.num_ranks,
        )  # fmt: skip
        joining = self._threads.submit(weights.join, asked)
        self._group = Group(
            self._store, asked.group, 0, world,
            backend="gloo", address="127.0.0.1", timeout_s=timeout_s, device=torch.device("cpu"),
        )  # fmt: skip
        joining.result(WAIT_S)

    def begin(self, version: Version, digest: str) -> Future[Ack]:
        """Announces an update; returns when the workers wait for its first byte."""
        request = UpdateRequest(
            epoch=self._epoch, group=self._group.name, serial=1, version=version, digest=digest
        )
        answer = self._threads.submit(self._weights.update, request)
        ranks = range(1, 1 + self._weights.num_ranks)
        wait_until(lambda: self._store.check([ready_key(self._group.name, 1, r) for r in ranks]))
        return answer

    def send(self, snapshot: Snapshot, num_buckets: int | None = None) -> None:
        start = torch.ones(1, dtype=torch.int64)
        buckets = [start, *snapshot.buckets[:num_buckets]]
        self._group.broadcast(buckets, time.monotonic() + WAIT_S, lambda: False)

    def close(self) -> None:
        self._group.close()


class Served:
    """vLLM in this process; every version it was sent, and by which model."""

    def __init__(self, folders: list[Path]) -> None:
        from connectors.engines.vllm.weights import VllmWeights, trained_shapes

        torch.set_num_threads(1)
        self.models = [Model(folder) for folder in folders]
        self.plan = self.models[0].snapshot.plan
        self.decoding = Decoding(config(folders[0]))
        self.weights = VllmWeights(self.decoding.decoder, trained_shapes(folders[0]))
        self.epoch = 0
        self.held: dict[Version, Model] = {}
        self._numbers = itertools.count(1)
        self._flights: list[Sequence] = []

    def version(self, model: int) -> Version:
        """A new one, that stands for `model`."""
        version = Version(self.epoch, next(self._numbers))
        self.held[version] = self.models[model]
        return version

    def publish(self, model: int, through: str) -> Version:
        version, snapshot = self.version(model), self.models[model].snapshot
        ack = take(self.weights, snapshot, version, self.epoch, through)
        assert ack == Ack(version=version, digest=snapshot.digest)
        assert (self.weights.version, self.weights.digest) == (version, snapshot.digest)
        return version

    def fly(self) -> Sequence:
        """A sequence that is being decoded."""
        flight = sequence(max_tokens=990)
        self._flights.append(flight)
        self.decoding.add(flight)
        self.goes_on(flight)
        return flight

    def goes_on(self, flight: Sequence) -> None:
        count = len(flight.token_ids)
        wait_until(lambda: len(flight.token_ids) >= count + 20)

    def is_held(self, flight: Sequence) -> None:
        count = len(flight.token_ids)
        # Not a wait for a state: a decode step takes milliseconds, so one would be seen.
        time.sleep(0.3)
        assert len(flight.token_ids) == count
        assert flight not in self.decoding.ended

    def land(self, flight: Sequence) -> list[Version]:
        """Ends it: the versions of its parts, each of whose tokens have that model's log-probs."""
        self.goes_on(flight)
        self.decoding.soon(self.decoding.decoder.remove, flight)
        found = torch.tensor(flight.logprobs)
        segments = run_lengths(flight.versions)
        for part in segments:
            own = self.held[part.version].logprobs(flight)
            here = slice(part.start, part.end)
            assert float((found[here] - own[here]).abs().max()) < TOLERANCE, part
        return [part.version for part in segments]

    def clear(self) -> None:
        for flight in self._flights:
            self.decoding.soon(self.decoding.decoder.remove, flight)
        self._flights.clear()


def take(weights: Any, snapshot: Snapshot, version: Version, epoch: int, through: str) -> Ack:
    """What the engine answers to a whole publish."""
    if through == "memory":
        segment = snapshot.segment
        assert segment is not None
        request = LoadRequest(
            epoch=epoch, version=version, digest=snapshot.digest, plan=snapshot.plan,
            pid=os.getpid(), fd=segment.fd, num_bytes=segment.num_bytes, timeout_s=WAIT_S,
        )  # fmt: skip
        ack: Ack = weights.load(request)
        return ack
    trainer = Trainer(weights, snapshot.plan, epoch)
    try:
        answer = trainer.begin(version, snapshot.digest)
        trainer.send(snapshot)
        return answer.result(WAIT_S)
    finally:
        trainer.close()


def inside_a_layer(layout: Plan) -> int:
    """So many buckets hold the queries of vLLM's joint projection, but not its keys and values."""
    names = [
        [slot.name.rpartition("layers.1.self_attn.")[2] for slot in bucket]
        for bucket in layout.buckets
    ]
    (queries,) = (i for i, bucket in enumerate(names) if "q_proj.weight" in bucket)
    assert not {"k_proj.weight", "v_proj.weight"} & set(names[queries])
    return queries + 1


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    made = Served([tiny_model(root / str(seed), seed=seed) for seed in range(3)])
    yield made
    made.weights.close()
    made.decoding.stop()


@pytest.fixture
def served(engine: Served) -> Iterator[Served]:
    """In an epoch of its own, with model 0 published and nothing to decode."""
    engine.epoch += 1
    engine.publish(0, "memory")
    yield engine
    engine.clear()


# -------------------------------------------------------------------------------------- an update
@pytest.mark.parametrize("tie", [True, False])
def test_a_trainers_parameters_are_known_from_the_model_folder(tmp_path: Path, tie: bool) -> None:
    from connectors.engines.vllm.weights import trained_shapes

    folder = tiny_model(tmp_path, tie=tie)
    assert trained_shapes(folder) == shapes_of(dict(Model(folder).plain.named_parameters()))


def test_it_decodes_while_its_workers_wait_for_the_first_byte(served: Served) -> None:
    first, version, new = served.weights.version, served.version(1), served.models[1].snapshot
    flight = served.fly()
    trainer = Trainer(served.weights, served.plan, served.epoch)
    answer = trainer.begin(version, new.digest)
    served.goes_on(flight)
    assert not answer.done()
    assert set(flight.versions) == {first}
    trainer.send(new)
    assert answer.result(WAIT_S) == Ack(version=version, digest=new.digest)
    assert served.land(flight) == [first, version]
    trainer.close()


@by_medium
def test_it_tells_where_the_time_of_an_update_went(served: Served, through: str) -> None:
    served.publish(1, through)
    parts = served.weights.update_seconds
    assert set(parts) == {"wait", "pause", "receive", "load", "finalize"}
    assert min(parts.values()) >= 0
    assert parts["receive"] + parts["load"] + parts["finalize"] < parts["pause"]
    assert parts["pause"] == served.weights.pause_durations.last
    total = served.weights.update_durations.last
    assert parts["wait"] + parts["pause"] == pytest.approx(total)


# ----------------------------------------------------------------------- one that does not end well
@pytest.mark.parametrize("stops", ["before the first byte", "after it", "inside a layer"])
@by_medium
def test_what_a_stopped_trainer_left_hanging_does_not_hold_a_newer_one_up(
    served: Served, stops: str, through: str
) -> None:
    first, new = served.weights.version, served.models[1].snapshot
    flight = served.fly()
    stopped = Trainer(served.weights, served.plan, served.epoch, timeout_s=NEVER_S)
    answer = stopped.begin(served.version(1), new.digest)
    if stops != "before the first byte":
        stopped.send(new, inside_a_layer(new.plan) if stops == "inside a layer" else 0)
        wait_until(lambda: served.weights.version is None)
        served.is_held(flight)
        assert not answer.done()
    served.epoch += 1
    newer = served.publish(2, through)
    error = UpdateAborted if stops == "before the first byte" else UpdateInterrupted
    with pytest.raises(error, match="called off"):
        answer.result(WAIT_S)
    assert served.land(flight) == [first, newer]
    stopped.close()


@pytest.mark.parametrize(("of", "why"), [("another size", "130"), ("too few", "layers.1.mlp.down")])
@by_medium
def test_parameters_that_are_not_vllms_leave_none_until_whole_ones_are_in(
    served: Served, of: str, why: str, through: str
) -> None:
    """The engine is told of one that is larger than vLLM's, or not of one that vLLM has."""
    from connectors.engines.vllm.weights import VllmWeights

    named = dict(served.models[1].plain.named_parameters())
    if of == "another size":
        named["model.norm.weight"] = torch.ones(130)
    else:
        del named["model.layers.1.mlp.down_proj.weight"]
    shapes = shapes_of(named)
    unloadable = Snapshot.take(named, plan(shapes, torch.float32, BUCKET_BYTES))
    mistaken = VllmWeights(served.decoding.decoder, shapes)

    first, flight = served.weights.version, served.fly()
    served.epoch += 1
    with pytest.raises(UpdateInterrupted, match=why):
        take(mistaken, unloadable, Version(0, 1), served.epoch, through)
    assert (mistaken.version, mistaken.digest) == (None, "")
    served.is_held(flight)
    second = served.publish(2, through)
    assert served.land(flight) == [first, second]
    mistaken.close()


def test_closing_ends_what_waits_for_a_trainer(served: Served) -> None:
    from connectors.engines.vllm.weights import VllmWeights

    shapes = [(slot.name, slot.shape) for slot in served.plan.slots()]
    closing = VllmWeights(served.decoding.decoder, shapes)
    trainer = Trainer(closing, served.plan, served.epoch, timeout_s=NEVER_S)
    answer = trainer.begin(Version(0, 1), "0" * 16)
    closing.close()
    with pytest.raises(UpdateAborted):
        answer.result(WAIT_S)
    trainer.close()
    assert served.land(served.fly()) == [served.weights.version]


def test_a_vllm_that_answers_no_publish_ends_its_engine(tmp_path: Path) -> None:
    """While nothing is decoded, nobody else would notice."""
    from connectors.engines.vllm.weights import VllmWeights, trained_shapes

    folder = tiny_model(tmp_path)
    new = Model(folder).snapshot
    own = Decoding(config(folder, options={"stall_s": 1.0}))
    weights = VllmWeights(own.decoder, trained_shapes(folder))
    try:
        own.process.suspend()
        with pytest.raises(WeightsError):
            take(weights, new, Version(0, 1), 0, "memory")
        wait_until(lambda: bool(own.fatal))
        assert own.fatal == [
            "vLLM did not answer pause_generation for 1 s (engine.options.stall_s)"
        ]
        assert not own.decoder.alive
        with pytest.raises(WeightsError, match="stopping"):  # not held up by the first
            weights.relabel(RelabelRequest(epoch=0, version=Version(0, 2), digest=""))
    finally:
        weights.close()
        own.stop()
