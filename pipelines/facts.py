"""What `rollouts` says about sessions: a header on each record that the near-line stage writes.

A process that starts again reads the facts after its snapshot back and folds them in, because the
records they are of are there and will be read (operators/sessions.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Final

import msgspec

from connectors.kafka.client import Cluster, Reader, Record
from connectors.kafka.dead_letters import fits
from connectors.kafka.sink import Outgoing
from connectors.kafka.terminals import outgoing
from connectors.records import HEADER_WRITER, Closed, Group
from operators.session_state import Fact

STAGE: Final = "nearline"
"""The writer of its records."""
HEADER_FACT: Final = "fact"


def stated(cluster: Cluster, terminal: Group | Closed, fact: Fact) -> Outgoing:
    """The record of a terminal and what it says."""
    header = {HEADER_FACT: msgspec.json.encode(fact).decode()}
    made = outgoing(cluster, terminal)
    made = replace(made, headers={**made.headers, **header})
    if fits(cluster, made):
        return made
    message = f"{len(made.value)} bytes do not fit in {cluster.max_message_bytes}"
    made = outgoing(cluster, Closed.now(terminal.group_id, "too_large", message, terminal.task))
    return replace(made, headers={**made.headers, **header})


def facts_since(cluster: Cluster, partition: int, since: int) -> tuple[list[Fact], int]:
    """What this stage wrote into the partition from offset `since` on, in order; its end offset."""
    with closing(Reader(cluster, cluster.topic("rollouts"), {partition: 0})) as reader:
        end = reader.ends()[partition]
        # What retention removed was read by everyone long ago.
        reader.seek(partition, max(since, reader.starts()[partition]))
        return list(_facts(reader.read_to({partition: end}))), end


def _facts(records: Iterator[Record]) -> Iterator[Fact]:
    for record in records:
        said = record.headers.get(HEADER_FACT)
        if said is not None and record.headers.get(HEADER_WRITER) == STAGE:
            yield msgspec.json.decode(said, type=Fact)
