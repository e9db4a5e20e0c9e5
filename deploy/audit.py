"""`headwater audit`: proves from the log alone that nothing was lost, doubled or trained too late.

`audit(History)` is pure and takes nothing from the trainer's own books. It reads the topics in the
order the feed folds them, each once (`steps` twice): a manifest before the announcements of its
version, and of `trajectories` only as far as the manifest at hand names records. Of a run that was
rolled back, the steps given up settle nothing; they are counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain as chained

from connectors.records import Announcement, Begin, Manifest
from deploy.auditor import Auditor
from deploy.base import Survey, counted, surveyed
from deploy.findings import Audit, History

Event = Begin | Manifest | tuple[int, Announcement]


def audit(history: History) -> Audit:
    """Checks every invariant of what `history` holds."""
    survey = surveyed(history.steps)
    auditor = Auditor(history, survey)
    for event in _in_order(history, survey, auditor.found):
        if isinstance(event, Begin):
            auditor.fork(event)
        elif isinstance(event, Manifest):
            auditor.step(event)
        else:
            auditor.announce(*event)
    return auditor.finish()


def _in_order(history: History, survey: Survey, found: Audit) -> Iterator[Event]:
    """Both topics as one: a fork before all of its epoch, a manifest after every announcement of
    lower versions, for those granted what it trains."""
    base = history.base
    steps = (
        step for step in counted(history.steps, survey) if base is None or not base.holds(step)
    )
    waiting = next(steps, None)
    for offset, said in _valid(history, found):
        while waiting is not None and _comes_before(waiting, said):
            yield waiting
            waiting = next(steps, None)
        yield offset, said
    yield from chained(() if waiting is None else (waiting,), steps)


def _valid(history: History, found: Audit) -> Iterator[tuple[int, Announcement]]:
    """The announcements of no fenced trainer, from where the kept log begins."""
    epoch, first = -1, 0
    if history.base is not None:
        epoch, first = history.base.feed.epoch, history.base.feed.policy_offset
    for offset, said in history.policy:
        if isinstance(said, Begin):
            epoch = max(epoch, -1 if said.epoch is None else said.epoch)
        elif offset >= first and said.epoch >= epoch:
            if said.epoch > epoch:
                found.chain_breaks.append(
                    f"policy/{offset} announces in epoch {said.epoch}, which never began"
                )
                epoch = said.epoch
            yield offset, said
        else:
            found.num_void += offset >= first


def _comes_before(step: Begin | Manifest, said: Announcement) -> bool:
    if isinstance(step, Begin):
        return (step.epoch or 0) <= said.epoch
    return (step.epoch, step.version) <= (said.epoch, said.version)
