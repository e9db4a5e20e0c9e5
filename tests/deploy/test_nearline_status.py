"""What `status` says of live traffic: folded, given up with its steps, and in words."""

from __future__ import annotations

import msgspec

from connectors.records import Begin, Closed, Fork, encode
from deploy.fold import Fold
from deploy.history import Prompts
from deploy.nearline_sums import Ends, Foretold, nearline_lines
from tests.deploy.test_fold import begin, manifest, terminal
from trainer.feed_state import Bits, TrafficCounts, TrafficState

TOPICS = ("calls", "said")


def metrics(version: str, n: int, reward: float, **more: float) -> dict[str, float]:
    name = f"prequential/a/b/{version}"
    return {
        f"{name}/n": n, f"{name}/reward": reward, f"{name}/squared": n * 0.25,
        f"{name}/absolute": n * 0.5, **more,
    }  # fmt: skip


def folded() -> Fold:
    """Two steps of one granted group and two sessions each, and one more."""
    fold = Fold(Prompts("p"), None, Ends(TOPICS))
    fold.step(0, begin())
    each = [
        {**metrics("0.0", 2, 1.0), "traffic/groups": 2.0, "staleness/traffic/stale": 3.0},
        {**metrics("0.10", 1, 1.0), **metrics("0.9", 1, 0.0), "traffic/groups": 2.0,
         "traffic/corrections": 1.0, "staleness/traffic/filtered": 1.0},
        {**metrics("unknown", 4, 1.0), "traffic/groups": 1.0},
    ]  # fmt: skip
    for step, told in enumerate(each, 1):
        made = manifest(step, 0, float(step))
        records = made.records * (1 + int(told["traffic/groups"]))
        fold.step(step, msgspec.structs.replace(made, metrics=told, records=records))
    return fold


def test_error_and_reward_are_by_task_and_version_in_the_order_of_numbers() -> None:
    found = folded().nearline()
    assert (found["groups"], found["corrections"]) == (5, 1)
    assert found["dropped_by_reason"] == {"stale": 3, "filtered": 1}
    rows = found["prequential"]
    assert [(r["task"], r["version"], r["sessions"], r["reward"]) for r in rows] == [
        ("a/b", "0.0", 2, 0.5), ("a/b", "0.9", 1, 0.0), ("a/b", "0.10", 1, 1.0),
        ("a/b", "unknown", 4, 0.25),
    ]  # fmt: skip
    assert {(r["brier"], r["absolute_error"]) for r in found["prequential"]} == {(0.25, 0.5)}


def test_only_granted_groups_are_counted_among_those_that_were_granted() -> None:
    fold = folded()
    fold.prompts.grant((3,))
    assert fold.groups() == {"granted": 3, "trained": 3, "closed": 0, "dropped": 0, "open": 0}


def test_what_a_rollback_gives_up_is_given_up_here_too() -> None:
    fold = folded()
    fork = Fork(parent=0, number=1, reason="rollback")
    fold.step(
        4,
        Begin(
            epoch=None, writer="w", resumed_step=1, started_at=0.0, incarnation=1, fork=fork,
            digest="1",
        ),
    )  # fmt: skip
    found = fold.nearline()
    assert (found["groups"], found["corrections"]) == (2, 0)
    assert found["dropped_by_reason"] == {"stale": 3}
    assert [row["version"] for row in found["prequential"]] == ["0.0"]
    again = msgspec.structs.replace(
        manifest(2, 4, 9.0), metrics=metrics("0.1", 1, 1.0), digest_before="1",
        version=msgspec.structs.replace(manifest(2, 4, 9.0).version, incarnation=1),
    )  # fmt: skip
    fold.step(5, again)
    assert [row["version"] for row in fold.nearline()["prequential"]] == ["0.0", "0.1"]


def test_sessions_that_closed_are_counted_once_by_reason() -> None:
    fold = folded()
    for offset, reason in ((1, "capped"), (1, "capped"), (2, "no_label")):
        closed = Closed(group_id=f"calls/0/{offset}", reason=reason)
        fold.end(terminal(closed.group_id, encode(closed)))
    assert fold.nearline()["closed_by_reason"] == {"capped": 1, "no_label": 1}
    assert fold.closed_by_reason == {}
    assert fold.traffic.num_terminals == 3


def test_a_trimmed_log_goes_on_from_what_its_checkpoint_counted() -> None:
    counts = TrafficCounts(
        trained=40, closed_by_reason={"capped": 2}, dropped_by_reason={"stale": 9}
    )
    ended = {"calls/0": Bits(0, bytes([0b10]))}
    ends = Ends(TOPICS, TrafficState(ended=ended, counts=counts))
    ends.add("calls/0/1", lambda: "capped")
    ends.add("calls/0/2", lambda: "capped")
    fold = Fold(Prompts("p"), None, ends)
    found = fold.nearline()
    assert (found["groups"], found["closed_by_reason"]) == (40, {"capped": 3})
    assert found["dropped_by_reason"] == {"stale": 9}


def test_it_is_said_in_words_with_the_last_versions_of_each_task() -> None:
    lines = list(nearline_lines(folded().nearline()))
    assert lines[0] == (
        "traffic    5 groups trained (1 corrections), dropped (filtered) 1, dropped (stale) 3"
    )
    assert lines[1] == "foretold   a/b 0.0: 2 sessions, reward 0.5, off by 0.5 (Brier 0.25)"
    sums = Foretold()
    for number in range(9):
        sums.add(number, metrics(f"0.{number}", 1, 1.0))
    many = list(nearline_lines({**folded().nearline(), "prequential": sums.table()}))
    assert many[1] == "foretold   a/b: 9 versions, the last 5:"
    assert [line.split()[2] for line in many[2:]] == [f"0.{n}:" for n in range(4, 9)]
