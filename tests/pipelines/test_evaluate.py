"""Held-out prompts every few versions: greedy, the same each time, each version once."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from connectors.config import Config, Eval, parse
from connectors.engines.types import GenerateRequest
from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.topics import ensure_topics
from connectors.records import Announcement, Estimate, Evaluation, Version, decode_as, encode
from connectors.run_dir import RunDir
from operators.estimates import estimate, wilson
from pipelines.eval_curves import EvalCurves
from pipelines.evaluate import _due, _num_passed, follow
from tests.operators.engine_fake import END, FakeEngine, tokenizer

NUM_PROMPTS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer(folder)
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path, cluster: Cluster) -> Config:
    lines = [{"prompt": f"say {n}", "reward": str(n)} for n in range(NUM_PROMPTS - 1)]
    text = "\n".join([*map(json.dumps, lines[:3]), "{no json", *map(json.dumps, lines[3:]), ""])
    (tmp_path / "held_out.jsonl").write_text(text)
    topics = dict.fromkeys(("evaluations", "policy"), 1)
    ensure_topics(cluster, topics)
    table = {
        "run": {"namespace": cluster.namespace},
        "model": {"path": str(model), "context_tokens": 100},
        "tasks": {"t": {"reward": "exact_match", "eval_prompts": "held_out.jsonl"}},
        "eval": {"every_versions": 2, "max_prompts": NUM_PROMPTS, "max_tokens": 5},
    }
    return parse(table, base_dir=str(tmp_path))


def announce(cluster: Cluster, *numbers: int) -> None:
    producer = Producer(cluster)
    for number in numbers:
        record = Announcement(epoch=0, version=Version(0, number), digest="0" * 16, limits=(0,))
        producer.append(cluster.topic("policy"), 0, encode(record))
    producer.close()


def evaluations(cluster: Cluster) -> list[Evaluation]:
    return [
        decode_as(record.value, Evaluation)
        for record in read_all(cluster, cluster.topic("evaluations"), [0])
    ]


class Evaluator:
    """`follow` on a thread of its own, with an engine whose skill grows with its version."""

    def __init__(self, config: Config, cluster: Cluster) -> None:
        run_dir = RunDir(config.resolve("run"))
        self.engine = FakeEngine(self._answer)
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._follow = lambda: asyncio.run(follow(config, run_dir, cluster, self.engine, self.stop))
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Evaluator:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error

    def wait(self, cluster: Cluster, count: int) -> list[Evaluation]:
        deadline = time.monotonic() + 60
        while len(evaluations(cluster)) < count:
            assert self.error is None, self.error
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return evaluations(cluster)

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self.error = error

    def _answer(self, request: GenerateRequest) -> list[int]:
        """The asked digit if it is below the version's number, else nothing."""
        digit = request.token_ids[-1]
        smallest = 4 + 15  # id of "0" among the sorted bytes, after the special tokens
        return [digit, END] if digit - smallest < self.engine.version.number else [END]


def test_due_versions_are_evaluated_once_greedily_on_the_same_prompts(
    config: Config, cluster: Cluster
) -> None:
    with Evaluator(config, cluster) as evaluator:
        announce(cluster, 0, 0)
        (first,) = evaluator.wait(cluster, 1)
        evaluator.engine.version = Version(0, 3)
        announce(cluster, 0, 1, 2, 2)
        _, second = evaluator.wait(cluster, 2)
        evaluator.engine.version = Version(0, 8)
        announce(cluster, 3, 6, 7)
        _, _, third = evaluator.wait(cluster, 3)
    assert [e.version.number for e in (first, second, third)] == [0, 2, 6]
    assert [e.reward for e in (first, second, third)] == [0.0, 0.6, 1.0]
    assert {(e.num_prompts, e.num_failed) for e in (first, second, third)} == {(5, 1)}
    assert second.versions == (Version(0, 3),)
    assert second.version_tokens == (3 * 2 + 2 * 1,)
    assert (second.low, second.high) == wilson(3, 5)
    assert [s.prompt for s in second.samples] == ["say 0", "say 1", "say 2"]
    assert [s.completion for s in second.samples] == ["0", "1", "2"]
    requests = evaluator.engine.requests
    assert {r.sampling.temperature for r in requests} == {0.0}
    assert {r.sampling.max_tokens for r in requests} == {5}
    assert {r.min_version for r in requests if "0.2" in r.request_id} == {Version(0, 2)}


@pytest.mark.parametrize(
    ("announced", "last", "due"),
    [
        ([0], None, 0),
        ([0, 1, 2], 0, 2),
        ([1], 0, None),
        ([3], 0, 3),  # version 2 was overtaken before it was published
        ([3, 4, 5], 0, 4),
        ([2, 3], 2, None),
        ([7], 2, 7),
    ],
)
def test_a_version_that_was_never_announced_is_evaluated_at_the_next(
    announced: list[int], last: int | None, due: int | None
) -> None:
    versions = [Version(0, number) for number in announced]
    found = _due(versions, None if last is None else Version(0, last), 2)
    assert found == (None if due is None else Version(0, due))


