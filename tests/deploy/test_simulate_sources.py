"""What is simulated: policies from flags, workloads from a configuration and from a run's log."""

from __future__ import annotations

import math
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from connectors.config import Config, ConfigError, parse
from connectors.kafka.client import Cluster, Record
from connectors.kafka.terminals import outgoing
from connectors.records import (
    Closed,
    Coordinate,
    Group,
    Manifest,
    Origin,
    Prompt,
    Segment,
    Trajectory,
    Version,
)
from deploy.simulate.calibrate import busy_s, decode_times, in_flight, least_absolute, train_times
from deploy.simulate.lengths import Lognormal, Trace
from deploy.simulate.observed import Rollouts, Steps
from deploy.simulate.sources import from_config, from_run, named
from deploy.simulate.subjects import BOUNDS, COMPARED, Configured, subjects
from deploy.simulate.subjects import parse as parse_policies
from operators.staleness import PRESETS
from operators.staleness.preset import RunShape
from tests.deploy.command import config_text
from tests.deploy.written_log import WrittenLog, write_example

SHAPE = RunShape(batch_size=4, group_size=2, num_slots=16)


# --------------------------------------------------------------------------------------- policies
def test_names_parameters_and_their_types_are_read_from_the_flag() -> None:
    spec = " sync , roll(async_generation_ratio=0.5), x(a=true,b=auto,c=none,d='q r') ,y( )"
    assert parse_policies(spec) == [
        ("sync", {}),
        ("roll", {"async_generation_ratio": 0.5}),
        ("x", {"a": True, "b": "auto", "c": None, "d": "q r"}),
        ("y", {}),
    ]


def test_the_flags_set_each_policy_s_own_parameter_and_parentheses_win() -> None:
    found = subjects("verl-drop,areal,n-step-off(n=1),sync", SHAPE, bound=3)
    assert [dict(one.parameters) for one in found] == [
        {"max_off_policy_threshold": 4},  # its span counts the step itself
        {"max_head_offpolicyness": 3},
        {"n": 1},
        {},
    ]
    assert [one.policy.bound for one in found] == [3, None, 1, 0]
    assert [one.label for one in found] == ["verl-drop", "areal", "n-step-off(n=1)", "sync"]


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_a_strict_policy_s_bound_is_the_one_asked_for(name: str) -> None:
    [one] = subjects(name, SHAPE, bound=2)
    assert one.policy.bound in (2, None)


def test_every_preset_has_a_bound_to_set_or_is_known_to_have_none() -> None:
    none = {"sync", "one-step-off", "over-generate", "slime", "dressage"}
    assert set(PRESETS) - set(BOUNDS) == none
    assert set(BOUNDS) <= set(PRESETS)
    assert set(COMPARED) <= set(PRESETS)


def test_the_lookahead_is_the_bound_of_those_that_have_nothing_else() -> None:
    [alone] = subjects("n-step-off", SHAPE, lookahead=2)
    [both] = subjects("n-step-off", SHAPE, lookahead=2, bound=3)
    assert (alone.policy.bound, both.policy.bound) == (2, 3)


def test_deadline_looks_ahead_as_far_as_in_a_run_where_nothing_is_said() -> None:
    found = subjects("deadline(bound=1),deadline(bound=6),deadline(bound=6,lookahead=4)", SHAPE)
    assert [one.policy.lookahead for one in found] == [1, 2, 4]  # type: ignore[attr-defined]


def test_windowed_fifo_gets_the_widest_window_that_keeps_the_bound() -> None:
    [one] = subjects("windowed-fifo", SHAPE, bound=3, lookahead=1)
    assert one.parameters == {"target_offpolicy_steps": 1, "window_size": 9}
    [wider] = subjects("windowed-fifo(window_size=10)", SHAPE, bound=3, lookahead=1)
    assert (one.policy.bound, wider.policy.bound) == (3, 4)


@pytest.mark.parametrize(
    ("own", "flags", "parameters"),
    [
        ("target_offpolicy_steps=1", {"bound": 3}, (1, 9)),
        ("target_offpolicy_steps=2", {"bound": 3, "lookahead": 1}, (2, 5)),
        ("target_offpolicy_steps=0", {"bound": 0}, (0, 1)),
        ("", {"bound": 1}, (1, 1)),
        ("", {"bound": 9}, (3, 25)),
    ],
)
def test_windowed_fifo_s_window_follows_from_its_bound_and_steps(
    own: str, flags: dict[str, int], parameters: tuple[int, int]
) -> None:
    """A bound of S + ceil((W - 1) / 4)."""
    [one] = subjects(f"windowed-fifo({own})", SHAPE, **flags)  # type: ignore[arg-type]
    found = one.parameters["target_offpolicy_steps"], one.parameters["window_size"]
    assert (found, one.policy.bound) == (parameters, flags["bound"])
    base = Configured(name="windowed-fifo", parameters={"target_offpolicy_steps": 1})
    [based] = subjects(None, SHAPE, bound=2, configured=base)
    assert based.parameters == {"target_offpolicy_steps": 1, "window_size": 5}


