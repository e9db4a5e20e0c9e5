"""The audit of live traffic: right runs pass at every moment, and what goes wrong is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.records import Manifest, Version
from deploy.audit import audit
from deploy.audit_text import as_json, audit_lines
from deploy.findings import Audit, History, Terminal
from operators.staleness import policy
from tests.deploy.history import Log, group, manifest
from tests.deploy.test_audit_any_run import audited, bases
from tests.trainer.traffic_world import CALLS, TrafficWorld, traffic_act

NEARLINE = {"nearline_bound": 1, "nearline_low": 0.0, "nearline_high": 1.0}


# ------------------------------------------------------------------------------- any right run
@settings(max_examples=40, deadline=None)
@given(
    batch_size=st.integers(0, 2),
    num_places=st.integers(1, 3),
    bound=st.integers(0, 4),
    with_rollbacks=st.booleans(),
    acts=st.lists(st.integers(0, 2**20), min_size=200, max_size=200),
)
def test_a_run_that_went_right_passes_at_every_moment_and_from_every_checkpoint(
    batch_size: int, num_places: int, bound: int, with_rollbacks: bool, acts: list[int]
) -> None:
    world = TrafficWorld(
        lambda: policy("n-step-off", n=1), batch_size, 2, num_places=num_places, bound=bound
    )
    for done, seed in enumerate(acts):
        traffic_act(world, random.Random(seed), with_rollbacks=with_rollbacks)
        if done % 40 == 39:
            check(world)
    world.drain()
    check(world)
    counts = world.core.traffic.counts()
    found = audited(world, traffic_topics=(CALLS,)).traffic
    assert (found["trained"], found["duplicates"]) == (counts.trained, counts.duplicates)
    assert found["closed"] == sum(counts.closed_by_reason.values())


def check(world: TrafficWorld) -> None:
    whole = audited(world, traffic_topics=(CALLS,))
    assert whole.ok, whole
    for base in bases(world)[-3:]:
        found = audited(world, base, (CALLS,))
        assert found.ok, (base, found)
        assert found.traffic["trained"] == whole.traffic["trained"]


# ------------------------------------------------------------------------------------- by hand
def session(partition: int, at: int, offset: int, *numbers: int) -> Terminal:
    """At offset `at` of `trajectories`, named by the call at `offset`."""
    made = group(partition, at, *numbers)
    return replace(made, group_id=f"headwater.agent-traffic/{partition}/{offset}")


class TrafficLog(Log):
    """Beside the groups of the example: steps 1 and 2 trained two sessions of partition 0, one was
    closed, one is listed as dropped, one waits."""

    def __init__(self) -> None:
        super().__init__()
        one, two = session(0, 10, 3, 0), session(0, 12, 9, 1)
        stale, waits = session(0, 11, 5, 0), session(0, 13, 11, 1)
        closed = replace(session(1, 14, 2), kind="closed", reason="capped")
        self.sessions = {"one": one, "two": two, "stale": stale, "waits": waits}
        self.terminals += [one, stale, two, waits, closed]
        self.steps[1:] = [
            (1, self.step(1, group(0, 0, 0), group(1, 0, 0), one)),
            (2, self.step(2, group(1, 1, 0), group(0, 2, 1), two, dropped=(stale.group_id,))),
        ]

    def step(self, number: int, *records: Terminal, **more: object) -> Manifest:
        metrics = {"staleness/traffic/stale": 1.0} if more.get("dropped") else {}
        return manifest(number, *records, settings=NEARLINE, metrics=metrics, **more)

    def history(self) -> History:
        return replace(
            super().history(), traffic_topics=("headwater.agent-traffic", "headwater.feedback")
        )


def test_a_right_log_counts_its_sessions_apart_and_its_drops_by_reason() -> None:
    found = audit(TrafficLog().history())
    assert found.ok, found
    assert found.traffic == {
        "trained": 2, "closed": 1, "dropped": 1, "queued": 1, "duplicates": 0, "scoring": 0,
    }  # fmt: skip
    assert found.groups["trained"] == 4
    assert found.dropped_by_reason == {"stale": 1}
    assert found.closed_by_reason["capped"] == 1
    lines = audit_lines(as_json(found))
    assert "live traffic 5 = 2 trained + 1 closed + 1 dropped + 1 queued" in lines


def retrain(log: TrafficLog) -> None:
    log.steps[2] = (2, log.step(2, group(1, 1, 0), group(0, 2, 1), log.sessions["one"]))


def forget(log: TrafficLog) -> None:
    two = log.sessions["two"]
    log.steps[2] = (2, log.step(2, group(1, 1, 0), group(0, 2, 1), two))


def too_old(log: TrafficLog) -> None:
    """Step 2 trains at version 1; bound 0 by its settings."""
    two, stale = log.sessions["two"], log.sessions["stale"]
    log.terminals[log.terminals.index(two)] = session(0, 12, 9, 0)
    step = log.step(2, group(1, 1, 0), group(0, 2, 1), two, dropped=(stale.group_id,))
    settings = {**NEARLINE, "nearline_bound": 0}
    log.steps[2] = (2, Manifest(**{**as_dict(step), "settings": settings}))


def from_the_future(log: TrafficLog) -> None:
    two = log.sessions["two"]
    log.terminals[log.terminals.index(two)] = session(0, 12, 9, 2)


def another_record(log: TrafficLog) -> None:
    two = log.sessions["two"]
    log.terminals[log.terminals.index(two)] = replace(two, crc=7)


def closed_first(log: TrafficLog) -> None:
    log.terminals.append(replace(log.sessions["two"], offset=9, kind="closed"))


def no_terminal(log: TrafficLog) -> None:
    log.terminals.remove(log.sessions["stale"])


def as_dict(step: Manifest) -> dict[str, object]:
    return {name: getattr(step, name) for name in step.__struct_fields__}


@pytest.mark.parametrize(
    ("corrupt", "finding"),
    [
        (retrain, "trained_twice"),
        (forget, "lost"),
        (too_old, "bound_violations"),
        (from_the_future, "bound_violations"),
        (another_record, "wrong_records"),
        (closed_first, "settled_twice"),
        (no_terminal, "ungranted"),
    ],
)
def test_what_goes_wrong_is_found(corrupt: Callable[[TrafficLog], None], finding: str) -> None:
    log = TrafficLog()
    corrupt(log)
    found = audit(log.history())
    assert getattr(found, finding), found
    assert not found.ok


def test_a_second_terminal_is_counted_and_its_late_drop_is_no_finding() -> None:
    log = TrafficLog()
    one = log.sessions["one"]
    log.terminals.append(replace(one, offset=20))
    log.steps.append((3, log.step(3, dropped=(one.group_id,))))
    found = audit(log.history())
    assert not found.settled_twice
    assert found.traffic["duplicates"] == 1
    log.terminals.pop()
    assert audit(log.history()).settled_twice == [one.group_id]


def test_a_session_that_is_not_scored_while_many_others_are_is_lost() -> None:
    log = TrafficLog()
    one = log.sessions["one"].group_id
    late = "headwater.agent-traffic/1/30"

    def audited_with() -> Audit:
        ended = [(one, 0, 1.0), (late, 1, 50.0)]
        return audit(replace(log.history(), sessions=lambda: ended))

    found = audited_with()
    assert (found.ok, found.traffic["scoring"]) == (True, 1)
    again = log.terminals[-1]
    log.terminals += [replace(again, offset=40 + k, written_at=50.0 + 9 * k) for k in range(13)]
    assert list(audited_with().lost) == [late]


def test_the_bound_of_a_session_is_its_own_and_text_has_none() -> None:
    """The policy's is 1 too; the step trains at version 1 what version 0 wrote."""
    log = TrafficLog()
    two, stale = log.sessions["two"], log.sessions["stale"]
    log.terminals[log.terminals.index(two)] = replace(two, versions=frozenset[Version]())
    assert audit(log.history()).ok
    log.steps[2] = (2, log.step(2, group(1, 1, 0), group(0, 2, 1), stale, two))
    found = audit(log.history())
    assert found.bound_violations == []
