"""A named acceptance check: twenty publishes to a real vLLM engine, with tied and untied heads.
A thousand sequences are sampled across them; every token's log-prob is what the transformers model
of the version it is stamped with gives it. Run with -s, it prints the largest difference.

A few more publishes go to an engine of two tensor-parallel workers, each of which takes them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from connectors.engines.client import Completions, HttpEngine
from connectors.engines.types import Completion, EngineState, GenerateRequest, Sampling
from connectors.records import Version
from connectors.weights import Ack, Peer, Snapshot, WeightsError, WeightsSender, plan, shapes_of
from connectors.weights.calls import ask
from connectors.weights.wire import DigestMismatch
from tests.connectors.engine_process import EngineProcess
from tests.models import tiny_model
from tests.vllm_gate import requires_vllm

pytestmark = [requires_vllm, pytest.mark.xdist_group("vllm")]

NUM_PUBLISHES = 20
PROMPTS = [tuple(4 + (7 * j + i) % 250 for j in range(1 + 6 * i)) for i in range(10)]
NUM_SAMPLES = 5  # of each prompt, for each publish: a thousand sequences
MAX_TOKENS = 32
TOLERANCE = 1e-3
DIFFERENT = 0.1  # the two models' log-probs are further apart than this at most tokens
WAIT_S = 60.0

Sampled = tuple[tuple[int, ...], Completion]


class Trial:
    """An engine that is published two models in turn: version N is model N mod 2."""

    def __init__(self, folder: Path, *, tie: bool = True, options: str = "{}") -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        folders = [tiny_model(folder / str(seed), seed=seed, tie=tie) for seed in range(2)]
        self._models = [
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            for model in folders
        ]
        self._snapshots = []
        for model in self._models:
            named = dict(model.named_parameters())
            layout = plan(shapes_of(named), torch.float32, bucket_bytes=1 << 18)
            self._snapshots.append(Snapshot.take(named, layout))
        self._engine = EngineProcess(
            folder / "engine", folders[0], kind="vllm", max_running=50, options=options
        )
        self._senders = [WeightsSender(WAIT_S, "memory"), WeightsSender(WAIT_S, "group")]

    def state(self) -> EngineState:
        return ask(self._engine.url, "GET", "/state", None, EngineState, WAIT_S)

    def publish(self, number: int) -> None:
        """By memory and by the group, in pairs."""
        snapshot = self._snapshots[number % 2]
        answer = self._send(number, snapshot, self._senders[number // 2 % 2])
        assert answer == Ack(version=Version(0, number), digest=snapshot.digest)

    def publish_torn(self, number: int) -> Ack | WeightsError:
        """Other bytes than are announced, by the group."""
        good = self._snapshots[number % 2]
        return self._send(number, Snapshot(good.plan, good.buckets, "0" * 16), self._senders[1])

    def _send(self, number: int, snapshot: Snapshot, sender: WeightsSender) -> Ack | WeightsError:
        url = self._engine.url
        peer = Peer(url, num_ranks=self.state().num_ranks)
        return sender.publish(snapshot, Version(0, number), 1, [peer])[url]

    def sample_across(self, numbers: Iterable[int]) -> list[Sampled]:
        """NUM_SAMPLES sequences of each prompt for each number, which is published meanwhile."""

        async def all_of_them() -> list[Sampled]:
            client, sampled = HttpEngine(self._engine.url), []
            for number in numbers:
                done = await self._across(client, number)
                sampled += [
                    (prompt, one)
                    for prompt, samples in zip(PROMPTS, done, strict=True)
                    for one in samples
                ]
            await client.close()
            return sampled

        return asyncio.run(all_of_them())

    async def _across(self, client: HttpEngine, number: int) -> list[Completions]:
        target = (await client.state()).num_tokens + NUM_SAMPLES * len(PROMPTS)
        running = [
            asyncio.create_task(
                client.generate(
                    GenerateRequest(
                        request_id=f"{number}-{len(prompt)}",
                        token_ids=prompt,
                        num_samples=NUM_SAMPLES,
                        sampling=Sampling(max_tokens=MAX_TOKENS, seed=100 * number),
                    )
                )
            )
            for prompt in PROMPTS
        ]
        deadline = time.monotonic() + WAIT_S
        while (await client.state()).num_tokens < target:
            assert time.monotonic() < deadline, "it generates nothing"
            await asyncio.sleep(0.002)
        await asyncio.to_thread(self.publish, number)
        return await asyncio.gather(*running)

    def differences(self, one: Sampled, *, other: bool = False) -> torch.Tensor:
        """Of each token's log-prob from its version's model, or from the other one."""
        prompt, done = one
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *done.token_ids]])
            scores = [
                model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in self._models
            ]
        return torch.tensor(
            [
                abs(done.logprobs[i] - float(scores[(part.version.number + other) % 2][i, token]))
                for part in done.segments
                for i, token in enumerate(done.token_ids)
                if part.start <= i < part.end
            ]
        )

    def check(self, sampled: list[Sampled]) -> None:
        worst = max(float(self.differences(one).max()) for one in sampled)
        crossed = sum(len(done.segments) > 1 for _, done in sampled)
        print(f"\n{len(sampled)} sequences, {crossed} across a publish, differ by {worst:.1e}")
        assert worst < TOLERANCE
        assert crossed > 0
        wrong = torch.cat([self.differences(one, other=True) for one in sampled[::50]])
        assert float(wrong.median()) > DIFFERENT, "either model would have passed"

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
        self._engine.stop()


@pytest.mark.parametrize(
    "tie", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"]
)
def test_log_probs_are_their_versions_across_twenty_publishes(tmp_path: Path, tie: bool) -> None:
    trial = Trial(tmp_path, tie=tie)
    try:
        trial.publish(0)
        sampled = trial.sample_across(range(1, NUM_PUBLISHES + 1))
    finally:
        trial.close()
    assert len(sampled) == 1000
    served = {part.version.number for _, done in sampled for part in done.segments}
    assert set(range(NUM_PUBLISHES)) <= served
    trial.check(sampled)


@pytest.mark.slow
def test_each_of_two_workers_takes_every_update_and_says_when_it_failed(tmp_path: Path) -> None:
    trial = Trial(tmp_path, options="{tensor_parallel_size = 2}")
    try:
        assert trial.state().num_ranks == 2
        trial.publish(0)
        sampled = trial.sample_across(range(1, 5))
        for number in (5, 6):  # a second one meets what the first left of each worker
            assert isinstance(trial.publish_torn(number), DigestMismatch)
            assert trial.state().version is None
        trial.publish(7)
        sampled += trial.sample_across([8])
    finally:
        trial.close()
    trial.check(sampled)
