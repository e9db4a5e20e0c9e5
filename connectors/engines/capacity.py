"""How much one engine is given: a limit on the samples a pool has in flight there.

    starts at            what the engine decodes together (max_running): only experience takes away
    cut by a quarter     when its KV cache is full or requests queue there, but not again before
                         the last cut has taken effect (requests end when they end)
    raised a little      while there is room, and only if the pool uses what it may: what was not
                         tried proves nothing

Additive increase and multiplicative decrease (Chiu and Jain, 1989): pools that share an engine -
rollouts, evaluation, other processes - do not know of each other, see the same queue and the same
cache, and come to equal shares.
"""

from __future__ import annotations

from typing import Final

from connectors.engines.types import EngineState

KV_FULL: Final = 0.9
QUEUE_SHARE: Final = 8  # a queue of an eighth of the batch keeps the batch full; more is waiting
STEP_SHARE: Final = 64
UNKNOWN_RUNNING: Final = 64


def most_running(state: EngineState) -> int:
    """Sequences the engine decodes together, at least 1."""
    told = state.info.get("max_running")
    return max(1, told) if isinstance(told, int) else UNKNOWN_RUNNING


def next_limit(limit: int, num_sent: int, state: EngineState) -> int:
    """The limit after a look at the engine, where the pool has `num_sent` samples in flight;
    between 1 and `most_running`."""
    most = most_running(state)
    limit = max(1, min(limit, most))
    # Without a version everything queues, however little there is.
    queues = state.version is not None and state.num_queued > most // QUEUE_SHARE
    if queues or state.kv_use >= KV_FULL:
        in_effect = 0 < num_sent <= limit
        return max(1, num_sent * 3 // 4) if in_effect else limit
    if 2 * num_sent > limit:
        return min(most, limit + 1 + most // STEP_SHARE)
    return limit
