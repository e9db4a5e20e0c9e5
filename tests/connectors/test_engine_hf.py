"""The `hf` engine in this process: a real tiny model, real continuous batching; only where weights
come from is a stand-in. References are plain forward passes of the same weights."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from connectors.engines.decoder import Decoder, DecoderOptions, load_model
from connectors.engines.hf import HfEngine
from connectors.engines.jobs import FinishedJobs
from connectors.engines.metrics import Durations
from connectors.engines.swap import WeightSwap
from connectors.engines.types import (
    Completion,
    EngineStartError,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
    Sampling,
)
from connectors.records import Segment, Version
from connectors.weights import Ack, RelabelRequest, UpdateRequest
from connectors.weights.wire import UpdateInterrupted
from tests.models import tiny_model

PROMPT = tuple(range(40, 72))
V1, V2 = Version(0, 1), Version(0, 2)
Scenario = Callable[["Bench"], Awaitable[None]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    root = tmp_path_factory.mktemp("models")
    return {V1: tiny_model(root / "v1", seed=1), V2: tiny_model(root / "v2", seed=2)}


class Weights:
    """Stands for the weights channel's receiver: versions lie in memory, `broken` ones never
    come."""

    def __init__(self, live: Any, versions: dict[Version, Any]) -> None:
        self.live, self.versions = dict(live.named_parameters()), versions
        self.version: Version | None = None
        self.digest, self.epoch = "0" * 16, 0
        self.broken = False

    def receive(self, request: UpdateRequest) -> UpdateRequest:
        if self.broken:
            self.version = None
            raise UpdateInterrupted("the sender is gone")
        return request

    def apply(self, staged: UpdateRequest) -> Ack:
        with torch.no_grad():
            for name, tensor in self.versions[staged.version].named_parameters():
                self.live[name].copy_(tensor)
        self.version = staged.version
        return Ack(version=staged.version, digest=staged.digest)

    def relabel(self, request: RelabelRequest) -> Ack:
        self.version = request.version
        return Ack(version=request.version, digest=request.digest)

    def close(self) -> None: ...


class Bench:
    """One decoder, and an engine over it that each scenario gets anew."""

    def __init__(self, plain: dict[Version, Any], **settings: Any) -> None:
        torch.set_num_threads(1)
        self.plain = plain
        self.max_running = settings.pop("max_running", 16)
        self.orphan_s = settings.pop("orphan_s", 600.0)
        model = copy.deepcopy(plain[V1]).requires_grad_(False)
        self.decoder = Decoder(
            model,
            max_running=self.max_running,
            context_tokens=settings.pop("context_tokens", 512),
            options=DecoderOptions(**settings),
        )
        self.weights = Weights(model, plain)
        self.swap = WeightSwap(self.decoder, self.weights)  # type: ignore[arg-type]
        self.fatal: list[str] = []
        self.decoder.start()

    async def play(self, scenario: Scenario, version: Version | None) -> None:
        self.swap.pause_durations = Durations()
        self.engine = HfEngine(
            self.decoder, self.swap, max_running=self.max_running, orphan_s=self.orphan_s
        )
        self.engine.start(on_fatal=self.fatal.append)
        try:
            if version is not None:
                await self.relabel(version)
            await asyncio.wait_for(scenario(self), 60)
            assert self.fatal == []
        finally:
            self.engine.close()

    async def relabel(self, version: Version) -> None:
        request = RelabelRequest(epoch=0, version=version, digest="0" * 16)
        await asyncio.to_thread(self.swap.relabel, request)

    async def update(self, version: Version) -> None:
        request = UpdateRequest(epoch=0, group="g", serial=0, version=version, digest="0" * 16)
        await asyncio.to_thread(self.swap.update, request)

    async def tokens(self, count: int) -> None:
        """Waits until `count` more tokens than now were generated."""
        target = self.decoder.sampler.num_tokens + count
        await until(lambda: self.decoder.sampler.num_tokens >= target)

    def expected(self, version: Version, prompt: tuple[int, ...], done: Completion) -> torch.Tensor:
        """The version's own log-softmax [tokens, vocabulary] at each generated token."""
        ids = torch.tensor([[*prompt, *done.token_ids]])
        with torch.no_grad():
            logits = self.plain[version](ids).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1)


