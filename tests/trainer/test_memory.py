"""What fits is said before training starts, and holds against what training takes."""

from __future__ import annotations

import itertools
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from connectors.config import Trainer
from tests.models import tiny_model
from tests.trainer.training import open_engine, train
from trainer.activations import Activations, _drop_gradient, _pack, activations
from trainer.memory import Available, MemoryShort, available, budget, fits, lines, peak_bytes
from trainer.model_state import ModelState, model_state, sizes
from trainer.packing import Pack
from trainer.policy import PolicyModel, load_policy
from trainer.zero import master_weights

GIB = 2**30
TAKEN = Activations(fixed_bytes=0.1 * GIB, token_bytes=2**20, shared_bytes=0, error=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def state_of(**settings: object) -> ModelState:
    trainer = Trainer().model_copy(update=settings)
    return model_state(trainer, num_parameters=10**8, num_trained=10**8, dtype="float32")


def there(num_bytes: float) -> Available:
    return Available(
        device_bytes=int(num_bytes), host_bytes=int(num_bytes), limit="the machine", heap=1.0
    )


# ----------------------------------------------------------------------------------- activations
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_what_shapes_tell_is_what_torch_allocates(model: Path, checkpointing: bool) -> None:
    policy = load_policy(model, torch.float32, 1.0, gradient_checkpointing=checkpointing)
    told = activations(policy, longest=512, most=2048)
    policy.train()
    for parameter in policy.parameters():
        parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
    for num_tokens in (512, 2048):
        allocated = _allocated(policy, num_tokens)
        assert told.peak_bytes(num_tokens) == pytest.approx(allocated, rel=0.05)


def _allocated(policy: PolicyModel, num_tokens: int) -> int:
    """The most bytes that a pass holds at once, by the profiler's record."""
    packed = _real(_pack([torch.zeros(num_tokens, dtype=torch.int32).numpy()]), num_tokens)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        logprobs_N, _ = policy(packed)
        logprobs_N.sum().backward()
    events = profiler.profiler.kineto_results.events()
    changes = [
        (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
    ]
    held: list[int] = list(itertools.accumulate(change for _, _, change in sorted(changes)))
    return max(held)


def _real(packed: Pack, num_tokens: int) -> Pack:
    places = torch.arange(num_tokens)
    return replace(
        packed,
        tokens_P=torch.zeros(num_tokens, dtype=torch.int64),
        position_ids_P=places,
        predictor_N=places[:-1],
        targets_N=torch.zeros(num_tokens - 1, dtype=torch.int64),
    )


def test_asking_changes_nothing(model: Path) -> None:
    policy = load_policy(model, torch.float32, 1.0).eval()
    before = [parameter.clone() for parameter in policy.parameters()]
    random = torch.get_rng_state()
    activations(policy, longest=64, most=128)
    assert not policy.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(map(torch.equal, before, policy.parameters()))


# ----------------------------------------------------------------------------------- model state
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizer_and_checkpoint_take_what_is_said(model: Path, stage: int) -> None:
    engine = open_engine(model, zero_stage=stage)
    num_all, num_trained = sizes(engine._engine.module.parameters())
    said = model_state(
        engine._trainer, num_parameters=num_all, num_trained=num_trained, dtype="float32"
    )
    train(engine, 0)
    inner = getattr(engine._engine.optimizer, "optimizer", engine._engine.optimizer)
    state = [t for kept in inner.state.values() for t in kept.values() if torch.is_tensor(t)]
    if stage > 0:
        state += master_weights(engine._engine)
    assert sum(tensor.nbytes for tensor in state) == pytest.approx(
        said.bytes_of("optimizer"), rel=0.02
    )
    copied = engine.capture().num_bytes
    assert copied == pytest.approx(said.bytes_of("checkpoint's copy"), rel=0.05)
    assert 2 * engine.plan.num_bytes == said.bytes_of("published weights")
    engine.close()


def test_ranks_offload_and_adapters_take_from_a_rank() -> None:
    alone, parted = state_of(zero_stage=3), state_of(zero_stage=3, num_ranks=4)
    for name in ("parameters", "optimizer", "gradients"):
        assert parted.bytes_of(name) == alone.bytes_of(name) / 4
    moved = state_of(offload="optimizer")
    assert moved.device_bytes < state_of().device_bytes
    assert moved.host_bytes > state_of().host_bytes


# ----------------------------------------------------------------------------------- what is there
def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup/job/rank"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/rank\n")
    for where, limit in ((folder, "max"), (folder.parent, str(GIB // 4))):
        (where / "memory.max").write_text(limit)
        (where / "memory.current").write_text(str(GIB // 8))
        (where / "memory.stat").write_text(f"anon 5\ninactive_file {GIB // 16}\n")
    found = available(torch.device("cpu"), root=tmp_path, ranks_here=2)
    assert found.device_bytes == (GIB // 4 - GIB // 8 + GIB // 16) // 2
    assert "job/memory.max" in found.limit


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        assert available(torch.device("cpu"), root=tmp_path).limit == "the machine"


# ----------------------------------------------------------------------------------------- budget
def test_auto_fills_the_share_and_no_more() -> None:
    state, room = state_of(), there(16 * GIB)
    found = budget(state, TAKEN, room, longest=1000, most=10**6)
    assert found % 256 == 0
    assert peak_bytes(state, TAKEN, room, found) <= 0.8 * 16 * GIB
    assert peak_bytes(state, TAKEN, room, found + 256) > 0.8 * 16 * GIB
    assert budget(state, TAKEN, room, longest=1000, most=3000) == 3000
    assert f"micro-batch of {found} tokens" in lines(state, TAKEN, room, num_tokens=found)[0]


def test_what_does_not_fit_is_told_with_numbers_and_what_helps() -> None:
    with pytest.raises(MemoryShort) as raised:
        budget(state_of(), TAKEN, there(5 * GIB), longest=8000, most=10**6)
    for part in ("8000 tokens", "4.00 GiB", "5.00 GiB", "1.00 MiB a token"):
        assert part in str(raised.value)
    assert "trainer.gradient_checkpointing = true" in str(raised.value)
    assert "zero_stage" not in str(raised.value)  # of one rank it helps nothing
    with pytest.raises(MemoryShort, match="is 100, and a trajectory may have 200 tokens"):
        fits(state_of(), TAKEN, there(64 * GIB), num_tokens=100, longest=200)
    fits(state_of(), TAKEN, there(64 * GIB), num_tokens=400, longest=200)
