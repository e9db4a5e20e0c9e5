"""The decoder of the `vllm` engine: a real vLLM on the CPU, a tiny model, and plain forward passes
of it to compare with. What all engines promise is in test_engine_contract.py."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from connectors.engines.sequence import Sequence
from connectors.engines.types import Sampling
from connectors.records import Version
from tests.connectors.engine_process import EngineProcess
from tests.connectors.vllm_bench import FIRST, PROMPT, Decoding, config, sequence
from tests.models import tiny_model
from tests.vllm_gate import requires_vllm

# One worker for all of them: the engine is shared, and each process of vLLM takes 0.6 GB.
pytestmark = [requires_vllm, pytest.mark.xdist_group("vllm")]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
TOLERANCE = 1e-3
SECOND = Version(0, 2)


@pytest.fixture(scope="module")
def shared(tiny_model_path: Path) -> Iterator[Decoding]:
    """Left without sequences, unpaused, and with FIRST as its label."""
    made = Decoding(config(tiny_model_path))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def plain(tiny_model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()


def error_of(model: Any, one: Sequence) -> float:
    """The largest difference of its log-probs from a plain forward pass's."""
    start = len(one.prompt_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*one.prompt_ids, *one.token_ids]])).logits[0, start - 1 : -1]
    own = (logits / (one.sampling.temperature or 1.0)).log_softmax(-1)
    chosen = own.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
    return float((chosen - torch.tensor(one.logprobs)).abs().max())


# ------------------------------------------------------------------------------ what is generated
def test_log_probs_are_a_plain_forward_pass_for_every_sampling_in_one_batch(
    shared: Decoding, plain: Any
) -> None:
    mixed = [
        sequence(PROMPT[: 3 + 2 * i], seed=i, temperature=temperature, top_p=top_p)
        for i, (temperature, top_p) in enumerate(
            (t, p) for t in (1.0, 0.6, 1.7, 0.0) for p in (1.0, 0.9, 0.5)
        )
    ]
    assert all(shared.decode(*mixed))
    assert {len(one.token_ids) for one in mixed} == {32}
    assert max(error_of(plain, one) for one in mixed) < TOLERANCE
    assert {version for one in mixed for version in one.versions} == {FIRST}


def test_prompts_computed_in_parts_change_nothing(shared: Decoding, plain: Any) -> None:
    """Together they are more tokens than a step takes, which ends a plain vLLM on CPU."""
    prompts = [tuple((7 * j + i) % 250 + 4 for j in range(900)) for i in range(12)]
    together = [sequence(p, seed=i, max_tokens=8) for i, p in enumerate(prompts)]
    assert all(shared.decode(*together))
    for i in (0, 11):
        alone = sequence(prompts[i], seed=i, max_tokens=8)
        shared.decode(alone)
        assert alone.token_ids == together[i].token_ids
        assert error_of(plain, together[i]) < TOLERANCE


def test_a_sequence_goes_on_from_the_tokens_it_has(shared: Decoding) -> None:
    whole, part = sequence(seed=3), sequence(seed=3)
    shared.decode(whole)
    for i in range(10):
        part.append(whole.token_ids[i], whole.logprobs[i], whole.versions[i])
    shared.decode(part)
    assert part.token_ids == whole.token_ids
    assert part.logprobs == pytest.approx(whole.logprobs, abs=TOLERANCE)


def test_a_pause_that_drops_the_kv_cache_changes_no_token(shared: Decoding) -> None:
    llm = shared.decoder.llm
    undisturbed = [sequence(seed=i, max_tokens=300) for i in range(4)]
    shared.decode(*undisturbed)
    paused = [sequence(seed=i, max_tokens=300) for i in range(4)]
    shared.add(*paused)
    shared.until(lambda: len(paused[0].token_ids) > 20)
    shared.on_loop(llm.pause_generation(mode="keep", clear_cache=True))
    try:
        assert len(paused[0].token_ids) < 300
    finally:
        shared.on_loop(llm.resume_generation())
    shared.until(lambda: all(one in shared.ended for one in paused))
    assert [one.token_ids for one in paused] == [one.token_ids for one in undisturbed]


def test_samples_of_a_prompt_share_the_computation_of_its_whole_blocks(shared: Decoding) -> None:
    load, size = shared.decoder.load, 400
    queries, hits = load.prefix_queries, load.prefix_hits
    prompt = tuple((13 * j) % 250 + 4 for j in range(size))
    shared.decode(*(sequence(prompt, seed=i, max_tokens=4) for i in range(8)))
    assert load.prefix_queries - queries == 8 * size
    computed = 8 * size - (load.prefix_hits - hits)
    assert computed == size + 7 * (size % 32)  # the rest of a block is each one's own


