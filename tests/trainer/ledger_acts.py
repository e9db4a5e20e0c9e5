"""What can happen in a simulated run, one thing at a time."""

from __future__ import annotations

import random

from connectors.records import parse_group_id
from operators.staleness.types import EngineLoad
from tests.trainer.ledger_world import World, group_of


def act(world: World, chance: random.Random, *, with_rollbacks: bool) -> None:
    """One thing happens somewhere."""
    name = chance.choice(
        ["prompts"]
        + ["announce", "start", "end", "read", "choose", "train"] * 10
        + ["obey"] * 5
        + ["load", "second terminal", "crash", "crash after announcing", "rebuild"]
        + ["rollback"] * with_rollbacks
    )
    if name == "prompts":  # partition 2, where there is one, stays idle
        world.ends[chance.randrange(min(2, len(world.ends)))] += chance.randint(1, 12)
    elif name == "announce":
        world.announce(publish=chance.random() < 0.5)
    elif name == "start":
        waiting = world.waiting()
        for group_id in chance.sample(waiting, min(4, len(waiting))):
            world.start(group_id, chance)
    elif name == "end":
        slow = chance.random() < 0.1  # every fourth prompt takes long
        running = [g for g in world.running() if slow or parse_group_id(g).offset % 4]
        for group_id in chance.sample(running, min(4, len(running))):
            reason = chance.choice([None, None, None, "reward_failed", "malformed"])
            world.end(group_id, reason, chance)
    elif name == "obey":
        world.obey()
    elif name == "load":
        load = EngineLoad(chance.randint(0, 9), chance.randint(0, 9), chance.random())
        world.core.loaded(load)
    elif name == "second terminal" and any(world.trajectories):
        log = chance.choice([log for log in world.trajectories if log])
        world.end(group_of(chance.choice(log)), chance.choice([None, "reward_timeout"]))
    elif name == "read":
        world.read(chance.randrange(len(world.ends)), chance.randint(1, 20))
    elif name == "choose":
        world.choose()
    elif name == "train" and world.steps:
        world.train()
        if chance.random() < 0.4:
            world.checkpoints.append(world.snapshots[world.chain.step])
    elif name == "crash":
        crash(world, chance)
    elif name == "crash after announcing":
        world.announce(publish=chance.random() < 0.5, apply=False)
        crash(world, chance)
    elif name == "rebuild" and world.chain.step:
        world.rebuild()
    elif name == "rollback":
        roll_back(world, chance)


def roll_back(world: World, chance: random.Random) -> None:
    step = world.chain.step
    groups = sorted(world.min_version)
    excluded = chance.sample(groups, chance.randint(0, min(3, len(groups))))
    if chance.random() < 0.5:
        world.announce(publish=False, apply=False)
    world.rollback(max(0, step - chance.randint(0, 4)), tuple(excluded))
    world.excluded -= {r.group_id for m in world.chain.manifests for r in m.records}


def crash(world: World, chance: random.Random) -> None:
    """Whatever the trainer had in memory is lost; so are its newest checkpoints, now and then."""
    world.restart(chance.randrange(3))
