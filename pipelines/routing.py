"""Two outputs of one stage: its terminals, and the dead letters of what it could not read."""

from __future__ import annotations

from dataclasses import dataclass

import bytewax.operators as op
from bytewax.dataflow import Stream

from connectors.kafka.client import Cluster
from connectors.kafka.sink import LogSink, Outgoing


@dataclass(frozen=True, slots=True)
class Routed:
    """`topic` without namespace."""

    topic: str
    outgoing: Outgoing


def write(stage: str, up: Stream, cluster: Cluster, topic: str) -> None:
    """Writes `(partition, Routed)` to `topic` and `dead-letters`, each once, as writer `stage`."""
    split = op.branch(f"{stage}_split", up, lambda pair: pair[1].topic == topic)
    for name, stream in ((topic, split.trues), ("dead-letters", split.falses)):
        outgoing = op.map_value(f"{stage}_to_{name}", stream, lambda routed: routed.outgoing)
        op.output(f"{stage}_{name}", outgoing, LogSink(cluster, name, stage))
