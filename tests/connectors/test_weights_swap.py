"""Weights of the `hf` engine: what happens beside the generation, and what while it pauses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from connectors.engines.hf.swap import WeightSwap
from connectors.engines.host import this_host
from connectors.records import Version
from connectors.weights import (
    Ack,
    RelabelRequest,
    Snapshot,
    WeightsReceiver,
    plan,
    shapes_of,
)
from connectors.weights.wire import DigestMismatch
from tests.connectors.weights_reader import in_use, request_for

pytestmark = pytest.mark.skipif(not this_host(), reason="memory files are Linux's")


class StillDecoder:
    """Generates nothing; tells what was held whenever it was paused and let go on."""

    alive = True

    def __init__(self) -> None:
        self.sampler = SimpleNamespace(version=None)
        self.swap: WeightSwap
        self.pauses: list[str] = []
        self.num_restarts = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.pauses.append(self.swap.digest)
        yield
        self.pauses.append(self.swap.digest)

    def restart(self) -> None:
        self.num_restarts += 1


def tensors(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"a": torch.randn(300, 20), "b": torch.randn(7)}


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    return tensors(0)


@pytest.fixture
def decoder(parameters: dict[str, torch.Tensor]) -> StillDecoder:
    """With a swap that holds version 0."""
    decoder: Any = StillDecoder()
    decoder.swap = swap = WeightSwap(decoder, WeightsReceiver(parameters))
    swap.relabel(RelabelRequest(epoch=1, version=Version(0, 0), digest=swap.digest))
    return decoder


@pytest.fixture
def snapshot() -> Snapshot:
    named = tensors(1)
    return Snapshot.take(named, plan(shapes_of(named), torch.float32, bucket_bytes=1 << 12))


def test_a_load_stands_between_two_decode_steps_and_gives_the_memory_back(
    decoder: StillDecoder, parameters: dict[str, torch.Tensor], snapshot: Snapshot
) -> None:
    before = decoder.swap.digest

    ack = decoder.swap.load(request_for(snapshot))

    assert ack == Ack(version=Version(0, 1), digest=snapshot.digest)
    assert decoder.pauses == [before, snapshot.digest]
    assert decoder.num_restarts == 1
    assert decoder.swap.version == decoder.sampler.version == Version(0, 1)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in tensors(1).items())
    assert not in_use(snapshot)


def test_a_load_of_other_bytes_than_announced_never_pauses_the_generation(
    decoder: StillDecoder, parameters: dict[str, torch.Tensor], snapshot: Snapshot
) -> None:
    with pytest.raises(DigestMismatch):
        decoder.swap.load(replace(request_for(snapshot), digest="0" * 16))

    assert decoder.pauses == []
    assert decoder.swap.version == Version(0, 0)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in tensors(0).items())


def test_an_update_says_where_its_time_went(decoder: StillDecoder, snapshot: Snapshot) -> None:
    decoder.swap.load(request_for(snapshot))

    parts = decoder.swap.update_seconds
    assert set(parts) == {"receive", "wait", "pause"}
    assert min(parts.values()) >= 0
    assert parts["pause"] == decoder.swap.pause_durations.last
    assert sum(parts.values()) == pytest.approx(decoder.swap.update_durations.last)
