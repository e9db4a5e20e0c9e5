"""The contract every engine keeps, checked on real processes over HTTP: what is generated, and how
requests are treated. What it promises about weights is in test_engine_contract_weights.py."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
import torch

from connectors.engines.types import RequestRefused
from connectors.records import Segment, Version
from tests.connectors.engine_bench import (
    CONTEXT_TOKENS,
    LONG,
    MAX_RUNNING,
    PROMPT,
    Bench,
    check,
    connect,
)

NEVER = Version(9, 0)
WEIGHTS_ROUTES = ("join", "update", "load", "relabel", "fence")


# -------------------------------------------------------------------------------- what is generated
@check
async def test_token_ids_go_in_and_ids_log_probs_and_their_version_come_out(bench: Bench) -> None:
    done = await bench.one(max_tokens=20)
    assert len(done.token_ids) == len(done.logprobs) == 20
    first = bench.first
    assert done.segments == (Segment(0, 20, first.incarnation, first.number),)
    assert done.finish_reason == "length"
    assert all(0 <= token_id < 260 for token_id in done.token_ids)


@check
async def test_log_probs_are_those_of_a_forward_pass_at_the_temperature(bench: Bench) -> None:
    """Of prompts from one token to more than any engine prefills or caches as one piece."""
    for num_tokens, temperature in ((1, 1.0), (32, 0.6), (1100, 1.7), (1100, 1.0)):
        prompt = tuple(4 + i * 7 % 250 for i in range(num_tokens))
        for done in await bench.generate(prompt=prompt, temperature=temperature, num_samples=3):
            bench.assert_own(done, prompt=prompt, temperature=temperature)


@check
async def test_log_probs_are_taken_before_top_p_which_leaves_only_likely_tokens(
    bench: Bench,
) -> None:
    top_p, temperature = 0.5, 1.5
    for done in await bench.generate(top_p=top_p, temperature=temperature, num_samples=4):
        bench.assert_own(done, temperature=temperature)
        scaled = bench.models.distributions(0, PROMPT, done) / temperature
        probs = scaled.softmax(-1)
        own = probs.gather(1, torch.tensor(done.token_ids)[:, None])
        more_likely = (probs * (probs > own)).sum(-1)
        assert float(more_likely.max()) < top_p + 1e-3


@check
async def test_greedy_takes_the_most_likely_token_with_its_log_prob_at_temperature_1(
    bench: Bench,
) -> None:
    done = await bench.one(temperature=0.0, max_tokens=48)
    best = bench.models.distributions(0, PROMPT, done).argmax(-1)
    assert list(done.token_ids) == best.tolist()
    bench.assert_own(done, temperature=1.0)


@check
async def test_sample_k_is_drawn_with_seed_plus_k_and_comes_in_its_place(bench: Bench) -> None:
    together = await bench.generate(num_samples=4, seed=20)
    alone = [await bench.one(seed=20 + k) for k in range(4)]
    assert [d.token_ids for d in together] == [d.token_ids for d in alone]
    assert len({d.token_ids for d in alone}) == 4


@check
async def test_a_seed_gives_the_same_tokens_whatever_else_is_decoded(bench: Bench) -> None:
    alone = await bench.generate(seed=5, num_samples=2)
    crowd = [bench.generate(seed=100 + i, max_tokens=20 + 5 * i) for i in range(MAX_RUNNING - 2)]
    again, *_ = await asyncio.gather(bench.generate(seed=5, num_samples=2), *crowd)
    assert [d.token_ids for d in again] == [d.token_ids for d in alone]


@check
async def test_without_a_seed_two_requests_differ(bench: Bench) -> None:
    one, two = await bench.one(seed=None), await bench.one(seed=None)
    assert one.token_ids != two.token_ids


@check
async def test_a_sampled_stop_id_ends_a_sample_and_is_its_last_token(bench: Bench) -> None:
    free = await bench.one()
    stop = free.token_ids[9]
    stopped = await bench.one(stop_ids=(stop,))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    bench.assert_own(stopped)


@check
async def test_max_tokens_is_cut_to_the_room_the_context_has_left(bench: Bench) -> None:
    prompt = tuple(4 + i % 250 for i in range(CONTEXT_TOKENS - 12))
    done = await bench.one(prompt=prompt, max_tokens=500)
    assert len(done.token_ids) == 12
    assert done.finish_reason == "length"
    bench.assert_own(done, prompt=prompt)


# ------------------------------------------------------------------------------------- many at once
@check
async def test_more_samples_than_places_wait_in_line_and_all_come_out_right(bench: Bench) -> None:
    blocker = bench.request(num_samples=MAX_RUNNING, max_tokens=LONG)
    bench.begin(blocker)
    await bench.tokens(MAX_RUNNING)
    requests = [bench.request(num_samples=3, seed=10 * i, max_tokens=12) for i in range(4)]
    waiting = [bench.begin(request) for request in requests]
    await bench.until(lambda state: state.num_queued == 12)
    assert (await bench.state()).num_running == MAX_RUNNING
    await bench.client.cancel(blocker.request_id)
    for i, done in enumerate(await asyncio.gather(*waiting)):
        assert [d.token_ids for d in done] == [
            (await bench.one(seed=10 * i + k, max_tokens=12)).token_ids for k in range(3)
        ]
        for sample in done:
            bench.assert_own(sample)
    await bench.until(lambda state: (state.num_running, state.num_queued) == (0, 0))


# --------------------------------------------------------------------------------- cancel, deadline
@check
async def test_cancel_returns_the_partials_and_the_id_never_attaches_again(bench: Bench) -> None:
    request = bench.request(num_samples=2, max_tokens=LONG)
    running = bench.begin(request)
    attached = asyncio.create_task(bench.client.attach(request.request_id))
    await bench.tokens(20)
    partials = await bench.client.cancel(request.request_id)
    assert await running == partials
    for part in partials:
        assert part.finish_reason == "cancelled"
        assert 0 < len(part.token_ids) < LONG
        bench.assert_own(part)
    assert await attached is None
    assert await bench.client.attach(request.request_id) is None
    assert await bench.client.cancel(request.request_id) == ()
    await bench.until(lambda state: (state.num_running, state.num_queued) == (0, 0))


@check
async def test_cancel_takes_out_what_still_waits(bench: Bench) -> None:
    request = bench.request(min_version=NEVER, num_samples=2)
    waiting = bench.begin(request)
    await bench.until(lambda state: state.num_queued == 2)
    partials = await bench.client.cancel(request.request_id)
    assert [(p.token_ids, p.finish_reason) for p in partials] == [((), "cancelled")] * 2
    assert await waiting == partials
    assert (await bench.state()).num_queued == 0


@check
async def test_the_deadline_returns_the_partials_as_cancelled(bench: Bench) -> None:
    request = bench.request(deadline_s=1.0, max_tokens=LONG)
    never = bench.request(deadline_s=0.1, min_version=NEVER)
    (partial,), (nothing,) = await asyncio.gather(bench.begin(request), bench.begin(never))
    assert (partial.finish_reason, nothing.finish_reason) == ("cancelled", "cancelled")
    assert 0 < len(partial.token_ids) < LONG
    bench.assert_own(partial)
    assert nothing.token_ids == ()
    assert await bench.client.attach(request.request_id) is None


# ---------------------------------------------------------------------------------- asked for again
@check
async def test_attach_waits_for_what_runs_and_finds_what_is_done(bench: Bench) -> None:
    request = bench.request(max_tokens=200)
    running = bench.begin(request)
    await bench.tokens(5)
    attached = asyncio.create_task(bench.client.attach(request.request_id))
    done = await running
    assert len(done[0].token_ids) == 200
    assert await attached == done
    assert await bench.client.attach(request.request_id) == done
    assert await bench.client.attach("never sent") is None


@check
async def test_a_client_that_is_gone_finds_its_work_again_and_nothing_is_redone(
    bench: Bench,
) -> None:
    gone = connect(bench.engine)
    before = (await bench.state()).num_tokens
    request = bench.request(max_tokens=300)
    lost = asyncio.create_task(gone.generate(request))
    await bench.tokens(5)
    lost.cancel()
    await gone.close()
    done = await bench.client.attach(request.request_id)
    assert done is not None
    assert len(done[0].token_ids) == 300
    bench.assert_own(done[0])
    assert (await bench.state()).num_tokens - before == 300


@check
async def test_a_request_sent_again_joins_its_own_work(bench: Bench) -> None:
    before = (await bench.state()).num_tokens
    request = bench.request(max_tokens=100)
    one, two = await asyncio.gather(bench.begin(request), bench.begin(request))
    three = await bench.client.generate(request)
    assert one == two == three
    assert (await bench.state()).num_tokens - before == 100


@check
async def test_a_request_id_used_for_another_request_is_refused(bench: Bench) -> None:
    request = bench.request("twice", seed=1)
    done = await bench.client.generate(request)
    with pytest.raises(RequestRefused, match="another request"):
        await bench.client.generate(bench.request("twice", seed=2))
    assert await bench.client.attach("twice") == done


# -------------------------------------------------------------------------------------- min_version
@check
async def test_nothing_starts_below_min_version_and_it_starts_at_it(bench: Bench) -> None:
    least = bench.next_version()
    waiting = bench.begin(bench.request(min_version=least))
    await bench.until(lambda state: state.num_queued == 1)
    older = await bench.one()
    assert {s.version for s in older.segments} == {bench.first}
    assert not waiting.done()
    await bench.publish(1, least)
    (done,) = await waiting
    assert {s.version for s in done.segments} == {least}
    bench.assert_own(done)


@check
async def test_a_request_sent_again_with_a_higher_min_version_is_computed_anew(
    bench: Bench,
) -> None:
    request = bench.request("again")
    await bench.client.generate(request)
    newer = await bench.publish(1)
    (done,) = await bench.client.generate(bench.request("again", min_version=newer))
    assert {s.version for s in done.segments} == {newer}
    bench.assert_own(done)


# ------------------------------------------------------------------------------------------ refused
NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ()}, "empty"),
    ({"prompt": (5,) * CONTEXT_TOKENS}, "too long"),
    ({"prompt": (5, 260)}, "token id 260 is outside the vocabulary of 260"),
    ({"prompt": (5, -1)}, "token id -1"),
    ({"num_samples": 0}, "num_samples must be from 1 to 4096"),
    ({"num_samples": 4097}, "num_samples must be from 1 to 4096"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"temperature": -1.0}, "temperature must be 0 or more"),
    ({"top_p": 0.0}, "top_p must be in"),
    ({"top_p": 1.1}, "top_p must be in"),
]


@check
async def test_a_request_that_makes_no_sense_is_refused_with_the_reason_and_disturbs_nothing(
    bench: Bench,
) -> None:
    undisturbed = await bench.one(max_tokens=400)
    running = bench.begin(bench.request(max_tokens=400))
    await bench.tokens(5)
    for wrong, reason in NONSENSE:
        with pytest.raises(RequestRefused, match=reason):
            await bench.generate(**wrong)
    state = await bench.state()
    assert (state.version, state.num_queued) == (bench.first, 0)
    (done,) = await running
    assert done.token_ids == undisturbed.token_ids


@check
async def test_a_body_that_is_no_request_is_refused_on_every_route(bench: Bench) -> None:
    before = await bench.state()
    paths = ["generate", "attach", "cancel", *(f"weights/{what}" for what in WEIGHTS_ROUTES)]
    async with aiohttp.ClientSession() as session:
        for path in paths:
            for body in (b'{"no": 1}', b"\xff", b'{"x":' + b"[" * 100_000):
                async with session.post(f"{bench.engine.url}/{path}", data=body) as answer:
                    assert (answer.status, (await answer.json())["kind"]) == (400, "refused"), path
    assert await bench.state() == before


# ------------------------------------------------------------------------------------- what it says
@check
async def test_health_and_metrics_say_what_the_state_says(bench: Bench) -> None:
    running = bench.request(num_samples=2, max_tokens=LONG)
    bench.begin(running)
    bench.begin(bench.request(min_version=NEVER, num_samples=3))
    await bench.until(lambda state: (state.num_running, state.num_queued) == (2, 3))
    await bench.tokens(20)
    assert 0 < (await bench.state()).kv_use <= 1
    metrics = await bench.metrics()
    assert (metrics["running"], metrics["queued"]) == (2, 3)
    assert 0 < metrics["kv_use"] <= 1
    assert await bench.get("/health")
    await bench.client.cancel(running.request_id)
    await bench.until(lambda state: state.num_running == 0)
    state, metrics = await bench.state(), await bench.metrics()
    assert metrics["tokens_total"] == state.num_tokens > 0
    assert metrics["version"] == bench.first.number
    assert metrics["trainer_epoch"] == state.epoch == bench.epoch
    assert metrics["kv_use"] == state.kv_use
    assert metrics["update_seconds_count"] >= 1
    assert metrics["pause_seconds_sum"] > 0
    assert state.info["kind"] == bench.kind
    assert state.info["context_tokens"] == CONTEXT_TOKENS
