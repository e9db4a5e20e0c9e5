"""Held-out prompts, answered every few versions: what the run has learnt.

    policy ─▶ a version that is due ─▶ its prompts through the rollout and reward operators
                                                      └─▶ one Evaluation a task ─▶ TensorBoard

Not part of the training log: no grants, no ledger, a topic of its own, and nobody waits for it. The
same prompts each time, in the same order, greedily, or several samples each for pass@k. Rollouts go
on meanwhile and weights may change under a long evaluation, so each Evaluation says how many of its
tokens each version wrote.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from statistics import fmean
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from connectors.config import Config
from connectors.engines.pool import EnginePool
from connectors.engines.types import Engine
from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.parsed import parsed
from connectors.kafka.tail import PolicyTail
from connectors.prompt_lines import open_lines, with_task
from connectors.records import (
    HEADER_KIND,
    HEADER_WRITER,
    Closed,
    Estimate,
    Evaluation,
    Group,
    Origin,
    Prompt,
    Sample,
    Version,
    encode,
)
from connectors.run_dir import RunDir
from connectors.text import Text
from operators.estimates import estimate, pass_at_k
from operators.rewards import Rewards
from operators.rollout import AgentTask, Rollout
from operators.user_code import UserCode
from pipelines.eval_curves import EvalCurves
from pipelines.job import wait_for_log
from pipelines.reward import rewards_operator
from pipelines.rollout import load_agent, settings

logger = logging.getLogger(__name__)

NUM_SAMPLES: Final = 3
POLL_S: Final = 0.2
T = TypeVar("T")


def evaluate(config: Config, run_dir: RunDir, stop: threading.Event) -> None:
    """Runs until `stop`; an evaluation under way is given up then, and done by the next start.
    Returns at once when the configuration evaluates nothing."""
    if config.eval.every_versions == 0 or not _evaluated(config):
        return
    cluster = wait_for_log(config, run_dir, stop)
    if cluster is None:
        return
    pool = EnginePool(lambda: run_dir.engine_urls(config))

    async def follow_and_close() -> None:
        try:
            await follow(config, run_dir, cluster, pool, stop)
        finally:
            await pool.close()

    asyncio.run(follow_and_close())


async def follow(
    config: Config, run_dir: RunDir, cluster: Cluster, engine: Engine, stop: threading.Event
) -> None:
    """Evaluates each task at the first announced version of every `eval.every_versions`; only the
    newest if several became due meanwhile."""
    held_out = HeldOut(config, engine)
    newest = await asyncio.to_thread(_newest, cluster)
    with ExitStack() as open_parts:
        tail = open_parts.enter_context(closing(PolicyTail(cluster)))
        producer = open_parts.enter_context(closing(Producer(cluster)))
        curves = open_parts.enter_context(closing(EvalCurves(run_dir.tensorboard)))
        while not stop.is_set():
            announced = [a.version for _, a in await asyncio.to_thread(tail.poll, POLL_S)]
            for task in held_out.tasks:
                version = _due(announced, newest.get(task), config.eval.every_versions)
                if version is None:
                    continue
                result = await _unless(stop, held_out.evaluate(task, version))
                if result is None:
                    return
                newest[task] = version
                if result.num_prompts == 0:
                    logger.warning("evaluation of %s at %s: every prompt failed", task, version)
                    continue
                await asyncio.to_thread(_write, producer, cluster, result)
                curves.write(result)


class HeldOut:
    """The held-out prompts of each task, and how to score them."""

    def __init__(self, config: Config, engine: Engine) -> None:
        text = Text(config.resolve(config.model.path))
        self._settings = config.eval
        self._prompts = {name: _lines(config, name, file) for name, file in _evaluated(config)}
        self._rollout = _rollout(config, engine, text)
        self._rewards: Rewards = rewards_operator(config, text)
        slots = config.engine.max_running * config.engine.count
        self._slots = asyncio.Semaphore(max(1, slots // config.eval.num_samples))
        self._decoded = self._rewards.decoded

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self._prompts)

    async def evaluate(self, task: str, version: Version) -> Evaluation:
        """The mean reward over the prompts that could be scored; `num_failed` counts the others."""
        topic = f"evaluations:{task}:{version}"
        ended = await asyncio.gather(
            *(
                self._one(line, Origin(topic, 0, i), version)
                for i, line in enumerate(self._prompts[task])
            )
        )
        groups = [group for group in ended if isinstance(group, Group)]
        tokens: Counter[Version] = Counter()
        for segment in (s for g in groups for row in g.trajectories for s in row.segments):
            tokens[segment.version] += segment.end - segment.start
        rewards = [_rewards_of(group) for group in groups]  # of each prompt's samples
        found = estimate([fmean(samples) for samples in rewards]) if groups else Estimate(0.0)
        return Evaluation(
            version=version,
            versions=tuple(sorted(tokens)),
            version_tokens=tuple(tokens[v] for v in sorted(tokens)),
            task=task,
            reward=found.mean,
            low=found.low,
            high=found.high,
            pass_at={k: self._pass_at(k, rewards) for k in self._settings.pass_k if groups},
            num_prompts=len(groups),
            num_samples=self._settings.num_samples,
            num_failed=len(ended) - len(groups),
            samples=tuple(
                self._sample(group) for group in ended[:NUM_SAMPLES] if isinstance(group, Group)
            ),
            evaluated_at=time.time(),
        )

    def _pass_at(self, k: int, rewards: Sequence[Sequence[float]]) -> Estimate:
        needed = self._settings.pass_reward
        return estimate([pass_at_k(len(of), _num_passed(of, needed), k) for of in rewards])

    async def _one(self, line: bytes, origin: Origin, version: Version) -> Group | Closed:
        async with self._slots:
            ended = (await self._rollout(line, origin, version)).terminal
            if isinstance(ended, Group):
                ended = await self._rewards(ended)
        if isinstance(ended, Closed):
            logger.warning("%s: %s: %s", origin, ended.reason, ended.message)
        return ended

    def _sample(self, group: Group) -> Sample:
        last = group.trajectories[-1]
        return Sample(
            prompt=_asked(group.prompt),
            completion=self._decoded(last, group.prompt).text,
            reward=last.reward,
        )


def _rollout(config: Config, engine: Engine, text: Text) -> Rollout:
    """`eval.num_samples` trajectories a prompt; a single one is greedy."""
    made, number = settings(config), config.eval.num_samples
    max_tokens = config.eval.max_tokens or made.sampling.max_tokens
    temperature = made.sampling.temperature if number > 1 else 0.0
    sampling = msgspec.structs.replace(
        made.sampling, temperature=temperature, max_tokens=max_tokens
    )
    tasks = {
        name: AgentTask(agent=load_agent(config, config.tasks[name].agent), group_size=number)
        for name, _ in _evaluated(config)
    }
    return Rollout(replace(made, sampling=sampling), tasks, engine, text, UserCode("agents"))


def _rewards_of(group: Group) -> list[float]:
    """Of each sample; the branches of one carry the same."""
    start = len(group.group_id) + 1
    return list(
        {t.trajectory_id[start:].split("/")[0]: t.reward for t in group.trajectories}.values()
    )


def _num_passed(rewards: Sequence[float], needed: float) -> int:
    """Rewards are float32: one of 0.9 is below the number 0.9."""
    least = float(np.float32(needed))
    return sum(reward >= least for reward in rewards)


def _evaluated(config: Config) -> list[tuple[str, str]]:
    """Tasks with held-out prompts, and where those are."""
    named = ((name, task.eval_prompts) for name, task in config.tasks.items())
    return [(name, prompts) for name, prompts in named if prompts is not None]


def _lines(config: Config, task: str, prompts: str) -> list[bytes]:
    """The first `eval.max_prompts` prompts, each naming its task."""
    # A generator's held-out problems are those of another seed.
    lines = open_lines(prompts, base_dir=config.base_dir, seed=config.run.seed + 1_000_003)
    count = config.eval.max_prompts
    if lines.num_lines is not None:
        count = min(count, lines.num_lines)
    return [with_task(lines.line(k), task) for k in range(count)]


def _asked(prompt: Prompt) -> str:
    if prompt.messages:
        return str(prompt.messages[-1].get("content", ""))
    return prompt.prompt if prompt.prompt is not None else str(prompt.token_ids)


def _due(announced: Sequence[Version], last: Version | None, every: int) -> Version | None:
    """The newest announced version that reached another multiple of `every` than the last
    evaluated one, or is of a newer incarnation. Versions may be overtaken while they wait to be
    published, so a multiple itself may never be announced."""
    newest = max((v.incarnation for v in announced), default=0)
    reached = last.number // every if last is not None and last.incarnation == newest else -1
    found = [v for v in announced if v.incarnation == newest and v.number // every > reached]
    by_multiple = {v.number // every: v for v in reversed(found)}
    return by_multiple[max(by_multiple)] if by_multiple else None


def _newest(cluster: Cluster) -> dict[str, Version]:
    """The newest version earlier starts evaluated, by task."""
    records = read_all(cluster, cluster.topic("evaluations"), [0])
    evaluations = [evaluation for _, evaluation in parsed(records, Evaluation)]
    return {e.task: e.version for e in sorted(evaluations, key=lambda e: e.version)}


def _write(producer: Producer, cluster: Cluster, result: Evaluation) -> None:
    producer.append(
        cluster.topic("evaluations"),
        0,
        encode(result),
        key=result.task.encode(),
        headers={HEADER_KIND: "evaluation", HEADER_WRITER: "evaluate"},
    )


async def _unless(stop: threading.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None when told to stop first."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
            if stop.is_set():
                return None
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
