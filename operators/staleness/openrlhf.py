"""`openrlhf`: whole batches pass through a queue of N places (OpenRLHF's asynchronous PPO trainer).

There are N tokens. One generator takes a token, generates a batch, waits until all of it is
finished, and queues it; only then does it look for the next token. The trainer returns a token as
it takes a batch out, before it trains on it. Batches are trained in the order they were generated.
Taken out is here the batch whose step is full and is the next to be announced; one that the feed
filled after it still waits in the queue.

Parameters: `async_queue_size` N (1), `partial_rollout_enable` (False), which decides whether new
weights wait until the batch in generation is finished. Publishing is not the policy's to hold back,
so both values grant and train the same here, as OpenRLHF does with True: a batch may go on under
newer weights, which only makes its tokens fresher. Unit: batch.

Strict with bound N, though OpenRLHF compares no versions: when a batch is started, at most N - 1
batches wait and one is being trained, nothing can overtake it, so at most N steps pass until it is
trained itself.

A batch is granted as a whole, so a group that failed cannot be replaced alone: what is left of its
batch is filled up from the next one. With N = 1 that one starts only when the trainer has run out
of work, for before that a whole batch more could break the bound. Generation and training then take
turns until failures have used up what the batch left over.

Source: OpenRLHF's `PPOTrainerAsync`.
"""

from __future__ import annotations

from itertools import takewhile

from connectors.parameters import Count, Flag
from operators.staleness.preset import MOST_STEPS, Preset
from operators.staleness.stateless import Stateless
from operators.staleness.types import Choice, Ledger, Unit


class OpenRlhf(Stateless):
    name = "openrlhf"
    unit: Unit = "batch"

    def __init__(self, async_queue_size: int, partial_rollout_enable: bool) -> None:
        self.async_queue_size = async_queue_size
        self.bound = async_queue_size

    def credits(self, state: None, ledger: Ledger) -> int:
        num_in_training = min(ledger.num_unpublished, ledger.batch_size)
        num_queued = ledger.num_outstanding - num_in_training
        has_token = num_queued <= (self.async_queue_size - 1) * ledger.batch_size
        starved = ledger.num_outstanding < ledger.batch_size
        return 1 if not ledger.running and (has_token or starved) else 0

    def choose(self, state: None, ledger: Ledger) -> Choice:
        late = self.too_old(ledger)
        left = [group for group in ledger.groups if group.group_id not in late]
        queued = takewhile(lambda group: group.state != "running", left)
        commit = [group.group_id for group in queued][: ledger.free_slots]
        return Choice(commit=tuple(commit), drop=late)


PRESETS = {
    "openrlhf": Preset(
        build=OpenRlhf,
        parameters={
            "async_queue_size": Count(default=1, least=1, most=MOST_STEPS),
            "partial_rollout_enable": Flag(default=False),
        },
    )
}
