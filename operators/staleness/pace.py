"""`lookahead = "auto"`: how far ahead to grant, from what each step's filling says.

Step s trains after step s - 1; step s - 2's weights are announced while step s - 1 trains. So when
the last group of step s is committed, the announced version tells how early that was:

  weights of step s - 1 announced       the trainer stands still: starved, unless groups were ready
                                        then and held for older ones, which more grants do not end
  weights of step s - 2 announced       in time
  not even those: they are on their     early: full as soon as it could begin to fill, a whole step
  way to the engines                    before the trainer wants it; slots idle

A group of step s was granted when step s - 1 - L was announced. With L one less it is granted one
step later, and so ready one step later: just in time for a step that filled early. That is why
early steps lower L and starved ones raise it, and why the two do not chase each other while steps
take their time evenly.

Steps are judged by windows of 2(L + 1): groups granted together make L + 1 steps, of which only the
first need starve, so two starved steps in a window raise L; a window of nothing but early ones
lowers it. After a change, L + 1 steps still train groups granted before it and are not judged.
While engines have requests queued, granting more makes nothing faster: L is not raised.

Where weights are announced before the trainer takes its next step (training that waits for its
publish), no step looks early, and L is only raised.
"""

from __future__ import annotations

from typing import Final

import msgspec

from operators.staleness.types import (
    Announced,
    Arrived,
    Closed,
    Committed,
    EngineLoad,
    Event,
)

STARVED_STEPS: Final = 2


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """lookahead    L
    ready        groups that arrived and were not committed
    next_step    that the announced version is trained by; `held`: groups were ready when it was
                 announced
    step         that committed last; `starved`, `early`: as of its last commit
    num_judged   steps before it in this window, of them num_starved and num_early; negative while
                 steps are not judged
    queued       engines had requests queued when they were last heard of
    """

    lookahead: int
    ready: dict[str, None] = {}
    next_step: int = 0
    held: bool = False
    step: int = 0
    starved: bool = False
    early: bool = False
    num_judged: int = 0
    num_starved: int = 0
    num_early: int = 0
    queued: bool = False


def started(lookahead: int) -> Pace:
    """The first steps always starve: they are not judged."""
    return Pace(lookahead=lookahead, num_judged=-(lookahead + 1))


def paced(pace: Pace, event: Event, *, least: int, most: int) -> Pace:
    """The pace after `event`; L stays between `least` and `most`."""
    match event:
        case Arrived(group_id=group_id):
            return msgspec.structs.replace(pace, ready={**pace.ready, group_id: None})
        case Closed(group_id=group_id) if group_id in pace.ready:
            return msgspec.structs.replace(pace, ready=_without(pace.ready, group_id))
        case Announced(version=version):
            return msgspec.structs.replace(
                pace, next_step=version.number + 1, held=bool(pace.ready)
            )
        case EngineLoad(num_queued=num_queued) if pace.queued != (num_queued > 0):
            return msgspec.structs.replace(pace, queued=num_queued > 0)
        case Committed(group_id=group_id, step=step):
            if step != pace.step and pace.step:
                pace = _judged(pace, least, most)
            return msgspec.structs.replace(
                pace,
                ready=_without(pace.ready, group_id),
                step=step,
                starved=pace.next_step >= step and not pace.held,
                early=pace.next_step < step - 1,
            )
        case _:
            return pace


def _without(ready: dict[str, None], group_id: str) -> dict[str, None]:
    return {known: None for known in ready if known != group_id}


def _judged(pace: Pace, least: int, most: int) -> Pace:
    """After the step that committed last turned out to be full."""
    lookahead = min(max(pace.lookahead, least), most)
    judged = pace.num_judged + 1
    if judged <= 0:
        return msgspec.structs.replace(pace, num_judged=judged)
    starved, early = pace.num_starved + pace.starved, pace.num_early + pace.early
    is_over = judged >= 2 * (lookahead + 1)
    wanted = lookahead
    if starved >= STARVED_STEPS and not pace.queued:
        wanted = min(lookahead + 1, most)
    elif is_over and early == judged:
        wanted = max(lookahead - 1, least)
    if wanted != pace.lookahead:
        judged, starved, early = -(wanted + 1), 0, 0
    elif is_over:
        judged, starved, early = 0, 0, 0
    return msgspec.structs.replace(
        pace, lookahead=wanted, num_judged=judged, num_starved=starved, num_early=early
    )