@pytest.mark.parametrize(
    ("own", "bound", "threshold"),
    [
        ("", 4, 5),
        ("num_warmup_batches=4", 4, 2),
        ("num_warmup_batches=4", 6, 4),
        ("num_warmup_batches=0", 0, 2),
        ("num_warmup_batches=1", 1, 2),
    ],
)
def test_verl_wait_gets_the_threshold_that_gives_the_bound_with_its_warm_up(
    own: str, bound: int, threshold: int
) -> None:
    """T + w - 2 where w is at least 1."""
    [one] = subjects(f"verl-wait({own})", SHAPE, bound=bound)
    assert one.parameters["max_off_policy_threshold"] == threshold
    assert one.policy.bound == bound
    [own_threshold] = subjects("verl-wait(max_off_policy_threshold=9)", SHAPE, bound=bound)
    assert own_threshold.policy.bound == 8


def test_a_bound_below_deadline_s_own_look_ahead_lowers_it() -> None:
    configured = Configured(name="deadline", parameters={})
    for bound in (0, 1, 4):
        [one] = subjects(None, SHAPE, bound=bound, configured=configured)
        assert one.policy.lookahead == min(2, bound)  # type: ignore[attr-defined]


def test_the_configured_policy_keeps_its_parameters_and_flags_change_them() -> None:
    configured = Configured(name="n-step-off", parameters={"n": 5})
    [plain] = subjects(None, SHAPE, configured=configured)
    named_again, other = subjects("n-step-off,sync", SHAPE, configured=configured)
    [changed] = subjects(None, SHAPE, configured=configured, bound=2)
    assert [one.policy.bound for one in (plain, named_again, other, changed)] == [5, 5, 0, 2]


def test_a_row_is_named_with_what_it_has_from_the_configuration() -> None:
    base = Configured(name="deadline", parameters={"bound": 8, "at_deadline": "mask"})
    spec = "deadline,deadline(bound=5),sync"
    labels = [one.label for one in subjects(spec, SHAPE, configured=base)]
    assert labels == [
        "deadline(bound=8,at_deadline=mask)", "deadline(bound=5,at_deadline=mask)", "sync",
    ]  # fmt: skip
    [alone] = subjects(None, SHAPE, configured=base, bound=3)
    assert (alone.label, alone.parameters["bound"]) == ("deadline(at_deadline=mask)", 3)


