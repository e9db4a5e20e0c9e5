"""What a whole run promises beside surviving kills (tests/chaos): recorded training is what a plain
loop does, failing work leaks no credit."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from connectors.kafka.client import Cluster, Producer, Reader, read_all
from connectors.records import Group, Manifest, Prompt, encode
from deploy.log import opened
from tests.small_run import SmallRun, until
from trainer.reexecute import read_groups
from trainer.step_log import chain, read_steps


@pytest.mark.slow
def test_at_staleness_0_a_plain_loop_and_a_restart_give_the_recorded_training(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """Ten steps with a restart after five, which also halves the learning rate: executed again in
    one go they give the same bits, and a loop of torch alone, fed the recorded trajectories, the
    same losses."""
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        settings={
            "staleness.policy": "sync",
            "checkpoint.every_steps": 5,
            # Adam turns a gradient's rounding into a step of this size; the losses follow.
            "trainer.learning_rate": 1e-4,
        },
    )
    run.run_to_end("--stop-after-steps", 5)
    run.run_to_end("--stop-after-steps", 10, "--set", "trainer.learning_rate=5e-5")
    with opened(run.config, run.run_dir) as cluster:
        manifests = chain(read_steps(cluster))
        batches = _recorded(cluster, manifests)
    assert len({m.epoch for m in manifests}) == 2
    assert [m.staleness["max"] for m in manifests] == [0.0] * 10
    assert len({m.digest for m in manifests}) == 10
    assert run.ask("replay", "--from", 1, "--to", 10) == {
        "steps": 10,
        "equal": True,
        "first_difference": None,
    }
    rates = [float(m.settings["learning_rate"]) for m in manifests]
    assert rates == [1e-4] * 5 + [5e-5] * 5
    losses = _plain_losses(tiny_model_path, batches, rates)
    np.testing.assert_allclose([m.metrics["loss"] for m in manifests], losses, atol=1e-5)


def _recorded(cluster: Cluster, manifests: list[Manifest]) -> list[list[Group]]:
    with closing(Reader(cluster, cluster.topic("trajectories"), {})) as reader:
        return [read_groups(reader, manifest) for manifest in manifests]


def _plain_losses(
    model_path: Path, steps: list[list[Group]], learning_rates: list[float]
) -> list[float]:
    """GRPO with truncated importance weights, row by row, written from the formulas alone."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    losses = []
    for groups, learning_rate in zip(steps, learning_rates, strict=True):
        optimizer.param_groups[0]["lr"] = learning_rate
        tokens = []
        for group in groups:
            rewards = np.array([t.reward for t in group.trajectories])
            spread = rewards.std(ddof=1)
            for trajectory in group.trajectories:
                advantage = (trajectory.reward - rewards.mean()) / (spread + 1e-6)
                if spread == 0:
                    advantage = 0.0
                ids = torch.tensor(trajectory.tokens.astype(np.int64))[None]
                logprobs = torch.log_softmax(model(input_ids=ids).logits[0, :-1], -1)
                chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
                mask = torch.tensor(trajectory.loss_mask[1:] == 1)
                behaviour = torch.tensor(trajectory.logprobs[1:])[mask]
                current = chosen[mask]
                weight = torch.exp(current.detach() - behaviour).clamp(max=2.0)
                tokens.append(-weight * torch.exp(current - current.detach()) * advantage)
        loss = torch.cat(tokens).mean()
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


FAILING_REWARD = '''
def score(sample, prompt):
    """Fails for one prompt in five, however often it is asked."""
    if int(prompt.reward) % 5 == 0:
        raise RuntimeError("this one is never scored")
    ids = sample.trajectory.tokens[sample.trajectory.loss_mask == 1]
    return float((ids % 2 == 0).mean())
'''


@pytest.mark.slow
def test_200_steps_of_failing_rewards_and_malformed_prompts_leak_no_credit(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """20% of the groups fail in the reward, 10% of the prompts are malformed; partition 2 stays
    idle until step 50 and starves nobody."""
    run = SmallRun(
        tmp_path,
        tiny_model_path,
        reward=FAILING_REWARD,
        settings={
            "trainer.num_steps": 200,
            "checkpoint.every_steps": 50,
            "kafka.partitions": 3,
            "tasks.even.reward_retries": 0,
            "sampling.max_tokens": 3,
        },
        fed=False,
    )
    with run.running() as process:
        until(lambda: _topics_are_there(run), "the topics")
        _produce(run.cluster, partitions=(0, 1), count=1000)
        run.wait_for_step(process, 50)
        _produce(run.cluster, partitions=(2,), count=400)
        assert process.wait(timeout=400) == 0, run.logs()
    audit, status = run.ask("audit"), run.ask("status")
    assert audit["ok"], audit
    assert status["step"] == 200
    groups, reasons = status["groups"], status["closed_by_reason"]
    assert groups["trained"] == 800
    assert groups["granted"] == groups["trained"] + groups["closed"] + groups["open"]
    assert groups["open"] <= 8 + 4  # two batches in flight, and one that closed steps refunded
    settled = groups["trained"] + groups["closed"]
    assert reasons["malformed"] / settled == pytest.approx(0.1, abs=0.03)
    assert reasons["reward_failed"] / settled == pytest.approx(0.18, abs=0.04)
    with opened(run.config, run.run_dir) as cluster:
        trained = {r.partition for m in chain(read_steps(cluster)) for r in m.records}
        letters = read_all(cluster, cluster.topic("dead-letters"), range(3))
    assert trained == {0, 1, 2}
    assert len(letters) >= reasons["malformed"]


def _topics_are_there(run: SmallRun) -> bool:
    from connectors.kafka.client import KafkaFailure
    from connectors.kafka.topics import partition_counts

    try:
        return "prompts" in partition_counts(run.cluster)
    except (KafkaFailure, OSError, ValueError):
        return False


def _produce(cluster: Cluster, *, partitions: tuple[int, ...], count: int) -> None:
    """Every tenth prompt is malformed, in one of three ways."""
    bad = [b"{no json", b'{"task": "even"}', json.dumps({"prompt": "x"}).encode()]
    with closing(Producer(cluster)) as producer:
        for i in range(count):
            prompt = encode(Prompt(task="even", prompt=f"say {i}", reward=i // len(partitions)))
            value = bad[i // 10 % 3] if i % 10 == 9 else prompt
            producer.send(cluster.topic("prompts"), partitions[i % len(partitions)], value)
        producer.flush()
