"""What a policy did for a step, and why groups were dropped: from the ledger into the manifest, and
back into the ledger of the trainer that comes after a crash."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Announcement, Coordinate, Manifest, decode_as, encode
from operators.staleness import policy
from tests.trainer.ledger_world import TOPIC, gid, manifest, v
from tests.trainer.test_ledger import arrive, core_of, ids, publish
from trainer import actions
from trainer.actions import drop_reasons
from trainer.feed_state import ClosedStep, fresh
from trainer.ledger import FeedCore
from trainer.refold import recover
from trainer.step_log import Chain


def over_generating() -> FeedCore:
    """Three are granted, the first two that end are the step; the third is cancelled."""
    subject = policy("over-generate", extra=1)
    return FeedCore(subject, fresh(1), prompts_topic=TOPIC, batch_size=2)


def test_what_is_done_after_a_step_filled_is_the_next_ones_also_over_a_crash() -> None:
    core = over_generating()
    log = [publish(core, 0, [9])]
    arrive(core, 2)
    arrive(core, 0)
    first = core.choose()
    log.append(publish(core, 0, [9]))  # before the first step is trained, let alone announced
    log.append(publish(core, 1, [9]))
    arrive(core, 3, 1)
    arrive(core, 4, 1)
    second = core.choose()
    assert first is not None
    assert second is not None
    done = {"cancels/close/cancelled": 1}
    assert (first.actions, second.actions) == ({}, done)

    said = [(i, a) for i, a in enumerate(log) if a is not None]
    assert [len(a.cancels) for _, a in said] == [0, 1, 0]
    for known, left in (([], done), ([first], done), ([first, second], {})):
        chain = Chain(manifests=[manifest(step) for step in known])
        again = over_generating()
        recover(again, said[: 3 if known else 2], chain)
        assert again.snapshot().actions == left


def dropping() -> tuple[FeedCore, list[tuple[int, Announcement]], ClosedStep]:
    """A step closed, group 1 is dropped ready and groups 2 and 3 while they run, each for a reason
    of its own; their refunds are announced, with grants in their places, and the next step
    closes."""
    core = core_of(n=4, batch_size=1)
    log = [publish(core, 0, [9])]
    arrive(core, 0)
    assert core.choose() is not None
    arrive(core, 1)
    for offset, reason in ((1, "stale"), (2, "no_record"), (3, "filtered")):
        assert core.drop(gid(0, offset), reason)
    log.append(publish(core, 0, [9]))
    arrive(core, 5)
    second = core.choose()
    assert second is not None
    return core, [(i, a) for i, a in enumerate(log) if a is not None], second


REASONS = {gid(0, 1): "stale", gid(0, 2): "no_record", gid(0, 3): "filtered"}


def test_a_manifest_gives_each_drop_its_reason_back() -> None:
    core, said, second = dropping()
    drops = {"drops/stale": 1, "drops/no_record": 1, "drops/filtered": 1}
    assert (second.actions, drop_reasons(manifest(second))) == (drops, REASONS)
    assert core.accounts.counts().dropped_by_reason == Counter(REASONS.values())
    chain = [manifest(core_step) for core_step in (first_step(), second)]
    granting = msgspec.structs.replace(said[1][1], closed=())
    refunding = msgspec.structs.replace(said[1][1], version=v(2))
    for heard in (
        said,
        [said[0], (1, granting), (2, refunding)],
    ):  # the refunds before the manifest that lists them, and after it
        again = core_of(n=4, batch_size=1)
        recover(again, heard, Chain(manifests=chain))
        assert again.snapshot().dropped == {}
        assert again.accounts.counts().dropped_by_reason == Counter(REASONS.values())
        assert again.accounts.counts().dropped == 3


def first_step() -> ClosedStep:
    core = core_of(n=4, batch_size=1)
    publish(core, 0, [9])
    arrive(core, 0)
    step = core.choose()
    assert step is not None
    return step


@given(st.dictionaries(st.text(max_size=3), st.sampled_from(["stale", "filtered", "no_record"])))
def test_the_reasons_of_drops_go_through_a_manifest(dropped: dict[str, str]) -> None:
    said = msgspec.structs.replace(
        manifest(first_step()),
        dropped=actions.listed(dropped),
        metrics=actions.metrics(actions.drops(dropped)),
    )
    assert drop_reasons(decode_as(encode(said), Manifest)) == dropped
    silent = msgspec.structs.replace(said, metrics={})
    assert drop_reasons(silent) == dict.fromkeys(dropped, "stale")


def test_a_drop_that_no_manifest_lists_yet_is_counted_by_the_next_one() -> None:
    _, said, _ = dropping()
    again = core_of(n=4, batch_size=1)
    recover(again, said, Chain(manifests=[manifest(first_step())]))
    for at, offset in enumerate((0, 1, 2)):
        arrive(again, offset, at=at)
    again.arrived(Coordinate(0, 3, 7, gid(0, 3)), v(0), v(0), 1, drop_reason="malformed")
    arrive(again, 5, at=4)
    step = again.choose()
    assert ids(step) == [5]
    assert step is not None
    assert step.actions == {"drops/stale": 2, "drops/malformed": 1}
    assert drop_reasons(manifest(step)) == {
        gid(0, 1): "stale", gid(0, 2): "stale", gid(0, 3): "malformed",
    }  # fmt: skip
    assert again.accounts.audit_counts()["credit_balance"] == 0


@pytest.mark.parametrize("known", [0, 1, 2])
def test_what_was_dropped_while_it_ran_and_then_closed_is_closed_as_it_says(known: int) -> None:
    """Also after a recovery that knows so many of the two manifests; what none of them lists is a
    drop once its terminal was read."""
    core, said, second = dropping()
    if known:
        core = core_of(n=4, batch_size=1)
        recover(core, said, Chain(manifests=[manifest(first_step()), manifest(second)][:known]))
    core.closed(gid(0, 3), "cancelled", at=(0, 9))
    counts = core.accounts.counts()
    assert counts.ended_by_reason == {"cancelled": 1}
    assert counts.closed == 3
    assert sum(counts.dropped_by_reason.values()) == counts.dropped == (0 if known == 1 else 2)
