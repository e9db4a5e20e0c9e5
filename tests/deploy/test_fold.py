"""The fold behind `status`: equal to sums over the whole log, and deaf to what is no terminal."""

from __future__ import annotations

import msgspec

from connectors.arrow import checksum
from connectors.kafka.client import Record
from connectors.records import (
    HEADER_CRC,
    HEADER_KIND,
    Begin,
    Closed,
    Coordinate,
    Fork,
    Manifest,
    Version,
    encode,
)
from deploy.fold import Fold
from deploy.history import Prompts


def begin() -> Begin:
    return Begin(epoch=None, writer="w", resumed_step=0, started_at=0.0)


def manifest(step: int, epoch: int, finished_at: float) -> Manifest:
    return Manifest(
        step=step,
        epoch=epoch,
        version=Version(0, step),
        records=(Coordinate(0, step, 0, f"p/0/{step}"),),
        micro_batches=(),
        seed=0,
        digest_before=str(step - 1),
        digest=str(step),
        metrics={"tokens/trained": 10.0 * step, "seconds/wait": 0.5, "reward/mean": step / 10},
        staleness={"mean": float(step), "p99": float(step), "max": float(step)},
        finished_at=finished_at,
    )


def terminal(key: str, value: bytes, crc: int | None = None) -> Record:
    crc = checksum(value) if crc is None else crc
    return Record(
        topic="t",
        partition=0,
        offset=0,
        key=key.encode(),
        value=value,
        headers={HEADER_KIND: "closed", HEADER_CRC: f"{crc:08x}"},
        timestamp_ms=0,
    )


def test_sums_count_each_step_of_the_chain_once_and_none_of_a_fenced_trainer() -> None:
    fold = Fold(Prompts("p"))
    for offset, record in enumerate(
        [
            begin(),
            manifest(1, 0, 1.0),
            manifest(2, 0, 3.0),
            begin(),
            manifest(3, 0, 4.0),  # fenced
            manifest(3, 3, 9.0),
            manifest(4, 3, 10.0),
        ]
    ):
        fold.step(offset, record)
    assert fold.groups()["trained"] == 4
    assert fold.total("tokens/trained") == 100.0
    assert fold.staleness() == {"mean": (10 + 40 + 90 + 160) / 100, "p99": 4.0, "max": 4.0}
    assert fold.rewards() == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert fold.wait_share() == (0.5 + 0.5) / (2.0 + 1.0)


def test_a_trimmed_log_is_summed_from_where_its_chain_begins() -> None:
    fold = Fold(Prompts("p"))
    for offset, record in enumerate(
        [manifest(5, 2, 1.0), manifest(5, 4, 2.0), manifest(6, 4, 3.0)]
    ):
        fold.step(offset, record)
    assert fold.rewards() == [(5, 0.5), (6, 0.6)]
    assert fold.total("tokens/trained") == 110.0


def test_what_the_policy_did_is_summed_by_reason_and_given_up_with_its_steps() -> None:
    done = [
        {"staleness/holds": 2.0, "staleness/drops/stale": 1.0, "staleness/waits/rollouts": 1.0,
         "seconds/wait/rollouts": 0.5, "tokens/masked": 7.0, "tokens/age/5-8": 3.0},
        {"staleness/cancels/close/stale": 3.0, "staleness/cancels/requeue/stale": 1.0},
        {"staleness/holds": 4.0, "staleness/waits/rollouts": 1.0, "seconds/wait/rollouts": 1.25,
         "seconds/wait/policy": 0.25, "staleness/waits/policy": 1.0, "tokens/reweighted": 9.0},
    ]  # fmt: skip
    fold = Fold(Prompts("p"))
    fold.step(0, begin())
    nothing = fold.staleness_actions()
    assert nothing == {
        "waits": {}, "holds": 0, "drops": {}, "cancels": {"close": {}, "requeue": {}},
        "masked_tokens": 0, "reweighted_tokens": 0,
    }  # fmt: skip
    for step, metrics in enumerate(done, 1):
        fold.step(step, msgspec.structs.replace(manifest(step, 0, float(step)), metrics=metrics))
    assert fold.staleness_actions() == {
        "waits": {
            "rollouts": {"steps": 2, "seconds": 1.75}, "policy": {"steps": 1, "seconds": 0.25},
        },
        "holds": 6,
        "drops": {"stale": 1},
        "cancels": {"close": {"stale": 3}, "requeue": {"stale": 1}},
        "masked_tokens": 7,
        "reweighted_tokens": 9,
    }  # fmt: skip
    fork = Fork(parent=0, number=1, reason="rollback")
    back = Begin(
        epoch=None, writer="w", resumed_step=1, started_at=0.0, incarnation=1, fork=fork,
        digest="1",
    )  # fmt: skip
    fold.step(4, back)
    assert fold.staleness_actions() == nothing | {
        "waits": {"rollouts": {"steps": 1, "seconds": 0.5}}, "holds": 2, "drops": {"stale": 1},
        "masked_tokens": 7,
    }  # fmt: skip


def test_the_last_steps_metrics_are_kept_until_its_step_is_given_up() -> None:
    fold = Fold(Prompts("p"))
    fold.step(0, begin())
    fold.step(1, manifest(1, 0, 1.0))
    fold.step(2, manifest(2, 0, 2.0))
    fold.step(3, manifest(3, 9, 3.0))  # fenced
    assert fold.last["reward/mean"] == 0.2
    fork = Fork(parent=0, number=1, reason="rollback")
    back = msgspec.structs.replace(begin(), resumed_step=1, incarnation=1, fork=fork, digest="1")
    fold.step(4, back)
    assert fold.last == {}


def test_what_a_step_did_not_train_of_its_groups_is_masked() -> None:
    fold = Fold(Prompts("p"))
    metrics = {"tokens/generated": 12.0, "tokens/trained": 10.0}
    fold.step(0, begin())
    fold.step(1, msgspec.structs.replace(manifest(1, 0, 1.0), metrics=metrics))
    assert fold.tokens() == {"generated": 0, "trained": 10, "masked": 2, "dropped": 0}


def test_a_damaged_end_counts_as_malformed_and_second_ends_do_not_count() -> None:
    fold = Fold(Prompts("p"))
    whole = encode(Closed(group_id="p/0/1", reason="time_cap"))
    for record in (
        terminal("p/0/0", b"{", None),
        terminal("p/0/1", whole),
        terminal("p/0/1", whole),
        terminal("p/0/2", whole, crc=1),
        terminal("no coordinates", whole),
    ):
        fold.end(record)
    assert fold.closed_by_reason == {"malformed": 2, "time_cap": 1}
    fold.prompts.grant((4,))
    assert (fold.prompts.arrived, fold.prompts.closed, fold.prompts.open) == (3, 3, 1)
