"""The comparison with TRL: both sides get the same, and the table says what the runs say. Neither
side runs here."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import trl_reward
from benchmarks.trl_headwater import AHEAD, POLICIES, example, per_step, setting
from benchmarks.trl_tables import Differ, curve, details, num_same_prompts, step_s, summary, table
from benchmarks.trl_versus import (
    SYSTEMS,
    MissingRun,
    Results,
    chosen_workloads,
    parser,
    plan,
    sleep_of,
)
from benchmarks.trl_workload import WORKLOADS, Order, Run, Workload, prompt_lines
from connectors.config import load
from connectors.records import Prompt
from operators.rewards import exact_match
from trainer.staleness import configured_policy

TINY = replace(WORKLOADS["tiny"], num_steps=4, num_skipped=1)


def run(system: str, step_s: float, seed: int = 0, **others: Any) -> Run:
    """Four steps of `step_s`, but the first, which ends after ten seconds."""
    known: dict[str, Any] = {
        "workload": "tiny",
        "ends_s": [10 + step_s * step for step in range(4)],
        "rewards": [0.0, 0.2, 0.4, 0.6],
        "num_tokens": [0, 600, 700, 800],
        "parts_s": {"rollout": [9.0, 0.1, 0.2, 0.3]},
        "processor_s": {system: 2 * step_s},
        "prompt_ids": {"0000": [5, 6], "0001": [7]},
        "settings": {"num_threads": 2, "stop_ids": [1]},
    }
    return Run(system=system, seed=seed, **{**known, **others})


# ------------------------------------------------------------------------------------ the same
def test_both_sides_read_the_examples_prompts_in_one_order_that_the_seed_gives() -> None:
    lines = [json.dumps({"messages": [], "reward": str(k)}) for k in range(50)]
    first, again, other = (list(prompt_lines(lines, seed, None)) for seed in (0, 0, 1))
    assert first == again != other
    read = [json.loads(line) for line in first]
    assert [line["id"] for line in read] == [f"{k:04}" for k in range(50)]
    assert sorted(int(line["reward"]) for line in read) == list(range(50))


def test_a_slow_reward_is_told_what_is_right_and_how_long_it_sleeps() -> None:
    (line,) = prompt_lines(['{"reward": "7"}'], 0, 0.5)
    assert json.loads(line)["reward"] == {"answer": "7", "sleep_s": 0.5}


def test_the_rewards_of_both_sides_are_exact_match() -> None:
    for text, answer in (("12", "12"), (" 12\n", "12"), ("21", "12"), ("", "12")):
        expected = exact_match(
            SimpleNamespace(text=text),  # type: ignore[arg-type]
            Prompt(task="sort", prompt="", reward=answer),
        )
        wanted = {"answer": answer, "sleep_s": 0}
        sample, prompt = SimpleNamespace(text=text), SimpleNamespace(reward=wanted)
        assert trl_reward.exact(text, answer) == expected
        assert asyncio.run(trl_reward.slow(sample, prompt)) == expected


def test_an_order_reaches_the_other_interpreter_whole(tmp_path: Path) -> None:
    order = Order(workload=TINY, seed=3, model="/m", prompts="/p", num_threads=2)
    order.write(tmp_path / "order.json")
    assert Order.read(tmp_path / "order.json") == order
    assert Run.read(run("trl", 0.3).text) == run("trl", 0.3)


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda one: one.name)
@pytest.mark.parametrize("system", POLICIES)
def test_headwater_trains_the_batch_that_trl_does(
    workload: Workload, system: str, tmp_path: Path
) -> None:
    chosen = setting(workload, system, 3, tmp_path / "prompts.jsonl")
    config = load(example(workload), chosen.overrides())
    task = config.tasks[workload.task]
    assert configured_policy(config).name == POLICIES[system][0]
    assert config.trainer.groups_per_step * task.group_size == workload.num_rows
    assert config.sampling.max_tokens == workload.max_tokens
    assert config.trainer.learning_rate == workload.learning_rate
    assert (config.trainer.num_steps, config.run.seed) == (workload.num_steps, 3)
    # What `trl_run` sets of its own.
    assert (config.sampling.temperature, config.sampling.top_p) == (1, 1)
    assert (config.trainer.advantage, config.trainer.aggregation) == ("grpo", "token-mean")
    assert (config.trainer.kl_coefficient, config.trainer.weight_decay) == (0, 0)
    assert (config.trainer.num_minibatches, config.trainer.max_grad_norm) == (1, 1)
    assert config.model.dtype == "float32"
    # Nothing else in the measured stretch, and no prompt twice.
    assert (config.eval.every_versions, config.checkpoint.every_steps) == (0, workload.num_steps)
    num_prompts = len(config.resolve(f"{workload.example}/prompts.jsonl").read_text().splitlines())
    assert num_prompts >= workload.groups_per_step * (workload.num_steps + 4)
    assert task.reward.endswith("trl_reward.py:slow" if workload.is_slow else "exact_match")


def test_prompts_that_the_sides_read_as_other_ids_make_no_table() -> None:
    other = run("deadline", 0.3, prompt_ids={"0000": [5, 6], "0001": [8]})
    with pytest.raises(Differ, match="prompt 0001"):
        num_same_prompts(run("trl", 0.3), other)
    apart = run("deadline", 0.3, prompt_ids={"0000": [5, 6], "0007": [1], "0008": [1]})
    assert num_same_prompts(run("trl", 0.3), apart) == 1
    with pytest.raises(Differ, match="only 1 prompts both"):
        num_same_prompts(apart, run("trl", 0.3))


def test_samples_that_end_at_other_ids_make_no_table() -> None:
    other = run("deadline", 0.3, settings={"stop_ids": [1, 2]})
    with pytest.raises(Differ, match="end a sample at other ids"):
        summary([run("trl", 0.3), other], {"tiny": TINY})


# ------------------------------------------------------------------------------------ the figures
def test_a_step_is_measured_after_the_first_ones() -> None:
    assert step_s(run("trl", 0.5), num_skipped=1) == pytest.approx(0.5)
    uneven = run("trl", 0, ends_s=[10.0, 12.0, 13.0, 13.5])
    assert step_s(uneven, num_skipped=2) == pytest.approx(0.75)


def test_the_table_compares_medians_over_the_seeds() -> None:
    """TRL's are 0.2, 0.3 and 0.5 s, ours 0.4, 0.6 and 0.9 s: 0.6 / 0.3 is 2."""
    runs = [run("deadline", s, seed) for seed, s in enumerate((0.6, 0.4, 0.9))]
    runs += [run("trl", s, seed) for seed, s in enumerate((0.5, 0.3, 0.2))]
    trl, ours = summary(runs, {"tiny": TINY})
    assert (trl["system"], ours["system"]) == ("trl", "deadline")
    assert ours["step_s"] == pytest.approx([0.6, 0.4, 0.9])
    assert ours["of_trl"] == pytest.approx(2)
    assert ours["trajectories_per_s"][0] == pytest.approx(128 / 0.6)
    assert ours["tokens_a_step"][0] == 700
    assert (ours["first_step_after_s"][0], ours["same_prompts"]) == (10, 2)
    assert ours["parts_s"] == {"rollout": pytest.approx(0.2)}
    assert ours["processor_s"]["deadline"] == pytest.approx(2 * (0.6 + 0.4 + 0.9) / 3)
    shown = table([trl, ours])
    assert "2.00 | 1.5, missed" in shown
    assert "0.600 (0.400-0.900)" in shown
    assert "num_threads 2" in details([trl, ours])
    assert "1.00" not in table([trl])