def test_stop_ids_that_are_no_tokens_change_nothing(shared: Decoding) -> None:
    whole = sequence(seed=4)
    shared.decode(whole)
    stop = whole.token_ids[9]
    until = whole.token_ids.index(stop) + 1
    no_tokens = (shared.decoder.vocab_size, -1, 1 << 70)
    stopped = sequence(seed=4, stop_ids=(*no_tokens, stop))
    assert shared.decode(stopped) == [True]
    assert stopped.token_ids == whole.token_ids[:until]


# ------------------------------------------------------------------------------------- versions
def test_a_token_has_the_version_that_vllm_labelled_it_with(shared: Decoding) -> None:
    one = sequence(max_tokens=600)
    shared.add(one)
    try:
        shared.until(lambda: len(one.token_ids) > 20)
        shared.label(SECOND)
        told = len(one.token_ids)
        shared.until(lambda: one in shared.ended)
    finally:
        shared.label(FIRST)
    assert shared.ended[one]
    change = one.versions.index(SECOND)
    assert one.versions == [FIRST] * change + [SECOND] * (600 - change)
    assert 20 < change <= told + 2


@pytest.mark.parametrize("version", [Version(0, 0), Version(-1, -2), Version(1 << 40, 1 << 70)])
def test_every_version_comes_back_from_vllm_as_it_went_in(
    shared: Decoding, version: Version
) -> None:
    shared.label(version)
    try:
        one = sequence(max_tokens=2)
        assert shared.decode(one) == [True]
    finally:
        shared.label(FIRST)
    assert one.versions == [version] * 2


def test_what_vllm_labels_with_no_version_fails(shared: Decoding) -> None:
    shared.label("default")
    try:
        one = sequence()
        assert shared.decode(one) == [False]
    finally:
        shared.label(FIRST)
    assert one.token_ids == []


def output(ids: list[int], logprobs: list[float], scored: list[int] | None = None) -> Any:
    scores = SimpleNamespace(token_ids=ids if scored is None else scored, logprobs=logprobs)
    return SimpleNamespace(token_ids=ids, logprobs=scores, weight_versions=None)


@pytest.mark.parametrize(
    "untrusted",
    [
        output([5, 6], [-1.0], scored=[5]),
        output([5, 6], [-1.0, -1.0], scored=[5, 7]),
        output([5, 6], [-1.0, float("nan")]),
        output([5, 6], [-1.0, float("-inf")]),
        SimpleNamespace(token_ids=[5], logprobs=None, weight_versions=None),
    ],
)
def test_an_output_that_cannot_be_trusted_gives_no_token(untrusted: Any) -> None:
    from connectors.engines.vllm.decoder import Decoding as OneDecoding

    one = sequence()
    decoding = OneDecoding(one)
    decoding.starts = [("0.1", 0)]
    assert decoding.take(output([4], [-0.5])) == 1
    with pytest.raises(ValueError, match="log-prob"):
        decoding.take(untrusted)
    assert (one.token_ids, one.logprobs, one.versions) == ([4], [-0.5], [FIRST])


# ----------------------------------------------------------------------------------- taking out
def test_a_removed_sequence_gets_no_more_tokens_and_vllm_forgets_it(shared: Decoding) -> None:
    stays, leaves, at_once = sequence(seed=2), sequence(max_tokens=900), sequence(max_tokens=900)
    shared.add(leaves)
    shared.until(lambda: len(leaves.token_ids) > 5)
    assert shared.decoder.kv_use > 0

    def swap() -> None:
        shared.decoder.remove(leaves)
        shared.decoder.add(at_once)
        shared.decoder.remove(at_once)  # before vLLM has a name for it
        shared.decoder.add(stays)

    shared.soon(swap)
    count = len(leaves.token_ids)
    shared.until(lambda: stays in shared.ended)
    shared.until(lambda: not shared.decoder.llm.output_processor.request_states)
    assert (len(leaves.token_ids), at_once.token_ids) == (count, [])
    assert not {leaves, at_once} & set(shared.ended)
    assert shared.decoder.kv_use == 0


@pytest.mark.parametrize(
    ("temperature", "refused"),
    [(0.0, False), (0.005, True), (0.01, False), (2.0, False), (2.1, True)],
)
def test_temperatures_that_vllm_would_change_are_refused(
    shared: Decoding, temperature: float, refused: bool
) -> None:
    reason = shared.decoder.refuses(Sampling(temperature=temperature))
    assert (reason is not None) == refused
    assert reason is None or str(temperature) in reason


