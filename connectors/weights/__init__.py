"""The weights channel: from the trainer's rank 0 to the engines, over a process group of its own.

`layout` says what is published, `wire` what the two sides say over HTTP, `group` is what they form,
`sender` and `receiver` are the sides; `watch` tells which engines are there and what they hold.
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
from connectors.weights.sender import WeightsSender
from connectors.weights.watch import EngineWatch
from connectors.weights.wire import (
    Ack,
    EpochRefused,
    FenceRequest,
    JoinRequest,
    RelabelRequest,
    Unreachable,
    UpdateRequest,
    WeightsError,
)

__all__ = [
    "BUCKET_BYTES",
    "Ack",
    "EngineWatch",
    "EpochRefused",
    "FenceRequest",
    "JoinRequest",
    "Plan",
    "RelabelRequest",
    "Slot",
    "Snapshot",
    "Staged",
    "Unreachable",
    "UpdateRequest",
    "WeightsError",
    "WeightsReceiver",
    "WeightsSender",
    "digest",
    "plan",
    "shapes_of",
]
