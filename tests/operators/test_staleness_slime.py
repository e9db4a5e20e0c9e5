"""slime: two counts checked apart, by hand and in random arrival orders."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from operators.staleness import policy, policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import StalenessPolicy
from tests.operators.policy_run import Run, closed_loop


def slime(most: int) -> StalenessPolicy[Any]:
    return policy(
        "slime", sglang_server_concurrency=most, num_engines=1, n_samples_per_prompt=1
    )  # fmt: skip


def num_granted(subject: StalenessPolicy[Any]) -> int:
    run = Run(subject, 4)
    run.publish(0)
    return len(run.grant_all())


@pytest.mark.parametrize(
    ("parameters", "most"),
    [
        ({"num_engines": 1, "n_samples_per_prompt": 8}, 512 // 8),
        ({"num_engines": 3, "n_samples_per_prompt": 8}, 3 * 512 // 8),
        (
            {
                "sglang_server_concurrency": 64,
                "num_engines": 1,
                "n_samples_per_prompt": 8,
                "fully_async_group_prefetch_factor": 1.5,
            },
            12,
        ),
        (
            {
                "sglang_server_concurrency": 100,
                "num_engines": 1,
                "n_samples_per_prompt": 11,
                "fully_async_group_prefetch_factor": 11,
            },
            100,
        ),
        # 10 / 4 = 2.5: two in flight are fewer than that, three are not.
        ({"sglang_server_concurrency": 10, "num_engines": 1, "n_samples_per_prompt": 4}, 3),
    ],
)
def test_groups_are_started_up_to_the_engines_budgets(
    parameters: dict[str, Any], most: int
) -> None:
    assert num_granted(policy("slime", **parameters)) == most


def test_the_older_rule_is_the_newer_one_at_a_factor_of_the_group_size() -> None:
    shape = RunShape(batch_size=4, group_size=8, num_slots=64, num_engines=2)
    older = policy_for(
        "slime", shape, sglang_server_concurrency=16, fully_async_group_prefetch_factor=8
    )
    assert num_granted(older) == 16 * 2


def test_a_run_gives_the_engines_and_the_group_size_which_may_not_differ() -> None:
    shape = RunShape(batch_size=4, group_size=8, num_slots=64, num_engines=2)
    assert num_granted(policy_for("slime", shape)) == 512 * 2 // 8
    with pytest.raises(ValueError, match=r"^slime: n_samples_per_prompt is 8 in this run, got 4$"):
        policy_for("slime", shape, n_samples_per_prompt=4)


def test_running_and_waiting_groups_are_counted_apart_so_nearly_twice_as_many_are_out() -> None:
    run = Run(slime(4), batch_size=1)
    run.publish(0)
    for group_id in run.grant_all()[:3]:
        run.arrive(group_id)
    assert run.credits() == 3, "three wait, one runs, and the two counts do not know each other"
    run.grant_all()
    assert (len(run.ledger().ready), len(run.ledger().running)) == (3, 4)
    run.arrive("p/0/3")
    assert run.credits() == 0, "four wait, so nothing starts though only three run"
    run.choose()
    assert run.credits() == 1


def test_a_failed_group_frees_its_place_at_once() -> None:
    run = Run(slime(2), batch_size=1)
    run.publish(0)
    first, _ = run.grant_all()
    assert run.credits() == 0
    run.close(first)
    assert run.credits() == 1


def test_groups_are_trained_in_the_order_they_finished() -> None:
    run = Run(slime(3), batch_size=2)
    run.publish(0)
    a, b, c = run.grant_all()
    for group_id in (c, a, b):
        run.arrive(group_id)
    assert run.choose().commit == (c, a)
    assert run.choose().commit == (b,)


@pytest.mark.parametrize("num_steps", [3, 30])
def test_a_slow_group_trains_as_many_versions_old_as_it_took(num_steps: int) -> None:
    """The counterexample: nothing bounds staleness. One place of two is the slow group's."""
    run = Run(slime(2), batch_size=1)
    run.publish(0)
    slow, other = run.grant_all()
    for step in range(num_steps):
        run.arrive(other)
        run.choose()
        run.publish(step + 1)
        (other,) = run.grant_all()
    run.arrive(slow, oldest=0)
    run.choose()
    assert run.staleness[-1] == num_steps
    assert max(run.staleness[:-1]) <= 1


def test_random_orders_never_stall_it_and_do_age_groups_without_end() -> None:
    chance = random.Random(7)
    oldest = 0
    for _ in range(200):
        batch_size = chance.randint(1, 3)
        result = closed_loop(
            slime(chance.randint(1, 2 * batch_size)),
            chance,
            batch_size=batch_size,
            num_steps=8,
            num_slow=1,
            failures=chance.choice([0.0, 0.2]),
        )
        assert not result.stalled
        assert result.closed.keys() <= {"reward_failed"}
        oldest = max(oldest, result.max_staleness)
    assert oldest > 5


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sglang_server_concurrency": 0}, "sglang_server_concurrency must be an integer of at "
         "least 1, got 0"),
        ({"num_engines": 0}, "num_engines must be an integer of at least 1, got 0"),
        ({"n_samples_per_prompt": 0.5}, "n_samples_per_prompt must be an integer of at least 1, "
         "got 0.5"),
        ({"fully_async_group_prefetch_factor": -1}, "fully_async_group_prefetch_factor must be a "
         "number above 0 and at most 1e+06, got -1"),
        ({"fully_async_group_prefetch_factor": 0}, "fully_async_group_prefetch_factor must be a "
         "number above 0 and at most 1e+06, got 0"),
        ({"fully_async_group_prefetch_factor": 1e308}, "fully_async_group_prefetch_factor must be "
         "a number above 0 and at most 1e+06, got 1e+308"),
        ({"concurrency": 8}, "unknown parameter 'concurrency', did you mean "
         "'sglang_server_concurrency'?"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    given = {"num_engines": 1, "n_samples_per_prompt": 1}
    with pytest.raises(ValueError, match=f"^slime: {re.escape(message)}$"):
        policy("slime", **{**given, **parameters})


def test_a_missing_group_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"^slime: parameter 'n_samples_per_prompt' is missing$"):
        policy("slime", num_engines=1)
