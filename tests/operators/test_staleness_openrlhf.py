"""openrlhf: by hand, against its own count of tokens, and in random runs."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from operators.staleness import policy
from operators.staleness.types import Choice
from tests.operators.policy_run import Run
from tests.operators.random_runs import random_acts, random_loops


def draw(chance: random.Random, batch_size: int) -> dict[str, Any]:
    return {"async_queue_size": chance.randint(1, 3)}


def test_the_next_batch_starts_when_all_of_the_last_is_finished_and_a_token_is_free() -> None:
    run = Run(policy("openrlhf", async_queue_size=2), 2)
    run.publish(0)
    a, b = run.grant_all()
    assert run.credits() == 0, "one generator, and it is busy"
    run.arrive(b)
    assert run.credits() == 0
    run.arrive(a)
    assert run.credits() == 1
    for group_id in run.grant_all():
        run.arrive(group_id)
    assert run.credits() == 0, "both tokens are in the queue"
    run.choose()
    assert run.credits() == 1, "the token comes back as the batch is taken out, before it trains"


def test_a_batch_that_is_filled_behind_the_one_in_training_still_waits_in_the_queue() -> None:
    run = Run(policy("openrlhf"), 2)
    run.publish(0)
    for _ in range(2):
        for group_id in run.grant_all():
            run.arrive(group_id)
        run.choose()
    assert (run.version, run.published, run.credits()) == (2, 0, 0)
    run.publish(1)
    assert run.credits() == 1


def test_its_credits_are_the_tokens_of_an_idle_generator() -> None:
    """A batch is taken out when its step is full and the one before it is announced."""
    chance = random.Random(13)
    num_free = 0
    for _ in range(60):
        num_tokens, batch_size = chance.randint(1, 3), chance.randint(1, 3)
        subject = policy("openrlhf", async_queue_size=num_tokens)
        for run in random_acts(Run(subject, batch_size), chance, failures=False):
            busy = any(group.state == "running" for group in run.open.values())
            num_taken_out = min(run.version, run.published + 1)
            tokens = num_tokens - run.num_granted // batch_size + num_taken_out
            assert run.credits() == int(tokens > 0 and not busy)
            num_free += run.credits()
    assert num_free > 200


def test_batches_are_trained_in_the_order_they_were_generated() -> None:
    run = Run(policy("openrlhf", async_queue_size=2), 2)
    run.publish(0)
    a, b = run.grant_all()
    run.arrive(b)
    assert run.choose() == Choice(), "a comes first"
    run.arrive(a)
    c, d = run.grant_all()
    run.arrive(d)
    assert run.choose() == Choice(commit=(a, b))
    assert run.choose() == Choice()
    run.arrive(c)
    assert run.choose() == Choice(commit=(c, d))


def test_a_batch_that_failed_in_part_is_filled_up_from_the_next_once_the_trainer_starves() -> None:
    run = Run(policy("openrlhf"), 2)
    run.publish(0)
    a, b = run.grant_all()
    run.close(b)
    assert run.credits() == 0, "a is still running"
    run.arrive(a)
    assert run.choose().commit == (a,)
    assert run.credits() == 1, "the trainer waits for one more"
    c, d = run.grant_all()
    run.arrive(c)
    run.arrive(d)
    assert run.choose().commit == (c,)
    assert run.credits() == 0, "d is queued, and a batch behind it could be two steps old"
    run.publish(1)
    assert run.choose().commit == (d,)
    assert run.credits() == 1
    e, f = run.grant_all()
    run.close(e)
    run.arrive(f)
    assert run.choose().commit == (f,)
    assert run.credits() == 1, "two failed: nothing is left over any more"


def test_a_batch_that_failed_whole_returns_its_token() -> None:
    run = Run(policy("openrlhf"), 2)
    run.publish(0)
    for group_id in run.grant_all():
        run.close(group_id)
    assert run.credits() == 1


def test_it_keeps_its_bound_without_dropping_and_never_stalls() -> None:
    reached = 0
    for subject, result in random_loops("openrlhf", draw):
        assert not result.stalled
        assert result.closed["stale"] == 0
        assert result.max_staleness <= subject.bound
        reached += result.max_staleness == subject.bound > 0
    assert reached > 60


def test_what_a_smaller_queue_makes_too_old_is_dropped() -> None:
    run = Run(policy("openrlhf", async_queue_size=3), 1)
    run.publish(0)
    for _ in range(3):
        for group_id in run.grant_all():
            run.arrive(group_id)
    a, b, c = run.open
    run.choose()
    run.choose()
    run.policy = policy("openrlhf", async_queue_size=1)
    assert run.choose() == Choice(drop=(c,))
    assert run.credits() == 0
    run.publish(2)
    assert run.credits() == 1
    assert run.staleness == [0, 1]
    assert {a, b, c}.isdisjoint(run.open)


def test_a_smaller_batch_goes_on_from_what_is_open() -> None:
    run = Run(policy("openrlhf"), 4)
    run.publish(0)
    groups = run.grant_all()
    run.batch_size = 2
    for group_id in groups:
        run.arrive(group_id)
    assert run.choose().commit == tuple(groups[:2])
    assert run.choose().commit == tuple(groups[2:])
    run.publish(2)
    assert len(run.grant_all()) == 2


@pytest.mark.parametrize("partial", [False, True])
def test_partial_rollouts_change_neither_grants_nor_bound(partial: bool) -> None:
    subject = policy("openrlhf", partial_rollout_enable=partial)
    assert (subject.name, subject.unit, subject.bound) == ("openrlhf", "batch", 1)
    assert not subject.auditable
    run = Run(subject, 4)
    run.publish(0)
    assert (run.credits(), run.group_credits()) == (1, 4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"async_queue_size": 0}, "async_queue_size must be an integer of at least 1, got 0"),
        ({"async_queue_size": None}, "async_queue_size must be an integer of at least 1, got None"),
        ({"partial_rollout_enable": 1}, "partial_rollout_enable must be true or false, got 1"),
        ({"queue_size": 2}, "unknown parameter 'queue_size', did you mean 'async_queue_size'?"),
    ],
)
def test_a_wrong_parameter_is_one_clear_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'openrlhf: {message}')}$"):
        policy("openrlhf", **parameters)
