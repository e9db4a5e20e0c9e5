"""The simulated run: its times and staleness by hand, the order in which a policy is asked, what
becomes of tokens, and runs that come to a standstill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from connectors.records import Cancel
from deploy.simulate.lengths import Fixed, Trace
from deploy.simulate.outcome import Outcome
from deploy.simulate.rollouts import prompts
from deploy.simulate.tally import Tally
from deploy.simulate.workload import WORKLOADS, Cohorts, Tools, Workload
from deploy.simulate.world import NUM_IDLE_POLLS, POLL_S, simulate
from operators.staleness import policy
from operators.staleness.stateless import Stateless
from operators.staleness.types import (
    Announced,
    Arrived,
    Choice,
    EngineLoad,
    Event,
    Granted,
    Ledger,
    StalenessPolicy,
)
from tests.operators.policy_run import v


def workload(**settings: Any) -> Workload:
    """Two groups of one trajectory a step, 10 tokens of 1 s each, training 5 s."""
    given: dict[str, Any] = {
        "lengths": Fixed(tokens=10),
        "batch_size": 2,
        "group_size": 1,
        "num_engines": 1,
        "num_slots": 100,
        "token_s": 1.0,
        "prompt_tokens": 0,
        "train_s": 5.0,
    }
    return Workload(name="by hand", **{**given, **settings})


def run(subject: StalenessPolicy[Any], num_steps: int = 3, **settings: Any) -> Outcome:
    return simulate(workload(**settings), subject, num_steps=num_steps, seed=1)


def starts(outcome: Outcome) -> list[float]:
    return [step.train_from for step in outcome.timeline.steps]


class Greedy(Stateless):
    """Keeps `num_open` groups open and trains them as they come; it remembers what it was asked and
    told."""

    name = "greedy"

    def __init__(self, num_open: int = 4) -> None:
        self.num_open = num_open
        self.seen: list[Event] = []
        self.asked: list[tuple[str, Ledger]] = []

    def observe(self, state: None, event: Event) -> None:
        self.seen.append(event)

    def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
        self.asked.append(("cancel", ledger))
        return ()

    def choose(self, state: None, ledger: Ledger) -> Choice:
        self.asked.append(("choose", ledger))
        return super().choose(state, ledger)

    def credits(self, state: None, ledger: Ledger) -> int:
        self.asked.append(("credits", ledger))
        return self.num_open - len(ledger.groups)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


# --------------------------------------------------------------------------------- times by hand
def test_sync_generates_and_trains_in_turn() -> None:
    outcome = run(policy("sync"))
    assert [tuple(step) for step in outcome.timeline.steps] == [
        (1, 0, 10, 15, 15),
        (2, 15, 25, 30, 30),
        (3, 30, 40, 45, 45),
    ]
    assert (outcome.num_steps, outcome.seconds) == (3, 45)
    assert outcome.steps_per_hour == 3600 * 3 / 45
    assert outcome.trained_tokens_per_s == 60 / 45
    assert outcome.trainer_wait_share == 30 / 45
    # the last version, held at 45, grants nothing any more
    assert outcome.slot_use == pytest.approx(60 / 45 / 100)
    assert (outcome.staleness.mean, outcome.staleness.max) == (0, 0)
    assert outcome.trained_length_ratio == 1
    assert (outcome.closed, outcome.stalled) == ({}, None)


def test_one_step_off_generates_the_next_step_beside_training() -> None:
    """Both batches start at 0 under version 0 and end at 10. Step 1 trains from 10 to 15; step 2,
    full already, from 15 to 20, on tokens of version 0. Version 1, held from 15, grants the third
    batch, which ends at 25 with tokens of version 1 up to 20 and of version 2 from there on."""
    outcome = run(policy("one-step-off"))
    assert starts(outcome) == [10, 15, 25]
    # step 1: 20 tokens at staleness 0; step 2: 20 at 1; step 3: 10 at 1, 10 at 0
    assert outcome.staleness.mean == pytest.approx((20 + 10) / 60)
    assert (outcome.staleness.p99, outcome.staleness.max) == (1, 1)


def test_in_slices_later_slices_are_of_the_newer_version() -> None:
    """As above, but the third batch's slices begin at 15, 19 and 23, and version 2 is held from 20:
    8 of its 10 tokens are of version 1."""
    outcome = run(policy("one-step-off"), inflight="slices", slice_tokens=4)
    assert starts(outcome) == [10, 15, 25]
    assert outcome.staleness.mean == pytest.approx((20 + 16) / 60)


def test_a_restart_loses_what_ran_and_makes_it_fresh() -> None:
    """Four groups end at 10 and train, two by two, until 15 and 20. The four granted at 10 begin
    again at 15 and at 20 with 5 tokens lost each and end at 30. Those granted then lose 5 each when
    version 3 is held at 35."""
    outcome = run(Greedy(4), inflight="restart")
    assert starts(outcome) == [10, 15, 30]
    assert outcome.cancelled_tokens == 4 * 5 + 4 * 5 + 4 * 5
    assert outcome.staleness.mean == pytest.approx((0 * 20 + 1 * 20 + 0 * 20) / 60)


def test_publishing_takes_its_time_beside_training() -> None:
    outcome = run(policy("one-step-off"), publish_s=2.0)
    assert starts(outcome) == [10, 15, 27]
    assert [step.publish_to for step in outcome.timeline.steps] == [17, 22, None]


def test_of_versions_that_wait_to_be_published_the_newest_wins() -> None:
    """Steps end at 15, 20, 25, ...; version 1 is on its way from 15 to 27, version 3 until 39."""
    subject = Greedy(20)
    outcome = run(subject, num_steps=9, publish_s=12.0)
    assert [event.version for event in subject.of(Announced)] == [v(0), v(1), v(3), v(5)]
    assert [step.publish_to for step in outcome.timeline.steps][:5] == [27, 39, 39, 51, 51]


def test_a_step_takes_longer_the_more_it_trains() -> None:
    assert run(policy("sync"), num_steps=1, train_s_per_token=0.1).seconds == 10 + 5 + 20 * 0.1


def test_a_group_arrives_when_it_is_scored() -> None:
    assert starts(run(policy("sync"), num_steps=1, reward_s=3.0)) == [13]


def test_each_group_is_scored_in_one_of_the_given_times() -> None:
    """Two groups a step: it starts with the slower of them."""
    drawn = prompts(workload(reward_s=(1.0, 1.0, 30.0)), seed=1)
    times = [prompt.reward_s for prompt, _ in zip(drawn, range(3000), strict=False)]
    assert set(times) == {1.0, 30.0}
    assert times.count(30.0) / 3000 == pytest.approx(1 / 3, abs=0.04)  # 4.6 deviations
    outcome = run(policy("sync"), num_steps=1, reward_s=(1.0, 1.0, 30.0))
    assert starts(outcome) == [10 + max(times[:2])]


def test_a_group_arrives_with_its_last_trajectory() -> None:
    outcome = run(policy("sync"), num_steps=1, lengths=Trace(tokens=(3, 9)), group_size=40)
    assert starts(outcome) == [9]


def test_a_tool_call_leaves_the_slot_to_others() -> None:
    """One slot: the second group starts when the first, 4 tokens through, calls its tool."""
    settings = {"tools": Tools(turn_tokens=4, chance=1.0, pause_s=1000.0), "num_slots": 1}
    first, second = (
        [request.pause_s for request in prompt.trajectories[0]]
        for prompt, _ in zip(prompts(workload(**settings), seed=1), range(2), strict=False)
    )
    assert len(first) == len(second) == 3
    assert (first[2], second[2]) == (0, 0)
    ends = [0 + 10 + sum(first), 4 + 10 + sum(second)]
    assert starts(run(policy("sync"), num_steps=1, **settings)) == [pytest.approx(max(ends))]


def test_a_turn_without_a_tool_call_stays_on_its_engine() -> None:
    tools = Tools(turn_tokens=4, chance=0.0, pause_s=1000.0)
    prompt = next(prompts(workload(tools=tools), seed=1))
    assert [request.tokens for request in prompt.trajectories[0]] == [10]


def test_slow_cohorts_take_their_factor_longer() -> None:
    outcome = run(policy("sync"), cohorts=Cohorts(factor=4.0, num_batches=1, every=2))
    assert starts(outcome) == [40, 45 + 10, 60 + 40]
    outcome = run(policy("sync"), cohorts=Cohorts(factor=4.0, num_batches=2))
    assert starts(outcome) == [40, 45 + 40, 90 + 10]


def test_a_group_is_as_old_as_its_first_prefill() -> None:
    """One slot, 10 s each; step 1 trains from 20 to 25. The third group starts at 20, under version
    0, the fourth at 30, though both were granted at 0."""
    subject = Greedy(4)
    run(subject, num_steps=2, num_slots=1)
    assert [(event.oldest, event.newest) for event in subject.of(Arrived)[:4]] == [
        (v(0), v(0)),
        (v(0), v(0)),
        (v(0), v(1)),
        (v(1), v(1)),
    ]
    assert [event.version for event in subject.of(Granted)[:4]] == [v(0)] * 4


# ----------------------------------------------------------------------- the feed's order of things
def test_a_policy_is_asked_for_cancels_a_choice_and_credits_until_nothing_changes() -> None:
    subject = Greedy(2)
    run(subject, num_steps=1)
    asked = [question for question, _ in subject.asked]
    whole = ["cancel", "choose", "credits"]
    assert asked[:6] == whole + whole  # two are granted; nothing more
    assert asked[6:12] == whole + whole  # the first arrives and is committed; one more is granted
    # the second fills the step: no choice while that one waits to be taken
    assert asked[12:17] == ["cancel", "choose", "credits", "cancel", "credits"]
    assert asked[17:20] == whole  # it was taken


def test_at_most_one_full_step_waits_and_none_fills_meanwhile() -> None:
    subject = Greedy(12)
    run(subject, num_steps=3, train_s=100.0)
    behind = [
        ledger.version.number - ledger.published.number
        for question, ledger in subject.asked
        if question == "choose"
    ]
    assert max(behind) == 1  # a step trains: the next one fills, and waits once it is full
    waiting = [ledger for _, ledger in subject.asked if ledger.version == v(2)]
    assert {ledger.free_slots for ledger in waiting if ledger.published == v(0)} == {2}


def test_the_ledger_counts_a_group_as_outstanding_until_it_is_announced() -> None:
    subject = Greedy(4)
    run(subject, num_steps=5, publish_s=3.0)
    for _, ledger in subject.asked:
        num_announced = 2 * ledger.published.number
        assert ledger.num_outstanding == ledger.num_granted - num_announced
        assert [group.order for group in ledger.groups] == sorted(g.order for g in ledger.groups)


@pytest.mark.parametrize(("unit", "num_granted"), [("group", 7), ("trajectory", 2), ("batch", 14)])
def test_credits_are_granted_in_whole_groups(unit: Any, num_granted: int) -> None:
    class Once(Greedy):
        def credits(self, state: None, ledger: Ledger) -> int:
            return 7 if ledger.num_granted == 0 else 0

    subject = Once()
    subject.unit = unit
    run(subject, num_steps=1, group_size=3)
    assert len(subject.of(Granted)) == num_granted


def test_engines_are_polled_for_their_load() -> None:
    subject = Greedy(4)
    outcome = run(subject, num_steps=2, num_slots=3)
    loads = subject.of(EngineLoad)
    assert outcome.seconds == 25
    assert len(loads) == 1 + 25 / POLL_S
    assert loads[0] == EngineLoad(num_running=3, num_queued=1, kv_use=0.0)
    assert outcome.timeline.slot_use[0] == (0.0, 1.0)


def test_the_use_of_slots_is_known_to_the_moment_until_what_is_shown_is_over() -> None:
    """Both samples of a step take 10 s, training takes 5, of which nothing is a multiple of 4."""
    times = run(policy("sync"), num_steps=2, num_slots=4).timeline
    assert times.slot_use == ((0.0, 0.5), (10.0, 0.0), (15.0, 0.5), (25.0, 0.0))
    long = run(Greedy(4), num_steps=40).timeline
    assert long.slot_use[-1][0] <= long.steps[29].train_to


# ------------------------------------------------------------------------------------------ tokens
FIRST_TWO_SLOW = {"cohorts": Cohorts(factor=10.0, num_batches=1)}
"""The first two groups take 100 s, the others 10 s: step 1, of the third and the fourth, ends at
15, when the first two have one token each."""


class Cancels(Greedy):
    """Cancels the first two groups whenever it is asked while version 1 is the announced one."""

    def __init__(self, order: Callable[[str], Cancel]) -> None:
        super().__init__()
        self.order = order

    def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
        return tuple(
            self.order(group.group_id)
            for group in ledger.running
            if group.order < 2 and ledger.published == v(1)
        )


@pytest.mark.parametrize(("reason", "closed"), [("stale", "stale"), ("overload", "cancelled")])
def test_a_closed_group_loses_its_tokens_and_gives_its_credit_back(
    reason: str, closed: str
) -> None:
    subject = Cancels(lambda group_id: Cancel(group_id, "close", reason))
    outcome = run(subject, num_steps=2, **FIRST_TWO_SLOW)
    assert outcome.closed == {closed: 2}
    assert outcome.cancelled_tokens == 2
    assert len(subject.of(Granted)) == 4 + 2 + 2 + 2  # at 0, after step 1 and 2, for the two closed


def test_a_requeued_group_begins_again_once_under_the_published_version() -> None:
    subject = Cancels(lambda group_id: Cancel(group_id, "requeue", "stale"))
    outcome = run(subject, num_steps=22, **FIRST_TWO_SLOW)
    assert outcome.closed == {}
    assert outcome.cancelled_tokens == 2
    again = [event for event in subject.of(Arrived) if event.group_id == "prompts/0/0"]
    assert [event.oldest for event in again] == [v(1)]


def test_a_policy_that_always_puts_everything_back_comes_to_an_end() -> None:
    """A group begins again once under each version, and a version takes a full step."""

    class PutsBack(Greedy):
        def cancel(self, state: None, ledger: Ledger) -> tuple[Cancel, ...]:
            return tuple(Cancel(g.group_id, "requeue", "stale") for g in ledger.running)

    outcome = run(PutsBack(4), num_steps=5)
    assert (outcome.stalled, outcome.num_steps) == (None, 5)
    assert outcome.cancelled_tokens > 0


class Drops(Greedy):
    """Drops the first two groups once version 1 is announced, arrived or not."""

    def choose(self, state: None, ledger: Ledger) -> Choice:
        early = [g.group_id for g in ledger.groups if g.order < 2 and ledger.published == v(1)]
        return replace(super().choose(state, ledger), drop=tuple(early))


def test_a_dropped_group_is_closed_as_stale_running_or_not() -> None:
    outcome = run(Drops(), num_steps=2, **FIRST_TWO_SLOW)
    assert outcome.closed == {"stale": 2}
    assert (outcome.dropped_tokens, outcome.cancelled_tokens) == (2, 0)


def test_masked_tokens_are_counted_by_their_own_version() -> None:
    """The third step trains at version 2 what was generated from 10 to 20, half of it under version
    0, which is masked."""

    class Masks(Greedy):
        def choose(self, state: None, ledger: Ledger) -> Choice:
            masked = v(1) if ledger.version == v(2) else None
            return replace(super().choose(state, ledger), mask_before=masked)

    outcome = run(Masks(4))
    assert starts(outcome) == [10, 15, 20]
    assert outcome.masked_tokens == 10
    assert outcome.trained_tokens_per_s == 50 / 25
    # 20 at 0, 20 at 1, 10 at 1
    assert outcome.staleness.mean == pytest.approx(30 / 50)
    assert outcome.trained_length_ratio == 1


def test_a_failed_group_is_closed_and_another_one_is_granted() -> None:
    subject = policy("sync")
    outcome = run(subject, num_steps=10, failure_rate=0.4)
    drawn = prompts(workload(failure_rate=0.4), seed=1)
    num_failed = num_well = 0
    while num_well < 20:
        fails = next(drawn).fails
        num_failed, num_well = num_failed + fails, num_well + (not fails)
    assert num_failed > 5
    assert outcome.stalled is None
    assert outcome.closed == {"reward_failed": num_failed}
    assert outcome.failed_tokens == 10 * num_failed


def test_a_group_over_the_time_cap_is_closed() -> None:
    outcome = run(Greedy(4), num_steps=3, time_cap_s=20.0, **FIRST_TWO_SLOW)
    assert outcome.closed == {"time_cap": 2}
    assert outcome.cancelled_tokens == 2 * 2


def test_p99_is_what_99_in_100_tokens_do_not_exceed() -> None:
    tally = Tally()
    tally.trained_at.update({0: 98, 3: 1, 7: 1})
    staleness = tally.staleness()
    assert (staleness.p99, staleness.max) == (3, 7)
    assert staleness.mean == pytest.approx((3 + 7) / 100)


# --------------------------------------------------------------------------------------- standstill
def test_a_run_in_which_nothing_can_happen_ends_with_its_ledger() -> None:
    class One(Greedy):
        def credits(self, state: None, ledger: Ledger) -> int:
            return 1 - ledger.num_granted

    class TwoTogether(One):
        def choose(self, state: None, ledger: Ledger) -> Choice:
            return super().choose(state, ledger) if len(ledger.ready) == 2 else Choice()

    outcome = run(TwoTogether())
    assert outcome.num_steps == 0
    assert outcome.steps_per_hour == 0
    assert outcome.trainer_wait_share == 1
    assert outcome.stalled is not None
    assert "nothing can happen any more" in outcome.stalled
    assert "2 of 2 places free" in outcome.stalled
    assert "0 running, 1 ready, 1 of them held" in outcome.stalled
    assert "prompts/0/0  held" in outcome.stalled
    assert run(Greedy(0)).stalled is not None


def test_a_policy_that_drops_whatever_comes_is_ended() -> None:
    class DropsAll(Greedy):
        def choose(self, state: None, ledger: Ledger) -> Choice:
            return Choice(drop=tuple(group.group_id for group in ledger.ready))

    outcome = run(DropsAll())
    assert outcome.stalled is not None
    assert "no step fills" in outcome.stalled
    assert outcome.dropped_tokens >= 10 * 100 * 2


class Heeds(Stateless):
    """Its state is the number of polls."""

    name = "heeds"

    def start(self) -> Any:
        return 0

    def observe(self, state: Any, event: Event) -> Any:
        return state + 1 if isinstance(event, EngineLoad) else state

    def credits(self, state: Any, ledger: Ledger) -> int:
        return 2 - len(ledger.groups)


def test_a_policy_that_waits_for_idle_engines_is_polled_but_not_for_ever() -> None:
    class Later(Heeds):
        def credits(self, state: Any, ledger: Ledger) -> int:
            return 2 - len(ledger.groups) if state >= 3 else 0

    class Never(Heeds):
        def credits(self, state: Any, ledger: Ledger) -> int:
            return 0

    assert starts(run(Later(), num_steps=1)) == [2 * POLL_S + 10]
    outcome = run(Never())
    assert outcome.stalled is not None
    assert outcome.seconds == pytest.approx(NUM_IDLE_POLLS * POLL_S, rel=0.01)


# --------------------------------------------------------------------------------------- all in all
def small(name: str) -> Workload:
    known = WORKLOADS[name]
    return replace(known, batch_size=6, group_size=4, num_slots=16)


@pytest.mark.parametrize("inflight", ["keep", "slices", "restart"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_n_step_off_keeps_its_bound_and_drops_nothing_on_every_workload(
    name: str, inflight: Any
) -> None:
    subject = policy("n-step-off", n=2)
    outcome = simulate(replace(small(name), inflight=inflight), subject, num_steps=12, seed=3)
    assert outcome.stalled is None
    assert outcome.staleness.max <= 2
    assert (outcome.dropped_tokens, outcome.masked_tokens) == (0, 0)
    assert set(outcome.closed) <= {"reward_failed"}
    assert 0 < outcome.slot_use <= 1
    assert 0 < outcome.trainer_wait_share < 1


def test_the_same_seed_gives_the_same_outcome() -> None:
    def again(seed: int) -> Outcome:
        return simulate(small("agentic"), policy("n-step-off", n=2), num_steps=6, seed=seed)

    assert again(5) == again(5)
    assert again(5).seconds != again(6).seconds


def test_every_policy_is_shown_the_same_prompts() -> None:
    """n-step-off trains groups in the order of their prompts, whatever n is."""
    outcomes = [
        simulate(small("heavy-tail"), policy("n-step-off", n=n), num_steps=8, seed=5)
        for n in (0, 1, 4)
    ]
    trained = [round(o.trained_tokens_per_s * o.seconds) for o in outcomes]
    assert trained[0] == trained[1] == trained[2]
    assert len({o.seconds for o in outcomes}) == 3


def test_an_outcome_in_json_has_the_agreed_keys() -> None:
    said = msgspec.json.decode(msgspec.json.encode(run(policy("sync")).as_json()))
    assert set(said) >= {
        "name", "parameters", "steps_per_hour", "trained_tokens_per_s", "trainer_wait_share",
        "slot_use", "staleness", "dropped_tokens", "masked_tokens", "cancelled_tokens",
        "trained_length_ratio", "stalled",
    }  # fmt: skip
    assert said["staleness"] == {"mean": 0.0, "p99": 0, "max": 0}
    assert "timeline" not in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"num_engines": 0}, "num_engines must be an integer of at least 1, got 0"),
        ({"num_slots": 5, "num_engines": 2}, "num_slots must be a multiple of num_engines, got 5"),
        ({"token_s": 0.0}, "token_s must be a number above 0 and at most 1e+12, got 0.0"),
        ({"prefill_tokens_per_s": 0.0}, "prefill_tokens_per_s must be a number above 0"),
        ({"time_cap_s": 0.0}, "time_cap_s must be a number above 0"),
        ({"publish_s": -1.0}, "publish_s must be a number of at least 0"),
        (
            {"train_s": math.nan},
            "train_s must be a number of at least 0 and at most 1e+12, got nan",
        ),
        ({"train_s_per_token": math.inf}, "train_s_per_token must be a number of at least 0"),
        ({"reward_s": ()}, "reward_s must hold at least one time, got ()"),
        ({"reward_s": (1.0, -1.0)}, "reward_s must be a number of at least 0"),
        ({"failure_rate": 1.0}, "failure_rate must be below 1, got 1.0"),
        ({"failure_rate": math.nan}, "failure_rate must be a number of at least 0 and at most 1"),
        ({"kv_tokens": 9}, "share of kv_tokens (9) must hold prompt and longest trajectory (10)"),
    ],
)
def test_an_impossible_workload_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="by hand: ") as refused:
        workload(**settings)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tools(turn_tokens=0, chance=0.5, pause_s=1.0), "tools: turn_tokens must be an"),
        (lambda: Tools(turn_tokens=4, chance=1.5, pause_s=1.0), "tools: chance must be a number"),
        (lambda: Tools(turn_tokens=4, chance=0.5, pause_s=math.nan), "tools: pause_s must be a"),
        (lambda: Cohorts(factor=0.0, num_batches=1), "cohorts: factor must be a number above 0"),
        (lambda: Cohorts(factor=2.0, num_batches=1, every=0), "cohorts: every must be an integer"),
    ],
)
def test_impossible_tools_and_cohorts_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "num_steps", "steps_per_hour", "mean"),
    [
        ("standard", 1, 600, 24.5, 0.94),
        ("standard", 4, 150, 50.7, 3.80),
        ("slot-limited", 4, 150, 59.0, None),
    ],
)
def test_runs_agree_with_an_earlier_model_of_them(
    name: str, n: int, num_steps: int, steps_per_hour: float, mean: float | None
) -> None:
    """The expected figures are an independent event model's, for the same workloads. The first
    steps, less stale, count in the mean."""
    outcome = simulate(WORKLOADS[name], policy("n-step-off", n=n), num_steps=num_steps, seed=1)
    assert outcome.stalled is None
    assert outcome.steps_per_hour == pytest.approx(steps_per_hour, rel=0.03)
    assert outcome.staleness.max == n
    if mean is not None:
        assert outcome.staleness.mean == pytest.approx(mean, abs=0.03)