@pytest.mark.parametrize(
    ("spec", "flags", "says"),
    [
        ("", {}, "--policy: '' is no policy"),
        ("sync;areal", {}, "'sync;areal' is no policy: names with commas between"),
        ("areal(1)", {}, "areal: '1' is not parameter=value"),
        ("n-step-off(n=1,n=2)", {}, "n-step-off: n is there twice"),
        ("sync,sync", {}, "sync is there twice"),
        ("two-step-off", {}, "unknown staleness policy 'two-step-off', did you mean"),
        ("n-step-off(m=1)", {}, "n-step-off: unknown parameter 'm'; known: n"),
        ("n-step-off(n=-1)", {}, "n-step-off: n must be an integer of at least 0, got -1"),
        ("areal(consumer_batch_size=7)", {}, "consumer_batch_size is 4 in this run, got 7"),
        ("sync,one-step-off", {"bound": 2}, "--bound 2: sync, one-step-off have no bound to set"),
        ("windowed-fifo", {"bound": 1, "lookahead": 2}, "at most the bound 1, got 2"),
        ("windowed-fifo(target_offpolicy_steps=3)", {"bound": 2}, "at most the bound 2, got 3"),
        ("windowed-fifo(target_offpolicy_steps=x)", {"bound": 2}, "of at least 0, got 'x'"),
        ("verl-wait", {"bound": 0}, "the bound is at least num_warmup_batches, here 1, got 0"),
        (
            "verl-wait(num_warmup_batches=0)",
            {"bound": 2},
            "the bound is 0 where num_warmup_batches is 0, got 2",
        ),
        ("sync(name=1)", {}, "sync: unknown parameter 'name': it takes none"),
        ("deadline", {"bound": 1, "lookahead": 2}, "deadline: lookahead"),
        ("areal", {"lookahead": 1}, "--lookahead 1: areal has no lookahead to set"),
    ],
)
def test_what_cannot_be_simulated_is_refused_with_the_rule(
    spec: str, flags: dict[str, int], says: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        subjects(spec, SHAPE, **flags)  # type: ignore[arg-type]
    assert says in str(refused.value)


# ---------------------------------------------------------------------------------- calibration
def test_how_many_ran_beside_a_sample_is_an_average_over_its_time() -> None:
    started, ended = np.array([0.0, 0.0, 6.0]), np.array([10.0, 5.0, 8.0])
    # the first: 2 for 5 s, 1 for 1 s, 2 for 2 s, 1 for 2 s
    np.testing.assert_allclose(in_flight(started, ended), [1.7, 2.0, 2.0])
    assert busy_s(np.array([0.0, 1.0, 7.0]), np.array([4.0, 2.0, 9.0])) == 6.0


def test_a_fit_is_not_moved_by_outliers_and_has_no_negative_part() -> None:
    x = np.arange(1.0, 31.0)
    y = 3 + 2 * x
    y[::5] *= 10
    columns = np.stack([np.ones_like(x), x, -x], axis=1)
    np.testing.assert_allclose(least_absolute(columns, y), [3, 2, 0], rtol=1e-3)
    falling = np.stack([np.ones_like(x), x], axis=1)
    np.testing.assert_allclose(least_absolute(falling, 100 - x), [84.5, 0], atol=0.51)


def generated(
    rng: np.random.Generator, n: int, *, overhead_s: float, token_s: float, per_running_s: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Start, end and tokens of samples on one engine, their speed that of the load they met."""
    started = np.sort(rng.uniform(0, n / 2, n))
    tokens = np.rint(rng.lognormal(4, 1, n)) + 1
    took = overhead_s + tokens * token_s
    for _ in range(60):
        running = in_flight(started, started + took)
        took = (took + overhead_s + tokens * (token_s + running * per_running_s)) / 2
    return started, started + took, tokens


def test_the_seconds_of_a_request_and_of_a_token_come_out_of_their_times() -> None:
    rng = np.random.default_rng(1)
    true = {"overhead_s": 0.5, "token_s": 0.02, "per_running_s": 0.001}
    started, ended, tokens = generated(rng, 1500, **true)
    found = decode_times(started, ended, tokens, num_slots=512, num_engines=1)
    fitted = (found.overhead_s, found.token_s, found.per_running_s)
    np.testing.assert_allclose(fitted, tuple(true.values()), rtol=0.02)
    halves = decode_times(started, ended, tokens, num_slots=512, num_engines=2)
    assert halves.per_running_s == pytest.approx(2 * found.per_running_s)  # half as many on each


def test_where_all_waited_in_a_queue_the_throughput_gives_a_token_s_time() -> None:
    """Forty samples of 100 tokens sent at once to 4 slots of 10 ms a token: 10 s in all."""
    started = np.zeros(40)
    ended = np.repeat(np.arange(1.0, 11.0), 4)
    found = decode_times(started, ended, np.full(40, 100.0), num_slots=4, num_engines=1)
    assert found.token_s == pytest.approx(0.01)
    assert (found.overhead_s, found.per_running_s) == (0, 0)
    assert "throughput of 4 full slots" in found.how


def test_how_many_answers_were_measured_is_said_and_where_they_are_few() -> None:
    """A hundred answers in a queue of four slots; after them, or not, twenty one by one."""
    alone = 1_000.0 + 10 * np.arange(20)
    started, ended = np.append(np.zeros(100), alone), np.append(np.full(100, 25.0), alone + 1)
    tokens = np.full(120, 100.0)
    few = decode_times(started, ended, tokens, num_slots=4, num_engines=1).how
    assert few.startswith("20 of 120 answers, those that cannot have queued, 1 of them together")
    assert "less than 25% of all, so the prediction may be too fast" in few
    enough = decode_times(alone, alone + 1, tokens[:20], num_slots=4, num_engines=1).how
    assert enough.startswith("20 of 20 answers")
    assert "too fast" not in enough


def test_what_does_not_vary_is_not_fitted_and_that_is_said() -> None:
    started = 10.0 * np.arange(30)
    found = decode_times(started, started + 2, np.full(30, 50.0), num_slots=4, num_engines=1)
    assert (found.overhead_s, found.token_s, found.per_running_s) == (0, pytest.approx(0.04), 0)
    assert "lengths hardly vary" in found.how
    assert "that number hardly varies" in found.how
    step = train_times(np.array([5.0, 4.0, 30.0, 5.0, 6.0]), np.full(5, 1000.0))
    assert (step.fixed_s, step.token_s) == (5.0, 0.0)
    assert "of about as many tokens" in step.how


def test_a_step_s_time_is_split_into_its_own_and_its_tokens() -> None:
    tokens = np.array([1000.0, 2000, 3000, 4000, 5000, 6000])
    seconds = 2 + 0.001 * tokens
    seconds[2] = 60.0  # a checkpoint
    found = train_times(seconds, tokens)
    assert (found.fixed_s, found.token_s) == (
        pytest.approx(2, rel=1e-3),
        pytest.approx(0.001, rel=1e-3),
    )


def test_too_little_is_no_measurement() -> None:
    few = np.arange(15, dtype=np.float64)
    with pytest.raises(ValueError, match="at least 16 samples are needed, got 15"):
        decode_times(few, few + 1, few + 1, num_slots=4, num_engines=1)
    with pytest.raises(ValueError, match=r"at least 4 steps .* got 3"):
        train_times(np.ones(3), np.ones(3))


# -------------------------------------------------------------------------------- configuration
def config(**sections: str) -> Config:
    return parse(tomllib.loads(config_text("model", **sections)), base_dir="")


def test_a_configuration_gives_its_sizes_and_what_is_assumed_is_said() -> None:
    source = from_config(
        config(
            engine="count = 3\nmax_running = 20",
            sampling="max_tokens = 1600",
            trainer="groups_per_step = 6",
            staleness='policy = "n-step-off"\nlookahead = 3\ntime_cap_s = 90.0',
        )
    )
    workload = source.workload
    assert (workload.batch_size, workload.group_size) == (6, 2)
    assert (workload.num_engines, workload.num_slots) == (3, 60)
    assert workload.time_cap_s == 90.0
    lengths, standard = workload.lengths, named("standard").workload
    assert lengths == Lognormal(mu=math.log(400), sigma=1.0, most=1600)
    # the trainer of `standard`: 32 groups of 8 in a minute
    step_tokens = 32 * 8 * standard.lengths.mean()
    assert workload.train_s_per_token == pytest.approx(60 / step_tokens)
    assert source.configured == Configured(name="n-step-off", parameters={"n": 3})
    [note] = source.notes
    assert note.startswith("assumed: log-normal lengths")
    assert "max_tokens = 1600" in note


def test_engines_started_elsewhere_count_and_the_largest_group_of_the_tasks_does() -> None:
    table = tomllib.loads(config_text("model", engine='urls = ["http://a", "http://b"]'))
    table["tasks"]["more"] = {"reward": "exact_match", "group_size": 8}
    source = from_config(parse(table, base_dir=""))
    assert (source.workload.num_engines, source.workload.num_slots) == (2, 128)
    assert source.workload.group_size == 8
    assert source.notes[0] == "assumed: groups of 8, the largest of the tasks'"


def test_an_unknown_workload_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there is no 'standart'; known: standard, slot-limited"):
        named("standart")


# --------------------------------------------------------------------------------------- a log
def trajectory(group_id: str, name: str, tokens: int, ended: float, **other: Any) -> Trajectory:
    """Ten tokens of prompt, begun at 100 s."""
    length = 10 + tokens
    return Trajectory(
        trajectory_id=f"{group_id}/{name}",
        group_id=group_id,
        task="sums",
        tokens=np.zeros(length, np.int32),
        loss_mask=np.zeros(length, np.int8),
        logprobs=np.zeros(length, np.float32),
        segments=(Segment(10, 12, 0, 0), Segment(12, length, 0, 1)),
        origin=Origin("prompts", 0, 0),
        created_at=100.0,
        finished_at=ended,
        **other,
    )


def record(terminal: Group | Closed, written_at: float) -> Record:
    made = outgoing(Cluster(bootstrap_servers="nowhere:1"), terminal)
    return Record(
        topic="trajectories", partition=0, offset=0, key=made.key.encode(), value=made.value,
        headers=made.headers, timestamp_ms=round(1000 * written_at),
    )  # fmt: skip


def test_samples_are_read_from_groups_with_their_branches_and_without_foreign_rows() -> None:
    group_id = "prompts/0/0"
    rows = (
        trajectory(group_id, "0", 5, 104.0),
        trajectory(group_id, "0/1", 3, 109.0, turns=2),
        trajectory(group_id, "1", 7, 103.0),
        trajectory(group_id, "2", 99, 999.0, source="import"),
    )
    found = Rollouts()
    prompt = Prompt(task="sums", prompt="1 + 1")
    found.observe(record(Group(group_id=group_id, prompt=prompt, trajectories=rows), 110.5))
    found.observe(record(Closed(group_id="prompts/0/1", reason="time_cap"), 111.0))
    assert (found.tokens, found.turns) == ([8, 7], [3, 1])
    assert (found.started, found.ended) == ([100.0, 100.0], [109.0, 103.0])
    assert found.prompt_tokens == [10, 10]
    assert found.reward_s == [1.5]
    assert (found.num_groups, dict(found.closed)) == (1, {"time_cap": 1})


def manifest(step: int, finished_at: float, *, epoch: int = 0, wait_s: float) -> Manifest:
    return Manifest(
        step=step,
        epoch=epoch,
        version=Version(0, step),
        records=(Coordinate(0, step, 0, f"prompts/0/{step}"),),
        micro_batches=(),
        seed=0,
        digest_before="",
        digest="",
        metrics={"tokens/trained": 100.0 * step, "seconds/wait": wait_s, "seconds/publish": 0.5},
        staleness={"mean": float(step), "p99": 4.0, "max": 5.0},
        finished_at=finished_at,
    )


def test_steps_are_timed_from_the_one_before_of_the_same_trainer() -> None:
    found = Steps().observe(
        [
            manifest(1, 10.0, wait_s=8.0),
            manifest(2, 13.0, wait_s=1.0),
            manifest(3, 500.0, epoch=7, wait_s=0.0),  # after a restart
            manifest(4, 506.0, epoch=7, wait_s=2.0),
        ]
    )
    assert (found.seconds, found.tokens) == ([2.0, 4.0], [200.0, 400.0])
    assert found.came_to() == {
        "steps_per_hour": 3600 * 2 / 9,
        "trained_tokens_per_s": 600 / 9,
        "trainer_wait_share": 3 / 9,
        "staleness": {"mean": (1 + 4 + 9 + 16) / 10, "p99": 4.0, "max": 5.0},
    }


def timed_log(cluster: Cluster, folder: Path, num_steps: int) -> WrittenLog:
    """Steps of two groups of two samples of three tokens, each 1.5 s long, the four of a step at
    once. A step ends every 10 s, of which it waited 1."""
    log = WrittenLog(cluster, folder)
    log.begin()
    later = time.time() + 1_000.0  # than they are written: scoring took no time
    for step in range(1, num_steps + 1):
        for partition in (0, 1):
            group = log.group(partition, step, 0)
            begun = later + 10 * step
            rows = [
                replace(row, created_at=begun, finished_at=begun + 1.5)
                for row in group.trajectories
            ]
            at, crc = log.end(partition, replace(group, trajectories=tuple(rows)))
            log.coordinates[partition, step] = Coordinate(partition, at, crc, group.group_id)
        log.step(step, (0, step), (1, step), reward=0.5)
    return log


def test_a_run_s_workload_is_what_its_log_says(cluster: Cluster, tmp_path: Path) -> None:
    log = timed_log(cluster, tmp_path, 6)
    log.close(0, 7, "reward_failed")
    log.close(0, 8, "time_cap")
    source = from_run(log.config, "RUN", cluster)
    workload = source.workload
    assert isinstance(workload.lengths, Trace)
    assert workload.lengths.tokens == (3,) * 24
    assert (workload.batch_size, workload.group_size, workload.num_slots) == (2, 2, 64)
    assert workload.prompt_tokens == 2
    assert workload.token_s == pytest.approx(0.5)
    assert workload.prefill_tokens_per_s is None
    assert (workload.train_s, workload.train_s_per_token) == (pytest.approx(9.0), 0.0)
    assert (workload.publish_s, workload.reward_s) == (0.25, (0.0,) * 12)
    assert workload.failure_rate == 1 / 13
    assert source.configured == Configured(name="one-step-off", parameters={})
    assert source.measured is not None
    assert source.measured["steps_per_hour"] == pytest.approx(360)
    assert source.measured["trainer_wait_share"] == pytest.approx(0.1)
    said = "\n".join(source.notes)
    assert "measured: 24 lengths, 3 tokens on average, up to 3; 12 groups" in said
    assert "measured: 500 ms a token" in said
    assert "what it took to start and to start again is left out" in said
    assert "measured: 9 s a step" in said
    assert "the 1 groups closed at the time cap" in said


def test_a_run_that_is_too_short_to_be_measured_is_refused(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = write_example(cluster, tmp_path)
    with pytest.raises(ConfigError) as refused:
        from_run(log.config, "RUN", cluster)
    assert str(refused.value) == (
        "--from-run RUN: is too short to be measured: at least 16 samples are needed, got 8"
    )
