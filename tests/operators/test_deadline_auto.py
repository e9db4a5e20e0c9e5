"""`deadline` with lookahead "auto": what raises and lowers it, how far, what leaves it alone."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from operators.staleness import policy
from operators.staleness.types import (
    Announced,
    Arrived,
    Closed,
    Committed,
    EngineLoad,
    StalenessPolicy,
)
from tests.operators.policy_run import Run, v
from tests.operators.test_deadline import run_of


def timed_loop(
    subject: StalenessPolicy[Any], *, batch_size: int, generate: float, train: float,
    publish: float, num_steps: int, jitter: float = 0.0, queued: int = 0,
) -> tuple[list[int], list[float], Run]:  # fmt: skip
    """Every group takes `generate` seconds, give or take `jitter` of it, a step `train`, until
    engines hold its weights `publish` more. L at each step, and how long the trainer waited for
    it."""
    run, chance = Run(subject, batch_size), random.Random(1)
    if queued:
        run.observe(EngineLoad(num_running=1, num_queued=queued, kv_use=0.0))
    run.publish(0)
    now, free_at, waits, lookaheads = 0.0, 0.0, [], []
    full = False
    due: list[tuple[float, int, str]] = []  # (when, kind: 0 arrival, 1 publish, 2 step end; what)
    while len(waits) < num_steps:
        moved = True
        while moved:
            moved = False
            if not full:
                before = run.version
                moved = bool(run.choose().commit)
                full = run.version > before
            if full and now >= free_at:
                waits.append(now - free_at)
                lookaheads.append(run.state.lookahead)
                free_at, full, moved = now + train, False, True
                due += [(free_at, 2, ""), (free_at + publish, 1, str(run.version))]
            for group_id in run.grant_all():
                seconds = generate * (1 + jitter * chance.uniform(-1, 1))
                due.append((now + seconds, 0, group_id))
        event = min(due)
        due.remove(event)
        now = event[0]
        if event[1] == 0:
            run.arrive(event[2])
        elif event[1] == 1:
            run.publish(int(event[2]))
    return lookaheads, waits, run


def test_auto_raises_the_lookahead_while_the_trainer_starves_and_no_further() -> None:
    """A group takes 2.5 steps' time and a tenth of one until its grant is announced: L = 3 is the
    least with which no step waits (granted when step s - 4 is announced, needed 3 - 0.1 later)."""
    subject = policy("deadline", bound=8, lookahead="auto")
    lookaheads, waits, run = timed_loop(
        subject, batch_size=4, generate=25.0, train=10.0, publish=1.0, num_steps=60
    )
    assert lookaheads[0] == 1
    assert lookaheads[-30:] == [3] * 30
    assert waits[-30:] == [0.0] * 30
    assert max(run.staleness) <= 8


def test_auto_lowers_the_lookahead_while_slots_idle_and_no_further() -> None:
    """As above, from L = 6, which a run before may have needed."""
    subject = policy("deadline", bound=8, lookahead="auto")
    start = subject.start
    subject.start = lambda: msgspec.structs.replace(start(), lookahead=6)  # type: ignore[method-assign]
    lookaheads, waits, _ = timed_loop(
        subject, batch_size=4, generate=25.0, train=10.0, publish=1.0, num_steps=90
    )
    assert lookaheads[0] == 6
    assert lookaheads[-30:] == [3] * 30
    assert sum(waits[1:]) == 0.0, "no step but the first waits for it"


def test_auto_stays_between_one_and_the_bound() -> None:
    starving = policy("deadline", bound=2, lookahead="auto")
    lookaheads, _, run = timed_loop(
        starving, batch_size=2, generate=90.0, train=10.0, publish=1.0, num_steps=30
    )
    assert (max(lookaheads), lookaheads[-1]) == (2, 2)
    assert max(run.staleness) <= 2
    idle = policy("deadline", bound=4, lookahead="auto")
    lookaheads, _, _ = timed_loop(
        idle, batch_size=2, generate=1.0, train=10.0, publish=1.0, num_steps=30
    )
    assert set(lookaheads) == {1}
    assert policy("deadline", bound=0, lookahead="auto").start().lookahead == 0


def looked_ahead(num_steps: int, *, announced: int, held: bool = False, start: int = 1) -> int:
    """L after steps of one group each, committed when the version `announced` steps before the one
    they train at was the last announced; `held`: a group was ready by then that is never
    committed."""
    subject = policy("deadline", bound=4, lookahead="auto")
    state = msgspec.structs.replace(subject.start(), lookahead=start)
    if held:
        state = subject.observe(state, Arrived("held", v(0), v(0)))
    for step in range(1, num_steps + 1):
        if step - 1 - announced >= 0:
            state = subject.observe(state, Announced(v(step - 1 - announced)))
        state = subject.observe(state, Arrived(f"g{step}", v(0), v(0)))
        state = subject.observe(state, Committed(f"g{step}", step))
    if held:
        state = subject.observe(state, Closed("held", "stale"))
    assert state.ready == {}
    return int(state.lookahead)


def test_auto_counts_a_step_as_starved_early_or_neither() -> None:
    """A step is judged when the next one begins; of the first 2 at L = 1 none is. Two starved ones
    raise L, 2 (3 + 1) early ones lower it from 3."""
    assert looked_ahead(4, announced=0) == 1
    assert looked_ahead(5, announced=0) == 2
    assert looked_ahead(40, announced=1) == 1, "in time"
    assert looked_ahead(40, announced=1, start=3) == 3
    assert looked_ahead(2 + 8, announced=2, start=3) == 3
    assert looked_ahead(2 + 8 + 1, announced=2, start=3) == 2


def test_auto_grants_no_more_when_the_trainer_waits_for_old_groups_and_fresh_ones_are_held() -> (
    None
):
    assert looked_ahead(40, announced=0, held=True) == 1


def test_auto_does_not_grant_more_while_engines_have_a_queue() -> None:
    subject = policy("deadline", bound=8, lookahead="auto")
    lookaheads, _, _ = timed_loop(
        subject, batch_size=4, generate=25.0, train=10.0, publish=1.0, num_steps=30, queued=3
    )
    assert set(lookaheads) == {1}


def test_auto_settles_though_groups_take_unequal_time() -> None:
    subject = policy("deadline", bound=8, lookahead="auto")
    lookaheads, waits, run = timed_loop(
        subject, batch_size=8, generate=25.0, train=10.0, publish=1.0, num_steps=150, jitter=0.6
    )
    assert set(lookaheads[50:]) <= {3, 4, 5}
    assert sum(waits[50:]) < 0.02 * 100 * 10.0
    assert max(run.staleness) <= 8


def test_a_run_goes_on_under_another_lookahead_and_a_lower_bound() -> None:
    """Its state in the checkpoint is of the same shape."""
    run = run_of(1, bound=8, lookahead="auto")
    run.state = msgspec.structs.replace(run.state, lookahead=6)
    assert run.credits() == 7
    run.policy = policy("deadline", bound=8, lookahead=3)
    assert run.credits() == 4
    run.policy = policy("deadline", bound=2, lookahead="auto")
    assert run.credits() == 3
    kept = msgspec.to_builtins(policy("deadline", lookahead=3).start())
    assert msgspec.convert(kept, type=type(run.state)).lookahead == 3
