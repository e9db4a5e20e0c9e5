"""The benchmark of staleness: what it reads from a run's log, what it makes of its records, and
that it goes on where it stopped."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from benchmarks import long_tail, staleness_plot, staleness_tables
from benchmarks.staleness_cost import (
    QUICKSTART,
    cost_settings,
    execute,
    parser,
    preset_settings,
    strict_policies,
)
from benchmarks.staleness_records import Predicted, Record, Results, Setting, Step, steps_per_hour
from benchmarks.staleness_runs import Failed, read, run
from connectors.config import load
from connectors.kafka.client import Cluster
from connectors.records import Prompt
from connectors.run_dir import RunDir
from deploy.errors import EnvironmentFailure
from deploy.run_folder import check_files, locked
from deploy.status import RunStatus
from operators.staleness import PRESETS, policy_for
from operators.staleness.preset import RunShape
from tests.deploy.written_log import write_example
from trainer.staleness import configured_policy

SHAPE = RunShape(batch_size=4, group_size=8, num_slots=256)


def setting(bound: int = 4, correction: str = "tis", seed: int = 0, **others: Any) -> Setting:
    parameters = {"bound": bound, "lookahead": bound}
    return Setting(
        policy="deadline", parameters=parameters, correction=correction, seed=seed,
        **{"shared": ("trainer.num_steps=20",), **others},
    )  # fmt: skip


def record(
    rewards: Sequence[float], of: Setting | None = None, *, step_s: float = 2.0, **others: Any
) -> Record:
    """Steps of `step_s`, the first of them at its end; as old as they are late, up to 3."""
    steps = tuple(
        Step(
            at_s=step_s * number, reward=reward, staleness_mean=1.0,
            staleness_max=float(min(number - 1, 3)), oldest=min(number - 1, 3), wait_s=0.5,
        )
        for number, reward in enumerate(rewards, start=1)
    )  # fmt: skip
    known = {"bound": 4, "staleness_mean": 1.5, "num_dropped": 0, "held_out": (0.2, 0.8),
             "took_s": 30.0}  # fmt: skip
    return Record(setting=of or setting(), steps=steps, **{**known, **others})


# ------------------------------------------------------------------------------------ reading
def test_a_record_is_what_the_log_says(cluster: Cluster, tmp_path: Path) -> None:
    """Step 2 trains a group of version 0, at version 1."""
    log = write_example(cluster, tmp_path)
    status = RunStatus(log.config, RunDir(tmp_path), cluster)
    found = read(log.config, cluster, setting(), status.read(), took_s=9.0)
    status.close()
    assert found.steps == (
        Step(at_s=10, reward=0.5, staleness_mean=0.25, staleness_max=0, oldest=0, wait_s=1),
        Step(at_s=20, reward=0.75, staleness_mean=0.5, staleness_max=1, oldest=1, wait_s=1),
    )
    assert found.staleness_mean == 0.375
    assert (found.bound, found.num_dropped, found.held_out) == (1, 1, (0.25, 0.5))
    assert msgspec.json.decode(msgspec.json.encode(found), type=Record) == found


# ------------------------------------------------------------------------------------ settings
def settings_of(*arguments: str) -> list[Setting]:
    chosen = parser().parse_args(arguments)
    made = cost_settings if chosen.command == "cost" else preset_settings
    return list(made(chosen))


def test_every_setting_is_one_the_quickstart_starts_with() -> None:
    for one in settings_of("cost", "--seeds", "1") + settings_of("presets"):
        config = load(QUICKSTART, one.overrides())
        policy = configured_policy(config)
        assert (policy.name, config.trainer.correction) == (one.policy, one.correction)
        assert policy.bound is not None
        check_files(config)


def test_the_cost_is_measured_for_each_bound_and_correction_one_seed_after_the_other() -> None:
    found = settings_of("cost", "--seeds", "2", "--bounds", "0,4", "--set", "trainer.num_steps=3")
    assert [(one.seed, one.parameters["bound"], one.correction) for one in found] == [
        (seed, bound, correction)
        for seed in (0, 1)
        for bound in (0, 4)
        for correction in ("tis", "none")
    ]
    assert all(one.parameters["lookahead"] == one.parameters["bound"] for one in found)
    assert load(QUICKSTART, found[0].overrides()).trainer.num_steps == 3
    assert len({one.name for one in found}) == len(found)


def test_strict_policies_are_compared_at_the_same_bound() -> None:
    """The sets of those that are never strict, strict at 0 alone, and of one bound: by hand."""
    found = strict_policies(SHAPE, 4)
    bounds = {name: policy_for(name, SHAPE, **parameters).bound for name, parameters in found}
    assert set(PRESETS) - set(bounds) == {"slime", "dressage", "nemo-ready-first"}
    assert {name for name, bound in bounds.items() if bound == 0} == {
        "sync", "over-generate", "areal", "skyrl",
    }  # fmt: skip
    assert {name for name, bound in bounds.items() if bound == 1} == {"one-step-off"}
    assert set(bounds.values()) == {0, 1, 4}
    assert Counter(name for name, _ in found)["deadline"] == 2


# ------------------------------------------------------------------------------------ going on
class Runs:
    """What `execute` calls; those of `failing` come to nothing."""

    def __init__(self, *failing: str) -> None:
        self.failing, self.asked = failing, list[str]()

    def __call__(self, config: Path, of: Setting, folder: Path, **others: Any) -> Record:
        self.asked.append(of.name)
        if of.name in self.failing:
            raise Failed("it did not start")
        return record([0.5] * 12, of)


def test_a_run_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    """One that failed is; under other settings nothing is there."""
    (tmp_path / "model").mkdir()
    arguments = ["cost", "--out", str(tmp_path), "--seeds", "2", "--bounds", "0,4"]
    chosen = parser().parse_args(arguments)
    settings = list(cost_settings(chosen))
    names = [one.name for one in settings]
    first = Runs(names[2])
    assert execute(chosen, settings[:4], first) == 1
    assert first.asked == names[:4]
    second = Runs()
    assert execute(chosen, settings, second) == 0
    assert second.asked == [names[2], *names[4:]]
    assert execute(chosen, settings, third := Runs()) == 0
    assert third.asked == []
    assert sorted(one.setting.name for one in Results(tmp_path, "cost")) == sorted(names)
    longer = settings_of(*arguments, "--set", "trainer.num_steps=7")
    assert execute(chosen, longer, fourth := Runs()) == 0
    assert fourth.asked == names


def test_a_run_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"exit code 3: .*none is no model folder"):
        run(QUICKSTART, setting(), tmp_path / "run", model=tmp_path / "none", limit_s=60,
            predict=False)  # fmt: skip


def test_a_folder_in_which_a_run_is_at_work_is_left_alone(tmp_path: Path) -> None:
    with locked(RunDir(tmp_path)):
        (tmp_path / "config.toml").write_text("its own")
        with pytest.raises(EnvironmentFailure, match="is locked"):
            run(QUICKSTART, setting(), tmp_path, model=tmp_path, limit_s=60, predict=False)
    assert (tmp_path / "config.toml").read_text() == "its own"


# ------------------------------------------------------------------------------------ numbers
def test_the_reward_is_smoothed_over_the_last_ten_steps() -> None:
    """A window of 0, 0, ..., 1 at step 11: a tenth; before, of what there is."""
    found = staleness_tables.smoothed(record([1.0, 0.0, 0.0, 0.0] + [0.0] * 6 + [1.0]))
    assert found[:4] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert found[-2:] == pytest.approx([1 / 10, 1 / 10])


def test_a_target_is_reached_by_a_whole_window() -> None:
    """At step 1 there is no window; ten steps of 0.5 end at 20 s."""
    assert staleness_tables.seconds_to(record([1.0] + [0.5] * 9), 0.5) == 20
    assert staleness_tables.seconds_to(record([1.0] * 9), 0.5) is None
    assert staleness_tables.seconds_to(record([0.0] * 5 + [1.0] * 10), 1.0) == 30


def test_seeds_have_a_mean_and_a_range_where_all_have_a_value() -> None:
    assert staleness_tables.band([1.0, 2.0, 6.0]) == (3.0, 1.0, 6.0)
    assert staleness_tables.band([1.0, None]) is None
    assert staleness_tables.band([]) is None
    assert staleness_tables.said(staleness_tables.band([1.0, 2.0]), 1) == "1.5 (1.0..2.0)"
    assert staleness_tables.said(None, 1) == "-"


def test_the_rate_leaves_the_first_step_out() -> None:
    assert staleness_tables.rate(record([0.5] * 5, step_s=2.0)) == 1800
    assert steps_per_hour([7.0]) == 0.0
    assert staleness_tables.wait_share(record([0.5] * 5, step_s=2.0)) == 0.25


def test_a_live_run_is_held_against_what_was_simulated() -> None:
    predicted = Predicted(steps_per_hour=1500.0, staleness_mean=1.0, staleness_max=4)
    assert staleness_tables.agreement(record([0.5] * 5, predicted=predicted)) == 1.2
    assert staleness_tables.agreement(record([0.5] * 5)) is None
    stalled = msgspec.structs.replace(predicted, stalled="why")
    assert staleness_tables.agreement(record([0.5] * 5, predicted=stalled)) is None


def test_curves_span_what_all_seeds_have() -> None:
    """Of one that is twice as slow and one step shorter."""
    fast, slow = record([0.0] * 4 + [1.0]), record([0.5] * 4, step_s=4.0)
    by_step = staleness_plot.by_step([fast, slow])
    assert by_step.x.tolist() == [1, 2, 3, 4]
    assert by_step.mean.tolist() == [0.25] * 4
    assert (by_step.least.tolist(), by_step.most.tolist()) == ([0.0] * 4, [0.5] * 4)
    by_second = staleness_plot.by_second([fast, slow])
    assert (by_second.x[0], by_second.x[-1]) == (4, 10)
    assert (by_second.least[-1], by_second.most[-1]) == (pytest.approx(0.2), 0.5)


# ------------------------------------------------------------------------------------ tables
def rows(table: Table) -> list[list[str]]:
    console = Console(file=(out := io.StringIO()), width=400)
    console.print(table)
    lines = [
        line.strip().strip("|").split("|") for line in out.getvalue().splitlines() if "|" in line
    ]
    return [[cell.strip() for cell in line] for line in lines[2:]]


def test_a_row_of_costs_is_of_all_seeds_of_a_bound() -> None:
    records = [
        record([0.5] * 12, setting(16, seed=0), held_out=(0.2, 0.6)),
        record([0.7] * 12, setting(16, seed=1), held_out=(0.2, 0.8)),
        record([0.4] * 12, setting(0)),
    ]
    assert rows(staleness_tables.cost_table(records, 0.6)) == [
        ["0", "tis", "1", "1.50", "3", "1800", "0.400", "0.200", "0.800", "-"],
        ["16", "tis", "2", "1.50", "3", "1800", "0.600 (0.500..0.700)", "0.200",
         "0.700 (0.600..0.800)", "20 (1 of 2)"],
    ]  # fmt: skip


def test_a_row_of_policies_says_whether_the_bound_was_kept() -> None:
    """`oldest` is 3, counted from the trajectories."""
    predicted = Predicted(steps_per_hour=1500.0, staleness_mean=1.25, staleness_max=4)
    kept = record([0.5] * 12, predicted=predicted)
    broken = record([0.5] * 12, setting(2), bound=2, num_dropped=6, stalled="where it stood")
    assert rows(staleness_tables.presets_table([kept, broken], 0.5)) == [
        ["deadline(bound=4,lookahead=4)", "1", "4", "3", "yes", "1.50", "1.25", "1800", "1500",
         "1.20", "25%", "0", "20"],
        ["deadline(bound=2,lookahead=2) STALLED", "1", "2", "3", "NO", "1.50", "-", "1800", "-",
         "-", "25%", "6", "20"],
    ]  # fmt: skip


def test_runs_of_other_settings_are_not_mixed() -> None:
    records = [record([0.5] * 12), record([0.5] * 12, setting(shared=("trainer.num_steps=7",)))]
    assert [len(alike) for alike in staleness_tables.by_shared(records).values()] == [1, 1]


# ------------------------------------------------------------------------------------ pictures
def test_the_pictures_show_every_setting(tmp_path: Path) -> None:
    cost = [
        record([0.1 * number for number in range(12)], setting(bound, correction, seed))
        for bound in (0, 4)
        for correction in ("tis", "none")
        for seed in (0, 1)
    ]
    predicted = Predicted(steps_per_hour=1500.0, staleness_mean=1.0, staleness_max=4)
    presets = [record([0.5] * 12, setting(waits="long"), predicted=predicted), record([0.5] * 12,
               setting(2, waits="long"))]  # fmt: skip
    staleness_plot.draw(tmp_path, cost, presets)
    said = {
        name: " ".join(ElementTree.parse(tmp_path / f"{name}.svg").getroot().itertext())
        for name in ("cost", "presets")
    }
    for text in ("bound 0", "bound 4", "correction = tis", "correction = none", "seconds"):
        assert text in said["cost"]
    for text in ("deadline(bound=4,lookahead=4)", "deadline(bound=2,lookahead=2)", "1.20", "long"):
        assert text in said["presets"]


def test_a_picture_of_nothing_is_not_drawn(tmp_path: Path) -> None:
    staleness_plot.draw(tmp_path, [], [])
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ the agent
def test_waits_have_a_long_tail_and_are_the_same_each_time() -> None:
    """The median of 2001 log-normal waits is within 3 of its own deviations, and an eighth or so
    is longer than exp(sigma) of it."""
    waits = np.array([long_tail.wait_s("a prompt", number) for number in range(2001)])
    again = [long_tail.wait_s("a prompt", number) for number in range(2001)]
    assert waits.tolist() == again
    spread = 1.2533 * long_tail.SIGMA / np.sqrt(2001)
    assert abs(np.log(np.median(waits) / long_tail.MEDIAN_S)) < 3 * spread
    tail = (waits > long_tail.MEDIAN_S * np.exp(long_tail.SIGMA)).mean()
    assert tail == pytest.approx(0.1587, abs=0.025)
    assert waits.max() <= long_tail.LONGEST_S
    assert long_tail.wait_s("another", 0) != waits[0]


class Quick:
    """An llm that answers at once."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def chat(self, messages: Any, tools: Any = None, **sampling: Any) -> Any:
        self.asked.append(messages)


def test_each_sample_of_a_prompt_waits_its_own_time() -> None:
    prompt = Prompt(task="sort", id="one", messages=[{"role": "user", "content": "sort 21"}])
    llm = Quick()

    async def two() -> list[Any]:
        return await asyncio.gather(*(long_tail.rollout(prompt, llm, None) for _ in range(2)))

    waited = [outcome.metadata["waited_s"] for outcome in asyncio.run(two())]
    assert waited == [f"{long_tail.wait_s('one', number):.3f}" for number in (0, 1)]
    assert llm.asked == [prompt.messages] * 2