# ---------------------------------------------------------------------------------- speculation
def test_drafted_tokens_are_those_that_would_have_been_drawn(tmp_path: Path) -> None:
    folder, plain = repeating_model(tmp_path / "repeats")
    samplings = [(0.0, 1.0), (1.0, 1.0), (0.6, 1.0), (1.2, 0.9), (1.7, 0.5), (1.7, 1.0)]
    sequences = [
        sequence(PROMPT[: 8 + i], seed=i, temperature=t, top_p=p, max_tokens=120)
        for i, (t, p) in enumerate(samplings)
    ]
    speculating = Decoding(config(folder, options={"speculative_config": NGRAM}))
    accepted = count_accepted_drafts(speculating.decoder.load)
    try:
        assert all(speculating.decode(*sequences))
    finally:
        speculating.stop()
    drawn = 120 * len(sequences)
    assert 0.2 * drawn < sum(accepted) < 0.8 * drawn  # some drafts are right and some are wrong
    for one in sequences:
        assert one.token_ids == drawn_one_by_one(plain, one)
        assert error_of(plain, one) < TOLERANCE


def repeating_model(folder: Path) -> tuple[Path, Any]:
    """A model that says its last token again, most of the time: its layers add nothing to the
    embedding, which is also its head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(folder), dtype=torch.float32).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.mul_(0.3)
    model.save_pretrained(folder)
    return folder, model


def drawn_one_by_one(model: Any, one: Sequence) -> list[int]:
    """Each token drawn from a plain forward pass over those before it."""
    from connectors.engines.sampling import draw, uniform

    start, count = len(one.prompt_ids), len(one.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*one.prompt_ids, *one.token_ids]])).logits[0, start - 1 : -1]
    sampling = one.sampling
    uniforms = [uniform(one.seed, start + i) for i in range(count)]
    ids, _ = draw(logits, [sampling.temperature] * count, [sampling.top_p] * count, uniforms)
    return [int(i) for i in ids]


def count_accepted_drafts(load: Any) -> list[int]:
    """One entry a step, from now on."""
    accepted: list[int] = []
    record = load.record

    def counting(scheduler_stats: Any, *more: Any, **named: Any) -> None:
        stats = scheduler_stats and scheduler_stats.spec_decoding_stats
        accepted.append(stats.num_accepted_tokens if stats else 0)
        record(scheduler_stats, *more, **named)

    load.record = counting
    return accepted


# --------------------------------------------------------------------------------------- its end
def test_an_engine_that_stands_still_is_given_up_unless_it_is_paused(tiny_model_path: Path) -> None:
    own = Decoding(config(tiny_model_path, options={"stall_s": 2.0}))
    try:
        process = own.process
        one = sequence(max_tokens=900)
        own.on_loop(own.decoder.llm.pause_generation(mode="keep", clear_cache=True))
        own.add(one)
        began = time.monotonic()
        own.until(lambda: time.monotonic() - began > 6)  # which fails when something is fatal
        own.on_loop(own.decoder.llm.resume_generation())
        own.until(lambda: len(one.token_ids) > 5)
        process.suspend()
        wait_for(lambda: bool(own.fatal))
        assert "decoded nothing" in own.fatal[0]
    finally:
        own.stop()
    assert not process.is_running()
    assert len(own.fatal) == 1


def test_the_death_of_vllm_is_told_once_however_many_sequences_run(
    tiny_model_path: Path,
) -> None:
    own = Decoding(config(tiny_model_path))
    try:
        own.add(*(sequence(max_tokens=900, seed=i) for i in range(8)))
        own.process.kill()
        wait_for(lambda: bool(own.fatal))
        wait_for(lambda: not own.decoder.alive)
        assert own.fatal == ["vLLM's engine process died"]
    finally:
        own.stop()


def wait_for(true: Any, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.02)


def vllms_of(engine: EngineProcess) -> list[psutil.Process]:
    children = psutil.Process(engine.process.pid).children(recursive=True)
    return [child for child in children if "VLLM" in " ".join(child.cmdline())]


def kill_while_vllm_is_stopped(engine: EngineProcess) -> None:
    for process in vllms_of(engine):
        process.suspend()
    engine.kill()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param(EngineProcess.stop, 0, marks=pytest.mark.slow),
        pytest.param(EngineProcess.kill, None, marks=pytest.mark.slow),
        (kill_while_vllm_is_stopped, None),
    ],
)
def test_vllms_processes_end_with_their_engine_and_leave_no_file(
    tmp_path: Path,
    tiny_model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[EngineProcess], int | None],
    code: int | None,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short, for sockets
        monkeypatch.setenv("TMPDIR", folder)
        engine = EngineProcess(tmp_path, tiny_model_path, kind="vllm")
        children = psutil.Process(engine.process.pid).children(recursive=True)
        assert vllms_of(engine)
        (own,) = Path(folder).iterdir()
        assert any(file.is_socket() for file in own.iterdir())
        assert end(engine) == code
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []
        assert list(Path(folder).iterdir()) == []
