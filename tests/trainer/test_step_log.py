"""Who may write steps, by position in the log: the chain as a pure function, and on a broker."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.topics import ensure_topics
from connectors.records import (
    Begin,
    Fork,
    Manifest,
    PolicyRecord,
    StepRecord,
    Version,
    decode_as,
    encode,
)
from trainer.step_log import Chain, ChainBroken, Fenced, StepLog, chain


def begin(resumed_step: int = 0, incarnation: int = 0) -> Begin:
    return Begin(
        epoch=None,
        writer="test",
        resumed_step=resumed_step,
        started_at=0.0,
        incarnation=incarnation,
    )


def rollback(parent: int, number: int, incarnation: int | None = None) -> Begin:
    fork = Fork(parent=parent, number=number, reason="rollback")
    return forked(fork, f"d{number}", incarnation)


def rebuild(parent: int, number: int, incarnation: int | None = None) -> Begin:
    return forked(Fork(parent=parent, number=number, reason="rebuild"), f"e{number}", incarnation)


def forked(fork: Fork, digest: str, incarnation: int | None) -> Begin:
    opened = fork.parent + 1 if incarnation is None else incarnation
    return msgspec.structs.replace(begin(), incarnation=opened, fork=fork, digest=digest)


def manifest(
    step: int,
    epoch: int,
    digest: str | None = None,
    *,
    incarnation: int = 0,
    before: str | None = None,
) -> Manifest:
    return Manifest(
        step=step,
        epoch=epoch,
        version=Version(incarnation, step),
        records=(),
        micro_batches=(),
        seed=0,
        digest_before=before or f"d{step - 1}",
        digest=digest or f"d{step}",
    )


def chain_of(records: Sequence[StepRecord], start: int = 0) -> Chain:
    found = Chain()
    for offset, record in enumerate(records, start):
        found.observe(offset, record)
    return found


def steps_of(records: list[StepRecord], start: int = 0) -> list[tuple[int, int]]:
    return [(m.step, m.epoch) for m in chain(enumerate(records, start))]


def test_the_manifests_of_one_trainer_are_the_chain() -> None:
    assert steps_of([begin(), manifest(1, 0), manifest(2, 0)]) == [(1, 0), (2, 0)]


def test_an_empty_log_has_an_empty_chain() -> None:
    assert steps_of([]) == []
    assert steps_of([begin()]) == []


def test_a_recovered_trainer_goes_on_after_the_last_step_whatever_its_checkpoint() -> None:
    log = [begin(), manifest(1, 0), manifest(2, 0), begin(1), manifest(3, 3)]
    assert steps_of(log) == [(1, 0), (2, 0), (3, 3)]


def test_a_manifest_written_after_a_newer_begin_is_void() -> None:
    log = [begin(), manifest(1, 0), begin(1), manifest(2, 0), manifest(2, 2), manifest(3, 0)]
    assert steps_of(log) == [(1, 0), (2, 2)]


def test_of_two_trainers_that_begin_at_once_the_later_one_counts() -> None:
    assert steps_of([begin(), begin(), manifest(1, 0), manifest(1, 1)]) == [(1, 1)]


@pytest.mark.parametrize("step", [1, 2, 4])
def test_a_step_that_is_missing_or_twice_breaks_the_chain(step: int) -> None:
    with pytest.raises(ChainBroken, match=f"step {step} at offset 3 follows step 2"):
        steps_of([begin(), manifest(1, 0), manifest(2, 0), manifest(step, 0)])


def test_weights_that_changed_between_two_steps_break_the_chain() -> None:
    with pytest.raises(ChainBroken, match="step 2 starts from d1, step 1 ended at other"):
        steps_of([begin(), manifest(1, 0, "other"), manifest(2, 0)])


def test_a_whole_log_must_start_at_the_first_step() -> None:
    with pytest.raises(ChainBroken, match="the first step is 2, not 1"):
        steps_of([begin(), manifest(2, 0)])


def test_a_trimmed_log_starts_at_any_step_and_leaves_out_who_was_fenced_before() -> None:
    assert steps_of([manifest(7, 3), manifest(8, 3)], start=40) == [(7, 3), (8, 3)]
    assert steps_of([manifest(9, 3), manifest(8, 20), manifest(9, 20)], start=40) == [
        (8, 20),
        (9, 20),
    ]
    assert steps_of([begin(5), manifest(9, 40)], start=40) == [(9, 40)]


# ------------------------------------------------------------------------------------ forks
def test_a_rollback_gives_up_what_came_after_and_the_next_step_comes_again() -> None:
    log = [begin(), manifest(1, 0), manifest(2, 0), manifest(3, 0), rollback(0, 1)]
    found = chain_of(log)
    assert [m.step for m in found.manifests] == [1]
    assert [m.step for m in found.given_up] == [2, 3]
    assert (found.step, found.version) == (1, Version(1, 1))
    again = manifest(2, 4, "other", incarnation=1)
    found.observe(5, again)
    assert found.breaks == []
    assert (found.digest_at(2), found.version_at(2)) == ("other", Version(1, 2))
    assert found.lineage == {1: Fork(parent=0, number=1, reason="rollback")}


def test_a_rollback_to_the_start_leaves_the_initial_weights() -> None:
    found = chain_of([begin(), manifest(1, 0), rollback(0, 0)])
    assert (found.step, found.version, found.digest_at(0)) == (0, Version(1, 0), "d0")
    found.observe(3, manifest(1, 2, incarnation=1))
    assert found.breaks == []


def test_after_a_rollback_a_step_of_the_old_incarnation_or_other_weights_breaks_the_chain() -> None:
    log = [begin(), manifest(1, 0), manifest(2, 0), rollback(0, 1)]
    found = chain_of([*log, manifest(2, 3)])
    assert found.breaks == ["step 2 has version 0.2 in incarnation 1"]
    found = chain_of([*log, manifest(2, 3, incarnation=1, before="x")])
    assert found.breaks == ["step 2 starts from x, step 1 ended at d1"]


def test_a_rebuild_goes_on_from_other_weights_of_the_same_step() -> None:
    log = [begin(), manifest(1, 0), manifest(2, 0), begin(), rebuild(0, 2)]
    found = chain_of([*log, manifest(3, 4, incarnation=1, before="e2")])
    assert (found.breaks, found.given_up) == ([], [])
    assert [m.step for m in found.manifests] == [1, 2, 3]
    assert found.rebuilt == {2: "e2"}
    assert (found.digest_at(2), found.version_at(2)) == ("e2", Version(1, 2))
    assert (found.digest_at(1), found.version_at(1)) == ("d1", Version(0, 1))
    assert found.holds(2, Version(1, 2), "e2")
    assert not found.holds(2, Version(0, 2), "d2"), "the parent's checkpoint has other weights"


def test_a_checkpoint_of_a_given_up_step_does_not_count_even_with_equal_weights() -> None:
    log = [begin(), manifest(1, 0), manifest(2, 0), rollback(0, 1), manifest(2, 3, incarnation=1)]
    found = chain_of(log)
    assert found.digest_at(2) == "d2"
    assert found.holds(2, Version(1, 2), "d2")
    assert not found.holds(2, Version(0, 2), "d2")
    assert found.holds(1, Version(0, 1), "d1"), "the way back starts there"


@pytest.mark.parametrize(
    "fork",
    [
        rollback(4, 1, 5),  # of another incarnation
        rollback(0, 9),  # to a step that nobody trained
        rebuild(0, 1),  # not of the last step: another trainer went on meanwhile
    ],
)
def test_a_fork_that_does_not_fit_is_a_plain_begin(fork: Begin) -> None:
    found = chain_of([begin(), manifest(1, 0), manifest(2, 0), fork, manifest(3, 3)])
    assert (found.step, found.incarnation, found.lineage, found.breaks) == (3, 0, {}, [])


def test_of_two_forks_at_once_the_first_counts_and_numbers_are_not_used_again() -> None:
    log = [begin(), manifest(1, 0), manifest(2, 0), rollback(0, 1), rollback(0, 0, 1)]
    found = chain_of(log)
    assert (found.version, found.highest) == (Version(1, 1), 1)
    found.observe(5, rollback(1, 0, 2))
    assert (found.version, list(found.lineage)) == (Version(2, 0), [1, 2])


def test_what_a_state_has_not_seen_comes_in_log_order_given_up_forks_too() -> None:
    log = [
        begin(),  # 0
        manifest(1, 0),
        manifest(2, 0),
        rebuild(0, 2),  # 3, given up
        manifest(3, 3, incarnation=1, before="e2"),
        rollback(1, 1),  # 5
        manifest(2, 5, incarnation=2),
    ]
    found = chain_of(log)
    assert found.breaks == []

    def seen(version: Version) -> list[str]:
        return [
            f"fork {r.epoch}" if isinstance(r, Begin) else str(r.version)
            for r in found.after(version)
        ]

    assert seen(Version(0, 0)) == ["0.1", "fork 3", "fork 5", "2.2"]
    assert seen(Version(0, 1)) == ["fork 3", "fork 5", "2.2"]
    assert seen(Version(2, 2)) == []
    assert found.rebuilt == {}


def test_a_trimmed_log_believes_the_fork_it_starts_with() -> None:
    found = chain_of([rollback(3, 7), manifest(8, 40, incarnation=4)], start=40)
    assert (found.breaks, found.version) == ([], Version(4, 8))
    assert found.digest_at(7) == "d7"
    later = chain_of([manifest(8, 3, incarnation=4), begin(7, 4)], start=40)
    assert (later.breaks, later.version) == ([], Version(4, 8))


# ------------------------------------------------------------------------------------ on a broker
@pytest.fixture
def log(cluster: Cluster) -> Cluster:
    ensure_topics(cluster, {"steps": 1, "policy": 1})
    return cluster


def test_begin_speaks_in_both_topics_and_its_offset_is_the_epoch(log: Cluster) -> None:
    first = StepLog(log)
    assert first.begin(0) == 0
    assert first.append(manifest(1, 0)) == 1
    second = StepLog(log)
    assert second.begin(1) == 2
    spoken: list[PolicyRecord] = [
        decode_as(r.value, PolicyRecord) for r in read_all(log, log.topic("policy"), [0])
    ]
    assert [(type(s), s.epoch) for s in spoken] == [(Begin, 0), (Begin, 2)]
    first.close()
    second.close()


def test_what_was_appended_is_read_again_after_a_step(log: Cluster) -> None:
    steps = StepLog(log)
    epoch = steps.begin(0)
    for step in (1, 2, 3):
        steps.append(manifest(step, epoch))
    assert [m.digest for m in steps.manifests()] == ["d1", "d2", "d3"]
    assert [m.digest for m in steps.manifests(after_step=2)] == ["d3"]
    steps.close()


def test_a_trainer_that_was_stopped_while_another_began_is_fenced_when_it_goes_on(
    log: Cluster,
) -> None:
    stopped, newer = StepLog(log), StepLog(log)
    old = stopped.begin(0)
    stopped.append(manifest(1, old))
    new = newer.begin(0)
    with pytest.raises(Fenced, match=f"began epoch {new}; epoch {old} is fenced"):
        stopped.append(manifest(2, old, "old"))
    newer.append(manifest(2, new, "new"))
    assert [m.digest for m in newer.manifests()] == ["d1", "new"]
    stopped.close()
    newer.close()


def test_a_forking_begin_speaks_in_both_topics_and_fences_the_trainer(log: Cluster) -> None:
    trainer, command = StepLog(log), StepLog(log)
    epoch = trainer.begin(0)
    for step in (1, 2, 3):
        trainer.append(manifest(step, epoch))
    fork = Fork(parent=0, number=1, reason="rollback")
    at = command.begin(0, fork, "d1", ["g"])
    assert (command.chain().version, command.chain().epoch) == (Version(1, 1), at)
    last = read_all(log, log.topic("policy"), [0])[-1]
    spoken: Begin = decode_as(last.value, Begin)
    assert (spoken.epoch, spoken.incarnation, spoken.fork, spoken.digest, spoken.excluded) == (
        at, 1, fork, "d1", ("g",),
    )  # fmt: skip
    with pytest.raises(Fenced):
        trainer.append(manifest(4, epoch))
    newer = StepLog(log)
    epoch = newer.begin(1)
    newer.append(manifest(2, epoch, incarnation=1))
    assert [str(m.version) for m in newer.manifests()] == ["0.1", "1.2"]
    with pytest.raises(Fenced, match="incarnation 0 was left or went on"):
        command.begin(0, fork, "d1")
    for steps in (trainer, command, newer):
        steps.close()


def test_a_step_that_does_not_follow_is_refused_before_it_is_written(log: Cluster) -> None:
    steps = StepLog(log)
    epoch = steps.begin(0)
    steps.append(manifest(1, epoch))
    for wrong in (manifest(1, epoch), manifest(3, epoch), manifest(2, epoch + 7)):
        with pytest.raises(ChainBroken):
            steps.append(wrong)
    steps.append(manifest(2, epoch))
    assert [m.step for m in steps.manifests()] == [1, 2]
    steps.close()


def test_a_checkpoint_ahead_of_the_log_is_refused(log: Cluster) -> None:
    steps = StepLog(log)
    epoch = steps.begin(0)
    steps.append(manifest(1, epoch))
    with pytest.raises(ChainBroken, match="the checkpoint is of step 5"):
        StepLog(log).begin(5)
    steps.close()


def test_foreign_records_in_steps_are_passed_over(log: Cluster) -> None:
    producer = Producer(log)
    for value in (encode({"kind": "note"}), b"\xff"):
        producer.append(log.topic("steps"), 0, value)
    steps = StepLog(log)
    epoch = steps.begin(0)
    assert epoch == 2
    producer.append(log.topic("steps"), 0, b"")
    producer.close()
    assert steps.append(manifest(1, epoch)) == 4
    assert [m.step for m in steps.manifests()] == [1]
    steps.close()