def test_a_target_is_met_at_its_bound_and_unknown_without_trl() -> None:
    met = summary([run("deadline", 0.75), run("trl", 0.5)], {"tiny": TINY})
    assert "1.50 | 1.5, met" in table(met)
    (alone,) = summary([run("deadline", 0.75)], {"tiny": TINY})
    assert alone["of_trl"] is None
    assert "met" not in table([alone])
    assert "missed" not in table([alone])


def test_a_curve_is_the_mean_over_seeds_of_stretches_of_steps() -> None:
    one, other = run("trl", 1), run("trl", 1, rewards=[1.0, 1.0, 1.0, 1.0])
    assert curve([one, other], num_blocks=2) == pytest.approx([0.55, 0.75])
    assert len(curve([one], num_blocks=6)) == 4


def test_the_processors_seconds_of_a_step_are_read_between_two_looks() -> None:
    """From 10 s, half-way between two looks at 1 and 3, to 14 s: 2 to 7 of two steps."""
    seen = {"engine": [(9.0, 1.0), (11.0, 3.0), (13.0, 6.0), (15.0, 8.0)]}
    assert per_step(seen, [10.0, 12.0, 14.0], num_skipped=1) == {"engine": pytest.approx(2.5)}


# ------------------------------------------------------------------------------------ going on
def test_the_sides_take_turns_and_a_seed_comes_after_the_other() -> None:
    found = list(plan([WORKLOADS["tiny"], WORKLOADS["slow"]], SYSTEMS, 2))
    first = [(workload.name, system) for workload, system, _ in found[:7]]
    at_once = [system for system in SYSTEMS if system != AHEAD]
    assert first == [*(("tiny", s) for s in at_once), *(("slow", s) for s in SYSTEMS)]
    assert Counter(seed for _, _, seed in found) == {0: 7, 1: 7}
    assert found[6][2] == 0


def test_a_slow_reward_sleeps_four_times_trls_rollout_of_the_first_seed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(run("trl", 0.3, seed=1))
    with pytest.raises(MissingRun):
        sleep_of(results)
    results.add(run("trl", 0.3, parts_s={"rollout": [9.0] + [0.1] * 11}, ends_s=[1.0] * 12))
    assert sleep_of(results) == pytest.approx(0.4), "2 of 12 steps are left out, as 8 of 40 are"


def test_a_run_of_another_number_of_steps_is_not_the_one_asked_for(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(run("trl", 0.3))
    assert results.of(TINY) == [run("trl", 0.3)]
    assert results.of(WORKLOADS["tiny"]) == []
    assert results.of(replace(TINY, name="slow")) == []


def test_shorter_workloads_leave_out_a_part_as_large() -> None:
    chosen = parser().parse_args(["--workloads", "135m,tiny", "--steps", "18"])
    assert [(w.name, w.num_steps, w.num_skipped) for w in chosen_workloads(chosen)] == [
        ("tiny", 18, 3), ("135m", 18, 7),
    ]  # fmt: skip
