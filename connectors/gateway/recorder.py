"""Records on their way into the log, each once, whatever is killed.

    write ──▶ journal (on disk) ──▶ [thread: send, acknowledged] ──▶ topics
                                          │ in doubt: read back what this writer wrote
                                          └─ too large: dead letter

The thread waits for the journal and for the broker, as long as that takes; `write` waits for
neither. After a restart, and after an error that leaves open what the broker took, it reads back
the ids that this writer wrote since the ends it knows, and sends only the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from connectors.gateway.journal import Journal
from connectors.kafka.client import (
    Cluster,
    KafkaFailure,
    Producer,
    Reader,
    RecordTooLarge,
)
from connectors.kafka.dead_letters import dead_letter
from connectors.records import HEADER_WRITER, Origin

log = logging.getLogger(__name__)

HEADER_ID: Final = "id"
MOST_TOGETHER: Final = 500
PAUSE_S: Final = 0.5
"""Between two tries while the broker is away."""


class Outbound(msgspec.Struct, frozen=True, kw_only=True):
    """`topic` without namespace; `id` is unique among what a writer puts into it."""

    topic: str
    partition: int
    key: str
    id: str
    value: bytes


class Recorder:
    """`locate` gives the log, or raises BrokerUnavailable. `writer` names who writes: nobody else
    writes under that name into the partitions this one writes to."""

    def __init__(self, locate: Callable[[], Cluster], folder: Path, *, writer: str) -> None:
        """Locked while another process has the folder. What an earlier one left there is sent."""
        self._locate, self._writer = locate, writer
        self._journal = Journal(folder)
        self._changed = threading.Condition()
        self._closed = False
        self._in_doubt = True
        self._producer: Producer | None = None
        self._cluster: Cluster | None = None
        self._ends = dict(self._journal.acked.ends)
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def write(self, record: Outbound) -> None:
        """On disk when it returns; by any thread. OSError when the disk does not take it."""
        self._journal.append(msgspec.msgpack.encode(record))
        with self._changed:
            self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Records that are not known to be in the log."""
        return self._journal.num_waiting

    def wait_empty(self, timeout_s: float) -> bool:
        """Whether all of them are, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.num_waiting == 0, timeout_s)

    def close(self) -> None:
        """What is not in the log stays in the journal for the next start."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._journal.close()

    # ------------------------------------------------------------------------------- the thread
    def _run(self) -> None:
        said = False
        while self._wait_for_some():
            records = [
                msgspec.msgpack.decode(data, type=Outbound)
                for data in self._journal.read(MOST_TOGETHER)
            ]
            try:
                self._deliver(records)
            except (KafkaFailure, OSError) as error:
                if not said:
                    log.warning("records wait in the journal: %s", error)
                said = True
                self._disconnect()
                self._pause()
                continue
            if said:
                log.warning("the log takes records again")
            said = False
            with self._changed:
                self._changed.notify_all()
        self._disconnect()

    def _wait_for_some(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._journal.num_waiting > 0)
            return not self._closed

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, PAUSE_S)

    def _deliver(self, records: Sequence[Outbound]) -> None:
        """All of them are in the log afterwards, and acknowledged in the journal."""
        cluster = self._cluster or self._locate()
        self._cluster = cluster
        self._know_ends(cluster, records)
        written = self._written(cluster, records) if self._in_doubt else set()
        producer = self._producer or Producer(cluster)
        self._producer, self._in_doubt = producer, True
        sent: list[Outbound] = []
        for record in records:
            if (record.topic, record.id) not in written:
                written.add((record.topic, record.id))
                sent += self._send(cluster, producer, record)
        for record, offset in zip(sent, producer.flush(), strict=True):
            place = _place(record)
            self._ends[place] = max(self._ends[place], offset + 1)
        self._in_doubt = False
        self._journal.ack(len(records), dict(self._ends))

    def _send(self, cluster: Cluster, producer: Producer, record: Outbound) -> list[Outbound]:
        """What was sent, if it was to the record's own topic."""
        headers = {HEADER_WRITER: self._writer, HEADER_ID: record.id}
        where = cluster.topic(record.topic)
        try:
            producer.send(
                where, record.partition, record.value, key=record.key.encode(), headers=headers
            )
        except RecordTooLarge as error:
            log.error("%s of %s is too large for the log: %s", record.id, record.topic, error)
            origin = Origin(where, record.partition, -1)
            letter = dead_letter(
                cluster, origin, record.value, code="too_large", message=f"{record.id}: {error}"
            )
            producer.send(
                cluster.topic("dead-letters"),
                record.partition,
                letter.value,
                key=record.key.encode(),
                headers={**letter.headers, **headers},
            )
            return [Outbound(topic="dead-letters", partition=record.partition, key="", id="",
                             value=b"")]  # fmt: skip
        return [record]

    def _know_ends(self, cluster: Cluster, records: Sequence[Outbound]) -> None:
        """Of each partition that is written to, before the first record is."""
        places = {_place(r): (r.topic, r.partition) for r in records}
        places |= {f"dead-letters/{r.partition}": ("dead-letters", r.partition) for r in records}
        new = {place: where for place, where in places.items() if place not in self._ends}
        if not new:
            return
        for place, (topic, partition) in new.items():
            with closing(Reader(cluster, cluster.topic(topic), {partition: 0})) as reader:
                self._ends[place] = reader.ends()[partition]
        self._journal.keep_ends(dict(self._ends))

    def _written(self, cluster: Cluster, records: Sequence[Outbound]) -> set[tuple[str, str]]:
        """(Topic, id) of what this writer has in the log since the ends that are known, of all
        partitions that `records` go to; as topic that of the record, also of a dead letter's."""
        found: set[tuple[str, str]] = set()
        topics = {r.topic for r in records}
        for place in sorted({_place(r) for r in records} | {f"dead-letters/{r.partition}"
                                                            for r in records}):  # fmt: skip
            topic, _, number = place.rpartition("/")
            partition = int(number)
            with closing(Reader(cluster, cluster.topic(topic), {partition: 0})) as reader:
                ends, start = reader.ends(), reader.starts()[partition]
                known = self._ends[place]
                # A log that ends before it is another one: all of it is read.
                since = max(known, start) if known <= ends[partition] else start
                reader.seek(partition, since)
                for record in reader.read_to(ends):
                    name = record.headers.get(HEADER_ID)
                    if record.headers.get(HEADER_WRITER) == self._writer and name is not None:
                        found |= {(t, name) for t in topics if topic in (t, "dead-letters")}
        return found

    def _disconnect(self) -> None:
        """Whatever was under way may have been written."""
        self._in_doubt, self._cluster = True, None
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


def _place(record: Outbound) -> str:
    return f"{record.topic}/{record.partition}"
