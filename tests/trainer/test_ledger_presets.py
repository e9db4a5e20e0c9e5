"""Every preset drives the ledger, whatever arrives when and whoever dies: the books balance, strict
ones keep their bound, none stalls while there are prompts."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from connectors.records import Announcement
from tests.trainer.ledger_acts import act
from tests.trainer.ledger_world import World
from tests.trainer.presets import CASES, Case
from trainer.feed_state import fresh
from trainer.ledger import FeedCore
from trainer.refold import recover


def run(
    case: Case, seed: int, *, batch_size: int | None = None, with_rollbacks: bool = False
) -> World:
    """The world asserts the bound at every step, and in `drain` that the run goes on."""
    chance = random.Random(seed)
    world = case.world(batch_size or chance.randint(1, 3), chance.randint(1, 2))
    world.ends[0] += 60
    for _ in range(300):
        act(world, chance, with_rollbacks=with_rollbacks)
        world.check()
    return world


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_preset_drives_the_feed_through_crashes_and_rollbacks(case: Case) -> None:
    for seed in range(3):
        world = run(case, seed, with_rollbacks=seed == 2)
        world.drain()
        assert world.chain.step >= 3


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deadline-1-1-drop", "close"),
        ("roll-1.5-True", "close"),
        ("prime-rl-1", "close"),
        ("nemo-windowed-1", "close"),
        ("psrl-roc-2-truncate", "close"),
        ("over-generate-close", "close"),
        ("over-generate-requeue", "requeue"),
        ("psrl-roc-2-retry", "requeue"),
        ("dressage-2-1", "requeue"),
        ("deadline-1-1-mask", "mask"),
    ],
)
def test_what_a_preset_is_known_for_happens_in_these_runs(name: str, what: str) -> None:
    """Cancels that a running group obeyed, and masked versions."""
    case = next(case for case in CASES if str(case) == name)
    for seed in range(30):
        world = run(case, seed)
        done = world.num_masked if what == "mask" else world.num_cancelled[what]
        said = [c for a in world.policy_log if isinstance(a, Announcement) for c in a.cancels]
        if done and (what == "mask" or any(c.then == what for c in said)):
            return
    pytest.fail(f"{name} never did {what}")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_log_gives_back_the_ledger_and_an_auditable_policys_state(case: Case) -> None:
    """From the very beginning, at a batch size of one: no step is partly filled when it ends."""
    num_compared = 0
    for seed in range(4):
        world = run(case, seed, batch_size=1)
        while world.steps:
            world.train()
        if world.core.accounts.refunded:  # what no announcement counts yet is done again
            continue
        num_compared += 1
        again = world.core_from(fresh(len(world.ends)))
        said = [(i, a) for i, a in enumerate(world.policy_log) if isinstance(a, Announcement)]
        recover(again, said, world.chain)
        live, world.core = world.core, again
        for partition, read in enumerate(live.read):
            world.read(partition, read)
        assert opened(again) == opened(live)
        assert again.accounts.cancelled == live.accounts.cancelled
        if live.policy.auditable:
            assert state(again) == state(live)
    assert num_compared


def opened(core: FeedCore) -> dict[str, Any]:
    return {
        g: (e.oldest, e.newest, e.admitted_at, e.coordinate) for g, e in core.accounts.open.items()
    }


def state(core: FeedCore) -> Any:
    return msgspec.to_builtins(core.policy_state)
