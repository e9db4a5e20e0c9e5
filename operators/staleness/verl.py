"""`verl-drop` and `verl-wait`: verl's asynchronous trainer (`separate_async`), with either answer
to a group that gets too old.

Admission is the same for both: w + 1 batches at first, then B groups as each step begins (a version
is announced) and one for every group that is evicted or fails. What is outstanding, counted until
weights trained on it are announced, so never exceeds (w + 1) B, and what is missing to that may be
granted. A group is stamped with the step it was admitted in, so its *span* in a later step is the
number of steps it has been around for, the first and the present one included. Sampling waits until
the whole step can be filled, then takes the oldest stamps first.

    verl-drop  finished groups whose span is above T are evicted, each time it looks
    verl-wait  nothing is sampled while a group with a span of at least T is still running

Parameters: `max_off_policy_threshold` T (8; None: no limit), `num_warmup_batches` w (1). Unit:
group.

`verl-drop` is strict with bound T - 1: no token is older than its group's stamp. `verl-wait` is
strict too, but its bound is T + w - 2 (T >= 2, w >= 1), which is T - 1 only at w = 1. Of the
(w + 1) B groups with stamps of version a or before, step a trains B, for it has no others to train.
Before step a + T - 1 nobody waits for the rest, and from then on w steps train them, oldest first.
With T = 1 step a waits itself and the last of them trains w steps later; with w = 0 nothing is
granted ahead, so nothing is stale. At T = 3, w = 4, B = 4 the fifth batch of version 0 trains at
version 4 although T - 1 is 2.

The feed may fill a step before the previous one is announced, which verl never does; a group that
would be stamped too old for the open step as it is granted is then not granted.

Source: verl's `ReplayBuffer` and `PPOTrainerSeparateAsync`. One of our steps is one of its
synchronisation periods.
"""

from __future__ import annotations

from connectors.parameters import Count
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger


class Verl(Stateless):
    """What both share. The stamp is the ledger's `admitted_at`."""

    auditable = True

    def __init__(self, name: str, bound: int | None, num_warmup_batches: int) -> None:
        self.name = name
        self.bound = bound
        self.num_warmup_batches = num_warmup_batches

    def credits(self, state: None, ledger: Ledger) -> int:
        if self.bound is not None and ledger.steps_ahead > self.bound:
            return 0
        places = (self.num_warmup_batches + 1) * ledger.batch_size
        return max(0, places - ledger.num_outstanding)

    def sample(self, ledger: Ledger, evicted: tuple[str, ...]) -> Choice:
        """A whole step's groups, or none yet. Admission order is the order of stamps."""
        left = [g.group_id for g in ledger.ready if g.group_id not in evicted]
        enough = len(left) >= ledger.free_slots
        return Choice(commit=tuple(left[: ledger.free_slots]) if enough else (), drop=evicted)


class VerlDrop(Verl):
    def __init__(self, max_off_policy_threshold: int | None, num_warmup_batches: int) -> None:
        threshold = max_off_policy_threshold
        bound = None if threshold is None else threshold - 1
        super().__init__("verl-drop", bound, num_warmup_batches)

    def choose(self, state: None, ledger: Ledger) -> Choice:
        return self.sample(ledger, self.too_old(ledger, since_grant=True))


class VerlWait(Verl):
    def __init__(self, max_off_policy_threshold: int | None, num_warmup_batches: int) -> None:
        self.threshold = max_off_policy_threshold
        bound = _bound_of_waiting(max_off_policy_threshold, num_warmup_batches)
        super().__init__("verl-wait", bound, num_warmup_batches)

    def choose(self, state: None, ledger: Ledger) -> Choice:
        late = self.too_old(ledger)
        spans = (ledger.age_since_grant(group) + 1 for group in ledger.running)
        if self.threshold is not None and any(span >= self.threshold for span in spans):
            return Choice(drop=late)
        return self.sample(ledger, late)


def _bound_of_waiting(threshold: int | None, num_warmup_batches: int) -> int | None:
    if num_warmup_batches == 0:
        return 0
    if threshold is None:
        return None
    return num_warmup_batches if threshold == 1 else threshold + num_warmup_batches - 2


_PARAMETERS = {
    "max_off_policy_threshold": Count(default=8, least=1, optional=True, most=MOST_STEPS),
    "num_warmup_batches": Count(default=1, most=MOST_STEPS),
}

PRESETS = {
    "verl-drop": Preset(build=VerlDrop, parameters=_PARAMETERS),
    "verl-wait": Preset(build=VerlWait, parameters=_PARAMETERS),
}