async def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, "did not come true in time"
        await asyncio.sleep(0.002)


@pytest.fixture(scope="module")
def plain(folders: dict[Version, Path]) -> dict[Version, Any]:
    return {v: load_model(folder, "float32", "cpu") for v, folder in folders.items()}


@pytest.fixture(scope="module")
def shared(plain: dict[Version, Any]) -> Iterator[Bench]:
    bench = Bench(plain)
    yield bench
    bench.decoder.stop()


@pytest.fixture
def run(plain: dict[Version, Any], shared: Bench) -> Callable[..., None]:
    """Runs a scenario at V1: with no settings over the shared decoder, else over one of its own,
    which is also what a scenario needs that leaves the weights changed."""

    def runner(
        scenario: Scenario, *, own: bool = False, version: Version | None = V1, **settings: Any
    ) -> None:
        bench = Bench(plain, **settings) if own or settings or version is None else shared
        try:
            asyncio.run(bench.play(scenario, version))
        finally:
            if bench is not shared:
                bench.swap.close()
                bench.decoder.stop()

    return runner


def request(name: str = "r", **changes: Any) -> GenerateRequest:
    sampling = Sampling(
        max_tokens=changes.pop("max_tokens", 32),
        seed=changes.pop("seed", 1),
        temperature=changes.pop("temperature", 1.0),
        top_p=changes.pop("top_p", 1.0),
        stop_ids=changes.pop("stop_ids", ()),
    )
    prompt = changes.pop("prompt", PROMPT)
    return GenerateRequest(request_id=name, token_ids=prompt, sampling=sampling, **changes)


