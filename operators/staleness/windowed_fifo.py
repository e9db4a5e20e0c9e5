"""`windowed-fifo`: first in, first out, but for a window (MiniMax Forge; torchtitan).

S + 1 batches of P groups may be outstanding, each group until weights trained on it are announced.
The window is W positions of the admission order, anchored at the oldest group that no step has
taken: a step takes the oldest finished groups within it. Taking one does not move the window, so at
most W - 1 younger groups overtake a slow one; then the trainer waits for it.

Strict, bound (buffer + W - 2) // P with buffer = (S + 1) P, which is S + ceil((W - 1) / P): of the
groups outstanding when a group is granted at most buffer - 1 train before it, and W - 1 younger
ones. It drops nothing: a group that is too old all the same (a rollback, a smaller S) is.

Parameters: `target_offpolicy_steps` S (3), `num_prompts_per_train_step` P (8; in a run its batch
size), `window_size` W in groups (None: 0.3 of the buffer, Forge's own share; 1 is strict FIFO).
Unit: group.

Source: torchtitan's RL controller.
"""

from __future__ import annotations

from collections.abc import Sequence

from connectors.parameters import Count
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger, OpenGroup


class WindowedFifo(Stateless):
    name = "windowed-fifo"
    auditable = True

    def __init__(
        self,
        target_offpolicy_steps: int,
        num_prompts_per_train_step: int,
        window_size: int | None,
    ) -> None:
        self.buffer = (target_offpolicy_steps + 1) * num_prompts_per_train_step
        # in integers: 0.3 * 10 is less than 3
        self.window = window_size or max(1, 3 * self.buffer // 10)
        self.bound = (self.buffer + self.window - 2) // num_prompts_per_train_step

    def credits(self, state: None, ledger: Ledger) -> int:
        return max(0, self.buffer - ledger.num_outstanding)

    def choose(self, state: None, ledger: Ledger) -> Choice:
        late = self.too_old(ledger)
        left = [g for g in ledger.groups if g.group_id not in late]
        commit: list[str] = []
        while len(commit) < ledger.free_slots and (taken := self._oldest(left)):
            commit.append(taken.group_id)
            left.remove(taken)
        return Choice(commit=tuple(commit), drop=late)

    def _oldest(self, left: Sequence[OpenGroup]) -> OpenGroup | None:
        """Finished group of the window over what no step has taken."""
        inside = (g for g in left if g.order < left[0].order + self.window)
        return next((g for g in inside if g.state != "running"), None)


PRESETS = {
    "windowed-fifo": Preset(
        build=WindowedFifo,
        parameters={
            "target_offpolicy_steps": Count(3, most=MOST_STEPS),
            "num_prompts_per_train_step": Count(8, least=1),
            "window_size": Count(None, least=1, optional=True),
        },
        from_run={"num_prompts_per_train_step": lambda shape: shape.batch_size},
        fixed=("num_prompts_per_train_step",),
    )
}
