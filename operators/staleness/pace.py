"""`lookahead = "auto"`: how far ahead to grant, from what each step's filling says.

Step s trains after step s - 1; step s - 2's weights are announced while step s - 1 trains. So when
the last group of step s is committed, the announced version tells how early that was:

  weights of step s - 1 announced       the trainer stands still: starved
  weights of step s - 2 announced       in time
  not even those: they are on their     early: full as soon as it could begin to fill, a whole step
  way to the engines                    before the trainer wants it; slots idle

A group of step s was granted when step s - 1 - L was announced. With L one less it is granted one
step later, and so ready one step later: just in time for a step that filled early. That is why
early steps lower L and starved ones raise it, and why the two do not chase each other while steps
take their time evenly. One slow group proves nothing, and a change shows only in groups granted
after it, so both wait for several steps of the same kind, and for L + 1 steps after a change. While
engines have requests queued, granting more makes nothing faster: L stays.

Where weights are announced before the trainer takes its next step (training that waits for its
publish), no step looks early, and L is only raised.
"""

from __future__ import annotations

from typing import Final

import msgspec

from operators.staleness.types import Announced, Committed, EngineLoad, Event

STARVED_STEPS: Final = 2
"""In a row, before L is raised: a trainer that waits is what costs most."""
EARLY_STEPS: Final = 8
"""In a row, before L is lowered."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """lookahead    L
    next_step    that the announced version is trained by
    step         that committed last; `starved`, `early`: as of its last commit
    num_starved, num_early
                 steps before it in a row
    num_settling steps still to close before L is judged
    queued       engines had requests queued when they were last heard of
    """

    lookahead: int
    next_step: int = 0
    step: int = 0
    starved: bool = False
    early: bool = False
    num_starved: int = 0
    num_early: int = 0
    num_settling: int = 0
    queued: bool = False


def started(lookahead: int) -> Pace:
    """The first steps always starve."""
    return Pace(lookahead=lookahead, num_settling=lookahead + 1)


def paced(pace: Pace, event: Event, *, least: int, most: int) -> Pace:
    """The pace after `event`; L stays between `least` and `most`."""
    match event:
        case Announced(version=version):
            return msgspec.structs.replace(pace, next_step=version.number + 1)
        case EngineLoad(num_queued=num_queued):
            return msgspec.structs.replace(pace, queued=num_queued > 0)
        case Committed(step=step):
            if step != pace.step and pace.step:
                pace = _judged(pace, least, most)
            return msgspec.structs.replace(
                pace, step=step, starved=pace.next_step >= step, early=pace.next_step < step - 1
            )
        case _:
            return pace


def _judged(pace: Pace, least: int, most: int) -> Pace:
    """After the step that committed last turned out to be full."""
    if pace.num_settling:
        return msgspec.structs.replace(pace, num_settling=pace.num_settling - 1)
    num_starved = pace.num_starved + 1 if pace.starved else 0
    num_early = pace.num_early + 1 if pace.early else 0
    lookahead = min(max(pace.lookahead, least), most)
    if num_starved >= STARVED_STEPS and not pace.queued:
        lookahead = min(lookahead + 1, most)
    elif num_early >= EARLY_STEPS:
        lookahead = max(lookahead - 1, least)
    if lookahead == pace.lookahead:
        return msgspec.structs.replace(pace, num_starved=num_starved, num_early=num_early)
    return msgspec.structs.replace(
        pace, lookahead=lookahead, num_starved=0, num_early=0, num_settling=lookahead + 1
    )
