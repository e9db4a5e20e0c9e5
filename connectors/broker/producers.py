"""What each idempotent producer last wrote to one partition.

Kafka's rules: a batch continues its producer's sequence numbers; a repeat of one of the last five
is acknowledged again and not written; a gap, or an older epoch, is refused. A producer that is not
known here (its records were trimmed, or it is new) may start anywhere. The table is rebuilt from
the stored batches when a log is opened, so that retries across a restart of the broker are
recognised.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from connectors.broker.batch import SEQUENCE_MASK, BatchHeader
from connectors.broker.errors import ErrorCode, Refused

REMEMBERED_BATCHES = 5  # the most that an idempotent producer may have in flight
REMEMBERED_PRODUCERS = 1000  # 1.4 KB each; beyond, those silent longest are forgotten


class _Written(NamedTuple):
    first_sequence: int
    last_sequence: int
    base_offset: int


@dataclass(slots=True)
class _Producer:
    epoch: int
    recent: deque[_Written] = field(default_factory=lambda: deque(maxlen=REMEMBERED_BATCHES))


class ProducerTable:
    def __init__(self) -> None:
        self._producers: dict[int, _Producer] = {}

    def stored_at(self, header: BatchHeader) -> int | None:
        """The base offset at which this batch is already stored, None if it is to be written;
        Refused if it may not be."""
        if header.producer_id < 0:
            return None
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return None
        if header.producer_epoch < producer.epoch:
            raise Refused(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"producer {header.producer_id} has epoch {producer.epoch},"
                f" got {header.producer_epoch}",
            )
        if header.producer_epoch > producer.epoch:
            expected = 0
        else:
            for batch in producer.recent:
                if batch[:2] == (header.first_sequence, header.last_sequence):
                    return batch.base_offset
            expected = (producer.recent[-1].last_sequence + 1) & SEQUENCE_MASK
        if header.first_sequence != expected:
            raise Refused(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} continues at sequence {expected},"
                f" got {header.first_sequence}",
            )
        return None

    def record(self, header: BatchHeader, base_offset: int) -> None:
        """The batch is stored at `base_offset`."""
        if header.producer_id < 0:
            return
        producer = self._producers.pop(header.producer_id, None)
        if producer is None or producer.epoch != header.producer_epoch:
            producer = _Producer(header.producer_epoch)
        self._producers[header.producer_id] = producer  # the dictionary's order is that of writing
        if len(self._producers) > REMEMBERED_PRODUCERS:
            del self._producers[next(iter(self._producers))]
        producer.recent.append(_Written(header.first_sequence, header.last_sequence, base_offset))
