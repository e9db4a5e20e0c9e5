"""Low-rank adapters: what of them travels, and what an engine makes of them and of what it started
with, whatever came between."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor

from connectors.engines.host import this_host
from connectors.records import Version
from connectors.weights import (
    Ack,
    Adapters,
    Plan,
    RelabelRequest,
    Snapshot,
    WeightsReceiver,
    digest,
    plan,
    shapes_of,
)
from connectors.weights.adapters import merged
from connectors.weights.base import ModelFolder
from connectors.weights.wire import DigestMismatch, PlanRefused
from tests.connectors.weights_reader import request_for

memory = pytest.mark.skipif(not this_host(), reason="memory files are Linux's")

SHAPES = [("up", (40, 30)), ("norm", (30,)), ("down", (30, 40)), ("bias", (7,))]
RANK, SCALE = 3, 1.7


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES}


def base_of(named: dict[str, Tensor]) -> str:
    return digest(named, plan(shapes_of(named), torch.float32))


BASE = base_of(weights(0))


def adapters(seed: int, targets: Iterable[str] = ("up", "down")) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    named = {}
    for target in targets:
        outputs, inputs = dict(SHAPES)[target]
        named[f"{target}.lora_A"] = torch.randn((RANK, inputs), generator=generator)
        named[f"{target}.lora_B"] = torch.randn((outputs, RANK), generator=generator)
    return named


def snapshot(named: dict[str, Tensor], base: str | None = BASE) -> Snapshot:
    """`base` None: of whole weights."""
    about = None if base is None else Adapters(SCALE, base)
    layout = plan(shapes_of(named), torch.float32, bucket_bytes=1000, adapters=about)
    return Snapshot.take(named, layout)


def expected(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """W0 and what the adapters make of it, in float64."""
    whole = {name: tensor.double() for name, tensor in weights(0).items()}
    for target in {name.rpartition(".")[0] for name in named}:
        a, b = (named[f"{target}.lora_{part}"].double() for part in "AB")
        whole[target] += SCALE * b @ a
    return whole


class Engine:
    """One that holds weights(0), and read them from `folder`."""

    def __init__(self, folder: Path | None = None) -> None:
        self.live = weights(0)
        self.receiver = WeightsReceiver(self.live, folder)

    def load(
        self, taken: Snapshot, write: Callable[[str, Tensor], None] | None = None, epoch: int = 1
    ) -> Ack:
        with self.receiver.loaded(replace(request_for(taken), epoch=epoch)) as staged:
            return self.receiver.apply(staged, write)

    def holds(self, whole: dict[str, Tensor]) -> bool:
        return all(
            torch.allclose(self.live[name], tensor.float(), rtol=1e-6, atol=1e-6)
            for name, tensor in whole.items()
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(weights(0), tmp_path / "model.safetensors")
    return tmp_path


# --------------------------------------------------------------------------------------- the plan
LAYOUT = snapshot(adapters(1)).plan


def test_only_adapters_travel_and_the_plan_says_what_they_are_added_to() -> None:
    assert LAYOUT.num_bytes == 4 * 2 * RANK * (40 + 30)
    assert LAYOUT.adapters == Adapters(SCALE, BASE)
    assert LAYOUT.problem(SHAPES) is None
    assert msgspec.json.decode(msgspec.json.encode(LAYOUT), type=Plan) == LAYOUT


def test_a_plan_of_whole_weights_is_on_the_wire_what_it_was() -> None:
    sent = msgspec.json.encode(plan(SHAPES, "float32"))

    assert set(msgspec.json.decode(sent)) == {"dtype", "buckets"}
    assert msgspec.json.decode(sent, type=Plan).adapters is None


def laid_out(*shapes: tuple[str, tuple[int, ...]], scale: float = SCALE) -> Plan:
    return plan(shapes, "float32", adapters=Adapters(scale, BASE))


UP_A, UP_B = ("up.lora_A", (RANK, 30)), ("up.lora_B", (40, RANK))
NO_ADAPTERS = {
    "no scale": (laid_out(UP_A, UP_B, scale=float("nan")), "finite and above 0, got nan"),
    "none": (replace(LAYOUT, buckets=()), "no adapters"),
    "half": (laid_out(UP_A), "'up.lora_A' and 'nothing' are not the two parts"),
    "turned round": (laid_out(UP_B, UP_A), "not the two parts"),
    "of two": (laid_out(UP_A, ("down.lora_B", (30, RANK))), "not the two parts"),
    "whole weights": (plan(SHAPES, "float32", adapters=Adapters(1.0, BASE)), "not the two parts"),
    "unknown": (laid_out(("x.lora_A", (1, 1)), ("x.lora_B", (1, 1))), "has no 'x'"),
    "of a vector": (
        laid_out(("norm.lora_A", (RANK, 30)), ("norm.lora_B", (1, RANK))),
        "no change of 'norm', which has shape [30]",
    ),
    "too wide": (laid_out(("up.lora_A", (RANK, 31)), UP_B), "no change of 'up'"),
    "too high": (laid_out(UP_A, ("up.lora_B", (41, RANK))), "no change of 'up'"),
    "two ranks": (laid_out(UP_A, ("up.lora_B", (40, 4))), "no change of 'up'"),
    "no rank": (laid_out(("up.lora_A", (0, 30)), ("up.lora_B", (40, 0))), "no change of 'up'"),
    "twice": (
        replace(LAYOUT, buckets=(*LAYOUT.buckets, *LAYOUT.buckets)),
        "has no 'up' for an adapter to change",
    ),
}


@pytest.mark.parametrize(("layout", "why"), NO_ADAPTERS.values(), ids=NO_ADAPTERS.keys())
def test_a_plan_of_what_cannot_be_added_to_the_model_is_none(layout: Plan, why: str) -> None:
    assert why in (layout.problem(SHAPES) or "")


def test_what_is_added_is_rounded_once() -> None:
    """W0 of 1 and a product of 2**-9 make 1.00195 in float32, and 1 in bfloat16, wherever else a
    rounding would stand; three times 2**-9 make 1.0078125, not 1."""
    w, a = torch.ones((1, 1), dtype=torch.bfloat16), torch.full((3, 1), 2.0**-9)

    assert merged(w, a[:1], torch.ones((1, 1)), 1.0).item() == 1.0
    assert merged(w, a, torch.ones((1, 3)), 1.0).item() == 1.0078125


# ------------------------------------------------------------------------------------- the engine
@memory
def test_an_engine_holds_what_it_started_with_plus_scale_times_b_times_a() -> None:
    engine, taken = Engine(), snapshot(adapters(1))

    ack = engine.load(taken)

    assert ack == Ack(version=Version(0, 1), digest=taken.digest)
    assert engine.receiver.digest == taken.digest == digest(adapters(1), taken.plan)
    assert engine.holds(expected(adapters(1)))


@memory
def test_many_updates_leave_the_bits_of_the_last_one_alone() -> None:
    often, once = Engine(), Engine()
    for seed in range(20):
        often.load(snapshot(adapters(seed)))
    once.load(snapshot(adapters(19)))

    assert all(torch.equal(often.live[name], once.live[name]) for name in once.live)


@memory
def test_what_later_adapters_do_not_change_is_what_it_was_at_the_start() -> None:
    engine = Engine()
    engine.load(snapshot(adapters(1)))
    engine.load(snapshot(adapters(2, ["down"])))

    assert engine.holds(expected(adapters(2, ["down"])))
    assert torch.equal(engine.live["up"], weights(0)["up"])
    engine.load(snapshot(adapters(3)))
    assert engine.holds(expected(adapters(3)))


@memory
def test_whole_weights_and_adapters_may_follow_each_other(folder: Path) -> None:
    engine = Engine(folder)
    for seed in (1, 2):
        engine.load(snapshot(weights(seed), base=None))
        assert engine.holds(weights(seed))
        engine.load(snapshot(adapters(seed)))
        assert engine.holds(expected(adapters(seed)))


@memory
def test_adapters_after_whole_weights_need_the_folder_as_it_was(folder: Path) -> None:
    lost, changed = Engine(), Engine(folder)
    save_file(weights(5), folder / "model.safetensors")
    for engine, why in (
        (lost, "have come over"),
        (changed, f"weights {base_of(weights(5))}, this engine started with {BASE}"),
    ):
        whole = snapshot(weights(1), base=None)
        engine.load(whole)
        with pytest.raises(PlanRefused, match=why):
            engine.load(snapshot(adapters(1)))
        assert (engine.receiver.version, engine.receiver.digest) == (Version(0, 1), whole.digest)
        assert engine.holds(weights(1))


@memory
def test_adapters_of_other_base_weights_are_refused_with_both_digests() -> None:
    engine, other = Engine(), base_of(weights(1))

    with pytest.raises(PlanRefused, match=f"{other}, this engine started with {BASE}"):
        engine.load(snapshot(adapters(1), base=other))
    assert (engine.receiver.version, engine.receiver.digest) == (None, BASE)
    assert engine.holds(weights(0))


@memory
@pytest.mark.parametrize("after", ["adapters", "whole weights"])
def test_adapters_that_were_written_in_part_leave_nothing_behind(folder: Path, after: str) -> None:
    engine = Engine(folder)
    engine.load(snapshot(adapters(1)) if after == "adapters" else snapshot(weights(1), base=None))

    def write_one(name: str, tensor: Tensor) -> None:
        if name != "up":
            raise OSError(f"no room for {name}")
        engine.live[name].copy_(tensor)

    with pytest.raises(OSError, match="no room"):
        engine.load(snapshot(adapters(2)), write_one)
    assert (engine.receiver.version, engine.receiver.digest) == (None, "")
    engine.load(snapshot(adapters(3, ["down"])))
    assert engine.holds(expected(adapters(3, ["down"])))


@memory
def test_only_the_trainer_that_sent_adapters_can_name_their_digest_again() -> None:
    """A newer one's equal bytes may be of another base, or at another scale."""
    engine, taken = Engine(), snapshot(adapters(1))
    engine.load(taken)
    again = RelabelRequest(epoch=1, version=Version(0, 2), digest=taken.digest)

    assert engine.receiver.relabel(again) == Ack(version=Version(0, 2), digest=taken.digest)
    with pytest.raises(DigestMismatch):
        engine.receiver.relabel(replace(again, epoch=2, version=Version(0, 3)))
    assert (engine.receiver.version, engine.receiver.digest) == (Version(0, 2), "")
    engine.load(taken, epoch=2)
    assert engine.receiver.digest == taken.digest


