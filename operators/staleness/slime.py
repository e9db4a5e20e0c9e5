"""`slime`: two counts that are checked apart (slime's fully asynchronous rollout).

A group starts while fewer than C are being generated and fewer than C finished ones wait; nothing
counts both, so up to 2C - 1 may be on their way. A finished group frees its place at once. Nothing
is cancelled, and what waits is trained in the order it finished.

C is the newer rule's: `sglang_server_concurrency` (512) * `num_engines` / `n_samples_per_prompt` *
`fully_async_group_prefetch_factor` (1), in groups: those that fill the engines' budgets. The older
rule did not divide: it is this one at a factor of `n_samples_per_prompt`. A run gives `num_engines`
and `n_samples_per_prompt`. Unit: group.

Not strict, nothing bounds staleness: a group that takes k steps keeps one place of C, the others
fill the steps, and it trains k versions old. slime logs versions and compares none. It puts a group
that a weight update aborted back into its buffer; here the rollout stage starts it again in place.

Source: slime's fully asynchronous rollout example.
"""

from __future__ import annotations

import math

from connectors.parameters import Count, Number
from operators.staleness.preset import MOST_COUNT, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Ledger


class Slime(Stateless):
    name = "slime"

    def __init__(
        self,
        sglang_server_concurrency: int,
        num_engines: int,
        n_samples_per_prompt: int,
        fully_async_group_prefetch_factor: float,
    ) -> None:
        budgets = sglang_server_concurrency * num_engines
        # Admission goes on while a count is below the threshold, so it ends at the next integer.
        # Multiplied first: 100 / 11 * 11 is above 100.
        self.most = math.ceil(budgets * fully_async_group_prefetch_factor / n_samples_per_prompt)

    def credits(self, state: None, ledger: Ledger) -> int:
        if len(ledger.ready) >= self.most:
            return 0
        return max(0, self.most - len(ledger.running))


PRESETS = {
    "slime": Preset(
        build=Slime,
        parameters={
            "sglang_server_concurrency": Count(default=512, least=1),
            "num_engines": Count(least=1),
            "n_samples_per_prompt": Count(least=1),
            "fully_async_group_prefetch_factor": Number(default=1, most=MOST_COUNT, above=True),
        },
        from_run={
            "num_engines": lambda shape: shape.num_engines,
            "n_samples_per_prompt": lambda shape: shape.group_size,
        },
        fixed=("n_samples_per_prompt",),
    )
}
