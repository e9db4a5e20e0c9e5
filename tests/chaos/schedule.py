"""What a chaos run does to a run, and when: drawn from a seed alone, so a failure comes again.

kill                 SIGKILL to one role, or to two at once; `run` is `headwater run` itself
stop                 SIGSTOP, and SIGCONT some seconds later
zombie               the trainer stopped, another started, the first woken: it must be fenced
restart              SIGTERM
drop, delay, stall, refuse     the network between clients and servers (`proxy`)
disk_full            a role's files cannot grow for some seconds
torn_tail            the broker killed in the middle of a write: bytes behind the last record
damaged_checkpoint   the newest checkpoint damaged while the trainer is down
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final, Literal, get_args

from tests.chaos.proxy import DIRECTIONS

Kind = Literal[
    "kill", "stop", "zombie", "restart", "drop", "delay", "stall", "refuse", "disk_full",
    "torn_tail", "damaged_checkpoint",
]  # fmt: skip
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
NETWORK: Final[tuple[Kind, ...]] = ("drop", "delay", "stall", "refuse")

ROLES: Final = ("broker", "dataflow", "feeder", "trainer", "evaluate", "run")
"""Besides the engines."""
TOPICS: Final = ("prompts", "rollouts", "trajectories", "policy", "steps")
WRITERS: Final = ("broker", "trainer", "dataflow", "run")
"""What writes below a run's folder."""

FULL_STEPS: Final = 40
SHORT_STEPS: Final = 8

Victims = tuple[str, ...]

SHORT: Final[tuple[tuple[tuple[Victims, ...], tuple[tuple[Kind, Victims], ...]], ...]] = (
    (
        (("broker",), ("feeder",), ("broker", "feeder"), ("broker",)),
        (("zombie", ()),),
    ),
    (
        (("engine-0",), ("broker",), ("feeder",), ("broker", "feeder")),
        (("drop", ()), ("delay", ()), ("stall", ()), ("refuse", ())),
    ),
    (
        (("broker",), ("feeder",), ("dataflow", "broker"), ("feeder",)),
        (("disk_full", ("broker",)), ("disk_full", ("trainer",)), ("disk_full", ("run",))),
    ),
    (
        (("trainer", "engine-0"), ("broker",), ("feeder",)),
        (("torn_tail", ()), ("damaged_checkpoint", ())),
    ),
    (
        (("run", "broker"), ("feeder",), ("broker", "feeder")),
        (("stop", ("dataflow",)), ("stop", ("broker",)), ("restart", ("feeder",))),
    ),
)
"""(Who is killed, what else happens) in a short run; five in a row have everything. Starting a role
takes seconds of a processor: those that start fast die most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Due `delay_s` after `after_steps` more steps were trained than at the event before it.
    `seconds`: how long it lasts, while the next may begin. `how` says what is torn or damaged in
    which way and which direction stalls; `topic`: whose log."""

    kind: Kind
    victims: Victims = ()
    after_steps: int = 1
    delay_s: float = 0.0
    seconds: float = 0.0
    how: str = ""
    topic: str = ""

    def __str__(self) -> str:
        what = " ".join(filter(None, (self.kind, "+".join(self.victims), self.topic, self.how)))
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{what}{lasts}, {self.after_steps} steps and {self.delay_s:g} s later"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`roles` may be killed; the run has no others. `proxied`: what stands behind a proxy, started
    by the suite instead of the run. `trims`: the log is cut off below the oldest kept
    checkpoint."""

    seed: int
    steps: int
    trims: bool
    roles: tuple[str, ...]
    proxied: frozenset[Literal["broker", "engines"]]
    events: tuple[Event, ...]

    @property
    def engines(self) -> list[str]:
        return [role for role in self.roles if role.startswith("engine")]


def schedule(seed: int, *, short: bool = False) -> Schedule:
    """The chaos run of `seed`. A full one kills every role at least once, and at least ten times
    in all, three of them two at once; a short one kills five times."""
    rng = random.Random(f"chaos {seed} {short}")
    proxied: list[Literal["broker", "engines"]]
    if short:
        num_engines, roles = 1, ["engine-0", *(role for role in ROLES if role != "evaluate")]
        killed, others = SHORT[seed % len(SHORT)]
        network = any(kind in NETWORK for kind, _ in others)
        proxied = ["broker", "engines"] if network else []
    else:
        num_engines = rng.choice((1, 2))
        roles = [*(f"engine-{i}" for i in range(num_engines)), *ROLES]
        proxied = rng.choice([["broker"], ["broker", "engines"], ["engines"], []])
        num_network = 2 if proxied else 0
        pairs = [tuple(rng.sample(roles, 2)) for _ in range(3)]
        killed = (*((role,) for role in roles), *pairs)
        kinds: tuple[Kind, ...] = (
            "zombie", "disk_full", "torn_tail", "damaged_checkpoint", "restart",
            *(["stop"] * (3 - num_network)), *rng.sample(NETWORK, num_network),
        )  # fmt: skip
        others = tuple((kind, ()) for kind in kinds)
    events = [_event(rng, "kill", roles, victims) for victims in killed]
    events += [_event(rng, kind, roles, victims) for kind, victims in others]
    rng.shuffle(events)
    return Schedule(
        seed=seed,
        steps=SHORT_STEPS if short else FULL_STEPS,
        trims=rng.choice((True, False)),
        roles=tuple(roles),
        proxied=frozenset(proxied),
        events=tuple(events),
    )


def _event(rng: random.Random, kind: Kind, roles: list[str], victims: Victims) -> Event:
    seconds = 0.0
    how = topic = ""
    if kind in ("stop", "restart") and not victims:
        victims = (rng.choice(roles),)
    if kind == "disk_full" and not victims:
        victims = (rng.choice(WRITERS),)
    if kind in ("torn_tail", "disk_full"):
        topic = rng.choice(TOPICS)
    if kind in ("stop", "delay", "stall", "refuse", "disk_full"):
        seconds = round(rng.uniform(1.5, 4.0), 1)
    if kind == "torn_tail":
        how = rng.choice(("garbage", "half a batch"))
    if kind == "damaged_checkpoint":
        how = rng.choice(("a flipped bit", "cut short", "a file gone"))
    if kind == "stall":
        how = rng.choice(DIRECTIONS)
    return Event(
        kind=kind,
        victims=victims,
        # Often at once: what comes back is then hit while it starts.
        after_steps=rng.choice((0, 0, 1, 2)),
        delay_s=round(rng.uniform(0.0, 1.0), 2),
        seconds=seconds,
        how=how,
        topic=topic,
    )
