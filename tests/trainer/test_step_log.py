"""Who may write steps, by position in the log: the chain as a pure function, and on a broker."""

from __future__ import annotations

import pytest

from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.topics import ensure_topics
from connectors.records import Begin, Manifest, PolicyRecord, StepRecord, Version, decode_as, encode
from trainer.step_log import ChainBroken, Fenced, StepLog, chain


def begin(resumed_step: int = 0) -> Begin:
    return Begin(epoch=None, writer="test", resumed_step=resumed_step, started_at=0.0)


def manifest(step: int, epoch: int, digest: str | None = None) -> Manifest:
    return Manifest(
        step=step,
        epoch=epoch,
        version=Version(0, step),
        records=(),
        micro_batches=(),
        seed=0,
        digest_before=f"d{step - 1}",
        digest=digest or f"d{step}",
    )


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


def test_a_foreign_record_in_steps_is_an_error_not_a_step(log: Cluster) -> None:
    producer = Producer(log)
    producer.append(log.topic("steps"), 0, encode({"kind": "note"}))
    producer.close()
    steps = StepLog(log)
    with pytest.raises(ValueError, match="note"):
        steps.begin(0)
    steps.close()
