"""The weights channel: from the trainer's rank 0 to the engines, through memory on one host, over a
process group of its own elsewhere.

`layout` says what is published, `snapshot` is a copy of it, `wire` what the two sides say over
HTTP; `group` and `memory` carry the bytes between `sender` and `receiver`; `adapters` are bytes to
be added to `base`, what an engine started with; `holding` is what an engine holds, `watch` tells
what engines there are and what each says that it holds.
"""

from connectors.weights.adapters import Adapters
from connectors.weights.calls import Peer
from connectors.weights.holding import Holding
from connectors.weights.layout import (
    BUCKET_BYTES,
    Gather,
    Plan,
    Slot,
    digest,
    plan,
    shapes_of,
    take_part,
)
from connectors.weights.receiver import Staged, WeightsReceiver
from connectors.weights.sender import Through, WeightsSender
from connectors.weights.snapshot import Snapshot
from connectors.weights.watch import EngineWatch
from connectors.weights.wire import (
    Ack,
    EpochRefused,
    FenceRequest,
    JoinRequest,
    LoadRequest,
    MemoryUnreadable,
    RelabelRequest,
    Unreachable,
    UpdateRequest,
    WeightsError,
)

__all__ = [
    "BUCKET_BYTES",
    "Ack",
    "Adapters",
    "EngineWatch",
    "EpochRefused",
    "FenceRequest",
    "Gather",
    "Holding",
    "JoinRequest",
    "LoadRequest",
    "MemoryUnreadable",
    "Peer",
    "Plan",
    "RelabelRequest",
    "Slot",
    "Snapshot",
    "Staged",
    "Through",
    "Unreachable",
    "UpdateRequest",
    "WeightsError",
    "WeightsReceiver",
    "WeightsSender",
    "digest",
    "plan",
    "shapes_of",
    "take_part",
]