def test_after_a_fork_the_new_incarnation_is_evaluated_from_there_on() -> None:
    announced = [Version(0, 50), Version(1, 20), Version(1, 21)]
    assert _due(announced, Version(0, 48), 2) == Version(1, 20)
    assert _due([Version(1, 21)], Version(1, 20), 2) is None
    assert _due([Version(1, 22)], Version(1, 20), 2) == Version(1, 22)


def test_a_restarted_evaluation_repeats_nothing(config: Config, cluster: Cluster) -> None:
    announce(cluster, 0)
    with Evaluator(config, cluster) as evaluator:
        evaluator.wait(cluster, 1)
    with Evaluator(config, cluster) as evaluator:
        announce(cluster, 2)
        again = evaluator.wait(cluster, 2)
    assert [e.version.number for e in again] == [0, 2]


def test_a_stop_does_not_wait_for_an_engine_that_never_answers(
    config: Config, cluster: Cluster
) -> None:
    announce(cluster, 0)
    with Evaluator(config, cluster) as evaluator:
        evaluator.engine._answer = lambda request: None
        deadline = time.monotonic() + 60
        while not evaluator.engine.requests:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert evaluations(cluster) == []


def test_several_samples_a_prompt_are_drawn_and_give_pass_at_k(
    config: Config, cluster: Cluster
) -> None:
    """Of prompt n's four samples n are right; the engine swaps its weights half way."""
    section = config.eval.model_copy(update={"num_samples": 4, "pass_k": [1, 4]})
    with Evaluator(config.model_copy(update={"eval": section}), cluster) as evaluator:

        def answer(request: GenerateRequest) -> list[int]:
            sample = int(request.request_id.split("@")[0].split("/")[-1].split(".")[0])
            digit = request.token_ids[-1]
            evaluator.engine.version = Version(0, min(sample, 1))
            return [digit, END] if sample < digit - (4 + 15) else [END]

        evaluator.engine._answer = answer
        announce(cluster, 0)
        (found,) = evaluator.wait(cluster, 1)
    shares = [0.0, 0.25, 0.5, 0.75, 1.0]
    expected = estimate(shares)
    assert (found.reward, found.low, found.high) == (0.5, expected.low, expected.high)
    assert found.pass_at == {1: expected, 4: Estimate(0.8, *wilson(4, 5))}
    assert (found.num_prompts, found.num_samples, found.num_failed) == (5, 4, 1)
    assert found.versions == (Version(0, 0), Version(0, 1))
    assert sum(found.version_tokens) == 5 * 4 + 10  # an end each, and a digit of the right ones
    assert {r.sampling.temperature for r in evaluator.engine.requests} == {1.0}
    assert len({r.sampling.seed for r in evaluator.engine.requests}) == 20


def test_the_curves_show_what_was_evaluated_and_a_rollback_voids_what_it_gave_up(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    passes = {4: Estimate(0.75, 0.25, 0.875)}

    def write(*points: tuple[int, int, float]) -> None:
        curves = EvalCurves(tmp_path)
        for incarnation, number, reward in points:
            curves.write(
                Evaluation(
                    version=Version(incarnation, number), versions=(), task="t", reward=reward,
                    low=0.0, high=1.0, num_prompts=1, pass_at=passes,
                )
            )  # fmt: skip
        curves.close()

    write((0, 0, 0.25), (0, 2, 0.5), (0, 4, 0.625))
    # TensorBoard reads files in the order of their names: a second, and what tells apart those of
    # one process in one second, as text (9 comes after 10). A run's processes start seconds apart.
    (first,) = (tmp_path / "eval").iterdir()
    began = first.name.split(".")[3]
    first.rename(first.with_name(first.name.replace(began, str(int(began) - 1), 1)))
    write((1, 2, 0.125), (1, 4, 1.0))
    found = EventAccumulator(str(tmp_path / "eval")).Reload()
    points = [(point.step, point.value) for point in found.Scalars("eval/t/reward")]
    assert points == [(0, 0.25), (2, 0.125), (4, 1.0)]
    assert [point.value for point in found.Scalars("eval/t/pass@4_low")] == [0.25] * 3


def test_more_samples_than_drawn_cannot_pass() -> None:
    with pytest.raises(ValueError, match="pass@8 needs num_samples of at least 8, got 4"):
        Eval(num_samples=4, pass_k=[1, 8])


def test_a_reward_that_is_the_needed_one_in_float32_passes() -> None:
    assert _num_passed([float(np.float32(0.9)), 0.9, 0.89, 1.0], 0.9) == 3