# ------------------------------------------------------------------------------- the model's folder
def test_a_folder_gives_its_weights_whichever_file_holds_them(tmp_path: Path) -> None:
    whole = weights(0)
    for file, names in (("1", ("up", "bias")), ("2", ("norm", "down"))):
        save_file({name: whole[name] for name in names}, tmp_path / f"{file}.safetensors")
    index = {
        "weight_map": {name: f"{1 + (name in ('norm', 'down'))}.safetensors" for name in whole}
    }
    (tmp_path / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))

    folder = ModelFolder(tmp_path)
    assert folder.digest(whole, torch.float32) == BASE
    halved = {name: tensor.bfloat16() for name, tensor in whole.items()}
    own = digest(halved, plan(shapes_of(halved), torch.bfloat16))
    assert folder.digest(whole, torch.bfloat16) == own


def test_what_a_folder_does_not_hold_is_refused(folder: Path) -> None:
    with pytest.raises(PlanRefused, match="no base weights 'lm_head' for adapters"):
        ModelFolder(folder).tensor("lm_head", torch.float32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(PlanRefused, match=r"no base weights .*model\.safetensors"):
        ModelFolder(folder)
    (folder / "model.safetensors").write_bytes(b"{")
    with pytest.raises(PlanRefused, match="no base weights"):
        ModelFolder(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder_gives_all_of_a_model_with_adapters(folder: Path, dtype: torch.dtype) -> None:
    found = dict(
        ModelFolder(folder).with_adapters(
            Adapters(SCALE, BASE), adapters(1).items(), dtype, torch.device("cpu")
        )
    )

    assert found.keys() == dict(SHAPES).keys()
    for name, tensor in expected(adapters(1)).items():
        assert found[name].dtype == dtype
        error = 2.0**-7 if dtype == torch.bfloat16 else 1e-6
        assert torch.allclose(found[name].double(), tensor, rtol=error, atol=error)
