"""A policy that cannot go on: nothing runs, what is ready is not committed, nothing may be granted,
and all that was trained is announced. Nothing that happens by itself ends that, so it is said.

    FeedCore ──▶ stalled? ──(for STALL_S)──▶ log, once; RUN/stall.txt, until it is over
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from connectors.files import replace_file
from connectors.run_dir import RunDir
from operators.staleness.printed import ledger_text
from trainer.ledger import FeedCore

log = logging.getLogger(__name__)

STALL_S: Final = 10.0
"""Longer than the engines' load is asked for: a policy may wait for that."""
LOOK_S: Final = 1.0


def is_stalled(core: FeedCore) -> bool:
    """Whether only something from outside, or another policy, can bring the run on. A policy that
    is asked nothing holds up nobody: then live traffic is waited for."""
    waits = not core.batch_size or core.published != core.version or core.num_running()
    if waits or core.credits() > 0:
        return False
    choice = core.policy.choose(core.policy_state, core.ledger())
    return not choice.commit and not choice.drop


def stall_text(core: FeedCore) -> str:
    """What there is to know of it."""
    return (
        f"stalled: {core.policy.name} neither commits a group to step {core.version.number + 1} "
        "nor grants one, and nothing runs that could change that ([staleness] is fixed for a run: "
        "start another one with other parameters)\n"
        + ledger_text(core.policy, core.policy_state, core.ledger())
    )


class StallWatch:
    """Looks at the ledger about every LOOK_S. `report` hears the text of a stall that has lasted
    `after_s`, and None when it is over."""

    def __init__(
        self,
        report: Callable[[str | None], None],
        *,
        after_s: float = STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._after_s, self._clock = report, after_s, clock
        self._looked_at = self._since = float("-inf")
        self._stalled = self._reported = False

    def look(self, core: FeedCore, *, busy: bool) -> None:
        """`busy`: a full step waits for the trainer, or nothing has been announced yet."""
        now = self._clock()
        if now - self._looked_at < min(LOOK_S, self._after_s):
            return
        self._looked_at = now
        stalled = not busy and is_stalled(core)
        if stalled and not self._stalled:
            self._since = now
        self._stalled = stalled
        if stalled and not self._reported and now - self._since >= self._after_s:
            self._reported = True
            text = stall_text(core)
            log.error("%s", text)
            self._report(text)
        elif self._reported and not stalled:
            self._reported = False
            log.info("the stall is over")
            self._report(None)


def keep(run_dir: RunDir, text: str | None) -> None:
    """RUN/stall.txt as long as there is a stall."""
    if text is None:
        run_dir.stall_file.unlink(missing_ok=True)
    else:
        replace_file(run_dir.stall_file, f"{text}\n".encode())


def kept(run_dir: RunDir) -> str | None:
    """What `keep` left."""
    try:
        return run_dir.stall_file.read_text().rstrip("\n")
    except FileNotFoundError:
        return None