# ------------------------------------------------------------------------------ what is generated
def test_log_probs_equal_a_plain_forward_pass_at_the_temperature(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        done = await asyncio.gather(
            *(
                bench.engine.generate(
                    request(
                        f"r{i}", prompt=PROMPT[: 1 + 5 * i], temperature=t, top_p=p, num_samples=3
                    )
                )
                for i, (t, p) in enumerate([(1.0, 1.0), (0.6, 0.9), (1.7, 0.5), (0.0, 1.0)])
            )
        )
        for i, t in enumerate([1.0, 0.6, 1.7, 1.0]):
            prompt = PROMPT[: 1 + 5 * i]
            for one in done[i]:
                logprobs = (bench.expected(V1, prompt, one) / t).log_softmax(-1)
                ids = torch.tensor(one.token_ids)[:, None]
                expected = logprobs.gather(1, ids)[:, 0]
                assert torch.allclose(torch.tensor(one.logprobs), expected, atol=1e-4)
                assert one.segments == (Segment(0, 32, 0, 1),)

    run(scenario)


def test_greedy_output_is_the_most_likely_token_each_time(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        (one,) = await bench.engine.generate(request(temperature=0.0, max_tokens=40))
        assert list(one.token_ids) == bench.expected(V1, PROMPT, one).argmax(-1).tolist()

    run(scenario)


def test_samples_of_a_request_are_reproducible_and_do_not_depend_on_the_batch(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        alone = await bench.engine.generate(request("a", num_samples=3, seed=5))
        crowd = [bench.engine.generate(request(f"c{i}", seed=100 + i)) for i in range(12)]
        again, *_ = await asyncio.gather(
            bench.engine.generate(request("b", num_samples=3, seed=5)), *crowd
        )
        assert [c.token_ids for c in again] == [c.token_ids for c in alone]
        (second,) = await bench.engine.generate(request("k", seed=6))
        assert second.token_ids == alone[1].token_ids, "sample k uses seed + k"
        assert len({c.token_ids for c in alone}) == 3

    run(scenario)


def test_without_a_seed_no_two_requests_are_alike(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        one, two = [
            (await bench.engine.generate(request(name, seed=None)))[0] for name in ("a", "b")
        ]
        assert one.token_ids != two.token_ids

    run(scenario)


def test_a_stop_id_ends_a_sample_and_is_its_last_token(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        (free,) = await bench.engine.generate(request("free", max_tokens=32))
        stop = free.token_ids[9]
        first = free.token_ids.index(stop)
        (one,) = await bench.engine.generate(request("stop", stop_ids=(stop,)))
        assert one.token_ids == free.token_ids[: first + 1]
        assert one.finish_reason == "stop"
        assert free.finish_reason == "length"

    run(scenario)


def test_a_prompt_longer_than_one_forward_pass_is_prefilled_in_parts(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        prompt = tuple(4 + (i * 7) % 250 for i in range(150))
        done = await bench.engine.generate(request(prompt=prompt, num_samples=4))
        for one in done:
            expected = bench.expected(V1, prompt, one)
            ids = torch.tensor(one.token_ids)[:, None]
            assert torch.allclose(
                torch.tensor(one.logprobs), expected.gather(1, ids)[:, 0], atol=1e-4
            )

    run(scenario, max_batch_tokens=40, max_running=4)


def test_a_cache_too_small_for_all_still_gives_every_sample_the_same_tokens(run: Any) -> None:
    wide: list[tuple[int, ...]] = []

    async def roomy(bench: Bench) -> None:
        done = await bench.engine.generate(request(num_samples=8, max_tokens=64))
        wide.extend(c.token_ids for c in done)

    async def tight(bench: Bench) -> None:
        assert bench.decoder.kv_tokens < 8 * (32 + 64)
        done = await bench.engine.generate(request(num_samples=8, max_tokens=64))
        assert [c.token_ids for c in done] == wide

    run(roomy)
    run(tight, kv_bytes=1 << 16, page_tokens=16, context_tokens=112)


# ------------------------------------------------------------------------------------- the limits
def test_max_tokens_is_cut_to_the_room_the_context_has_left(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        (one,) = await bench.engine.generate(request(max_tokens=500))
        assert len(one.token_ids) == 64 - len(PROMPT)
        assert one.finish_reason == "length"

    run(scenario, context_tokens=64)


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ()}, "empty"),
    ({"prompt": tuple([5] * 512)}, "too long"),
    ({"prompt": (5, 260)}, "token id 260 is outside the vocabulary of 260"),
    ({"prompt": (5, -1)}, "token id -1"),
    ({"num_samples": 0}, "num_samples"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
]


@pytest.mark.parametrize(("wrong", "message"), NONSENSE)
def test_a_request_that_makes_no_sense_is_refused(
    run: Any, wrong: dict[str, Any], message: str
) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.raises(RequestRefused, match=message):
            await bench.engine.generate(request(**wrong))

    run(scenario)


def test_logits_that_are_not_finite_end_the_sample_as_an_error(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request(max_tokens=400)))
        await bench.tokens(5)
        with bench.decoder.paused(), torch.no_grad():
            bench.decoder.model.model.norm.weight.fill_(float("nan"))
        (one,) = await running
        assert one.finish_reason == "error"
        assert 5 <= len(one.token_ids) < 400
        assert all(-1e4 < p <= 0 for p in one.logprobs)
        state = await bench.engine.state()
        assert (state.num_running, state.num_queued) == (0, 0)

    run(scenario, own=True)


def test_more_samples_than_places_wait_in_line(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request(num_samples=7)))
        await bench.tokens(2)
        state = await bench.engine.state()
        assert (state.num_running, state.num_queued) == (2, 5)
        assert len(await running) == 7

    run(scenario, max_running=2)


# ---------------------------------------------------------------------------------- weights change
def test_a_generation_in_flight_across_a_swap_matches_each_versions_model(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request(num_samples=4, max_tokens=200)))
        await bench.tokens(60)
        await bench.update(V2)
        for one in await running:
            old, new = one.segments
            assert (old.version, new.version) == (V1, V2)
            assert (old.start, old.end, new.end) == (0, new.start, 200)
            ids = torch.tensor(one.token_ids)[:, None]
            for part, version in ((old, V1), (new, V2)):
                expected = bench.expected(version, PROMPT, one).gather(1, ids)[:, 0]
                found = torch.tensor(one.logprobs)
                here = slice(part.start, part.end)
                assert torch.allclose(found[here], expected[here], atol=1e-4)
                other = V2 if version == V1 else V1
                wrong = bench.expected(other, PROMPT, one).gather(1, ids)[:, 0]
                assert not torch.allclose(found[here], wrong[here], atol=0.1)
        assert bench.swap.pause_durations.count == 1

    run(scenario, own=True)


def test_swaps_one_after_another_leave_every_token_with_its_own_version(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = [
            asyncio.create_task(
                bench.engine.generate(request(f"r{i}", num_samples=2, max_tokens=300, seed=10 * i))
            )
            for i in range(3)
        ]
        for version in (V2, V1, V2, V1):
            await bench.tokens(60)
            await bench.update(version)
        for one, two in await asyncio.gather(*running):
            for sample in (one, two):
                assert [s.version for s in sample.segments] == [V1, V2, V1, V2, V1]
                ids = torch.tensor(sample.token_ids)[:, None]
                found = torch.tensor(sample.logprobs)
                for part in sample.segments:
                    expected = bench.expected(part.version, PROMPT, sample).gather(1, ids)[:, 0]
                    here = slice(part.start, part.end)
                    assert torch.allclose(found[here], expected[here], atol=1e-4)

    run(scenario)


def test_an_interrupted_update_holds_what_runs_until_a_whole_version_is_in(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request("r", max_tokens=300)))
        await bench.tokens(20)
        bench.weights.broken = True
        with pytest.raises(UpdateInterrupted):
            await bench.update(V2)
        assert (await bench.engine.state()).version is None
        at = bench.decoder.sampler.num_tokens
        late = asyncio.create_task(bench.engine.generate(request("late", max_tokens=5)))
        await asyncio.sleep(0)
        state = await bench.engine.state()
        assert (state.num_running, state.num_queued) == (1, 1)
        # A decode step takes milliseconds: over this time a running one would be seen.
        await asyncio.to_thread(threading.Event().wait, 0.2)
        assert bench.decoder.sampler.num_tokens == at
        bench.weights.broken = False
        await bench.update(V2)
        (one,) = await running
        assert [s.version for s in one.segments] == [V1, V2]
        assert one.segments[0].end >= 20
        assert [s.version for s in (await late)[0].segments] == [V2]

    run(scenario, own=True)


def test_what_is_held_can_be_cancelled(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request("r", max_tokens=300)))
        await bench.tokens(20)
        bench.weights.broken = True
        with pytest.raises(UpdateInterrupted):
            await bench.update(V2)
        (partial,) = await bench.engine.cancel("r")
        assert len(partial.token_ids) >= 20
        assert await running == (partial,)

    run(scenario, own=True)


def test_a_relabel_gives_later_tokens_the_new_version_without_a_pause(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        (undisturbed,) = await bench.engine.generate(request("u", max_tokens=200))
        running = asyncio.create_task(bench.engine.generate(request("r", max_tokens=200)))
        await bench.tokens(20)
        await bench.relabel(V2)
        (one,) = await running
        assert [s.version for s in one.segments] == [V1, V2]
        assert one.token_ids == undisturbed.token_ids
        assert bench.swap.pause_durations.count == 0

    run(scenario)


def test_nothing_starts_without_a_version_or_below_min_version(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        any_version = asyncio.create_task(bench.engine.generate(request("any")))
        newer = asyncio.create_task(bench.engine.generate(request("newer", min_version=V2)))
        await asyncio.sleep(0)
        state = await bench.engine.state()
        assert (state.version, state.num_running, state.num_queued) == (None, 0, 2)
        await bench.relabel(V1)
        (one,) = await any_version
        assert one.segments[0].version == V1
        assert not newer.done()
        await bench.update(V2)
        (two,) = await newer
        assert {s.version for s in two.segments} == {V2}

    run(scenario, version=None)


# ------------------------------------------------------------------------ cancel, attach, deadline
def test_cancel_returns_what_there_is_and_the_id_never_attaches(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request(num_samples=2, max_tokens=400)))
        await bench.tokens(10)
        partials = await bench.engine.cancel("r")
        assert await running == partials
        assert [p.finish_reason for p in partials] == ["cancelled", "cancelled"]
        assert sum(len(p.token_ids) for p in partials) >= 10
        assert all(len(p.token_ids) == len(p.logprobs) for p in partials)
        assert await bench.engine.attach("r") is None
        assert await bench.engine.cancel("r") == ()
        state = await bench.engine.state()
        assert (state.num_running, state.num_queued) == (0, 0)

    run(scenario)


def test_the_deadline_returns_the_partials(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        partials = await bench.engine.generate(request(deadline_s=0.1, num_samples=3))
        # The version never comes, so nothing was generated.
        assert [p.finish_reason for p in partials] == ["cancelled"] * 3
        assert await bench.engine.attach("r") is None

    run(scenario, version=None)


def test_attach_waits_for_what_runs_and_finds_what_is_done(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request(max_tokens=100)))
        await bench.tokens(5)
        attached = asyncio.create_task(bench.engine.attach("r"))
        done = await running
        assert await attached == done
        assert await bench.engine.attach("r") == done
        assert await bench.engine.attach("unknown") is None

    run(scenario)


def test_an_attached_client_of_a_cancelled_request_gets_nothing(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        running = asyncio.create_task(bench.engine.generate(request(max_tokens=400)))
        await bench.tokens(5)
        attached = asyncio.create_task(bench.engine.attach("r"))
        await asyncio.sleep(0)
        await bench.engine.cancel("r")
        assert await attached is None
        await running

    run(scenario)


def test_a_request_sent_twice_is_computed_once(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        before = bench.decoder.sampler.num_tokens
        one, two = await asyncio.gather(
            bench.engine.generate(request()), bench.engine.generate(request())
        )
        three = await bench.engine.generate(request())
        assert one == two == three
        assert bench.decoder.sampler.num_tokens - before == 32

    run(scenario)


def test_a_request_sent_again_with_a_higher_min_version_is_computed_anew(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.engine.generate(request())
        again = asyncio.create_task(bench.engine.generate(request(min_version=V2)))
        await bench.update(V2)
        assert [s.version for s in (await again)[0].segments] == [V2]

    run(scenario, own=True)


def test_an_id_used_for_another_request_is_refused(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.engine.generate(request(seed=1))
        with pytest.raises(RequestRefused, match="another request"):
            await bench.engine.generate(request(seed=2))

    run(scenario)


def test_a_client_that_leaves_may_come_back_for_a_while(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        leaver = asyncio.create_task(bench.engine.generate(request(max_tokens=200)))
        await bench.tokens(5)
        leaver.cancel()
        done = await bench.engine.attach("r")
        assert done is not None
        assert len(done[0].token_ids) == 200

    run(scenario)


def test_work_nobody_comes_back_for_is_ended(run: Any) -> None:
    async def scenario(bench: Bench) -> None:
        leaver = asyncio.create_task(bench.engine.generate(request()))
        await asyncio.sleep(0)
        leaver.cancel()
        await until(lambda: bench.engine.state_now().num_queued == 0)

    run(scenario, version=None, orphan_s=0.05)


def test_finished_results_are_kept_by_count_and_by_age() -> None:
    now = [0.0]
    finished = FinishedJobs(max_count=2, keep_s=10, clock=lambda: now[0])
    for name in ("a", "b", "c"):
        finished.keep(request(name), ())
        now[0] += 4
    assert [finished.find(n) is not None for n in ("a", "b", "c")] == [False, True, True]
    now[0] = 15.0  # b was kept at 4, c at 8
    assert [finished.find(n) is not None for n in ("b", "c")] == [False, True]


def test_a_decode_step_that_raises_is_fatal_and_not_a_hang(
    plain: dict[Version, Any],
) -> None:
    bench = Bench(plain)

    async def scenario(bench: Bench) -> None:
        bench.decoder.model.forward = lambda **_: (_ for _ in ()).throw(MemoryError("too much"))
        running = asyncio.create_task(bench.engine.generate(request()))
        await until(lambda: bench.fatal != [])
        assert "too much" in bench.fatal[0]
        bench.engine.close()
        with pytest.raises(EngineUnavailable):
            await running
        bench.fatal.clear()

    try:
        asyncio.run(bench.play(scenario, V1))
    finally:
        bench.decoder.stop()


# -------------------------------------------------------------------------------------- the start
def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match=r"has no config\.json"):
        load_model(tmp_path / "nowhere", "float32", "cpu")


def test_a_damaged_model_is_one_clear_line(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(EngineStartError, match="cannot be loaded") as caught:
        load_model(folder, "float32", "cpu")
    assert "\n" not in str(caught.value)
