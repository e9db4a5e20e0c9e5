"""The weights channel: from the trainer's rank 0 to the engines, over a process group of its own.

`layout` says what is published, `wire` what the two sides say over HTTP, `sender` and `receiver` are
the sides.
"""

from connectors.weights.layout import (
    BUCKET_BYTES,
    Plan,
    Slot,
    Snapshot,
    digest,
    plan,
    shapes_of,
)
from connectors.weights.receiver import Staged, WeightsReceiver
from connectors.weights.wire import (
    Ack,
    FenceRequest,
    JoinRequest,
    RelabelRequest,
    UpdateRequest,
    WeightsError,
)

__all__ = [
    "BUCKET_BYTES",
    "Ack",
    "FenceRequest",
    "JoinRequest",
    "Plan",
    "RelabelRequest",
    "Slot",
    "Snapshot",
    "Staged",
    "UpdateRequest",
    "WeightsError",
    "WeightsReceiver",
    "digest",
    "plan",
    "shapes_of",
]
