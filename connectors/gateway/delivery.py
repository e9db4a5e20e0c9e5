"""From a journal's front into the log, each record once.

What an earlier process sent, or a send that ended in an error, may be in the log or not. The log is
then asked: each record carries its `writer` and `id`, and places.json says from which offset on
those of the journal can lie in each partition. A partition's entry is written before its first
record is sent, and moves up when the journal forgets what lies below it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from connectors.files import replace_file
from connectors.kafka.client import Cluster, Producer, Reader, RecordTooLarge
from connectors.kafka.dead_letters import fits
from connectors.kafka.sink import Outgoing
from connectors.kafka.topics import cluster_id
from connectors.records import HEADER_ID, HEADER_WRITER

log = logging.getLogger(__name__)

TRY_S: Final = 20.0
"""After which a broker that does not answer is looked for again, and the log is asked."""
SETTLE_S: Final = 1.0
"""A broker that stood still may still take what it had received: it is given this long to do so
before the log is believed."""

Place = tuple[str, int]
"""Topic (without namespace) and partition."""


class Outbound(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A record on its way: `topic` without namespace; `id` is unique among what one writer puts
    into a topic."""

    topic: str
    partition: int
    key: str
    id: str
    value: bytes
    headers: dict[str, str] = {}

    @property
    def place(self) -> Place:
        return self.topic, self.partition


class Places(msgspec.Struct):
    """log: the cluster's own name; since: a topic's partitions' offsets, below which nothing lies
    that the journal has."""

    log: str = ""
    since: dict[str, dict[int, int]] = {}

    def get(self, place: Place) -> int | None:
        return self.since.get(place[0], {}).get(place[1])

    def put(self, place: Place, offset: int) -> None:
        self.since.setdefault(place[0], {})[place[1]] = offset

    def known(self) -> set[Place]:
        return {(topic, p) for topic, offsets in self.since.items() for p in offsets}


class Delivery:
    """One thread's. `folder` is the journal's, `has_records` whether it holds any: then an earlier
    process may have sent them. `stop` ends its waits."""

    def __init__(
        self,
        locate: Callable[[], Cluster],
        folder: Path,
        writer: str,
        stop: threading.Event,
        *,
        has_records: bool,
    ) -> None:
        self._locate, self._folder, self._writer, self._stop = locate, folder, writer, stop
        self._file = folder / "places.json"
        self._places = self._load() if has_records else Places()
        self._are_kept = False  # whether the file has every place that a record was sent to
        self._doubtful: set[Place] = self._places.known()
        self._found: dict[Place, dict[str, list[int]]] = {}  # offsets of an id, read back
        self._refused: set[str] = set()  # ids that their topic does not take
        self._num_alone = 0  # records to send one by one, because one of them is refused
        self._cluster: Cluster | None = None
        self._producer: Producer | None = None

    def deliver(self, records: Sequence[Outbound]) -> int:
        """How many of the first are in the log now; at most 0 when `stop` was set meanwhile. After
        KafkaFailure, ConfigError or OSError the same records must be given again."""
        if self._num_alone:
            records = records[:1]
        places: set[Place] = {record.place for record in records}
        try:
            producer = self._connected()
            sent = [self._that_fits(record) for record in records]
            places |= {record.place for record in sent}
            if places & self._doubtful and self._stop.wait(SETTLE_S):
                return 0
            self._read_back(places)
            self._send(producer, sent)
        except RecordTooLarge:
            self._give_up(places)
            if len(records) == 1:
                self._refused.add(records[0].id)
            else:
                self._num_alone = len(records)
            return 0
        except BaseException:
            self._give_up(places)
            raise
        self._num_alone = max(0, self._num_alone - 1)
        self._refused.difference_update(record.id for record in records)
        return len(records)

    def dropped(self) -> None:
        """The journal has forgotten all that was delivered. OSError when that cannot be noted;
        then more is read back, should it come to that."""
        self._keep()

    def close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    # ---------------------------------------------------------------------------------- sending
    def _send(self, producer: Producer, records: Sequence[Outbound]) -> None:
        assert self._cluster is not None
        offsets: dict[int, int] = {}
        new: list[int] = []
        for index, record in enumerate(records):
            if found := self._found.get(record.place, {}).get(record.id):
                offsets[index] = found.pop(0)
                continue
            new.append(index)
            producer.send(
                self._cluster.topic(record.topic),
                record.partition,
                record.value,
                key=record.key.encode(),
                headers=self._headers(record),
            )
        offsets.update(zip(new, producer.flush(), strict=True))
        for index, record in enumerate(records):
            left = self._found.get(record.place, {})
            if not left.get(record.id):
                left.pop(record.id, None)
            if not left:  # else what is left lies anywhere behind `since`
                self._places.put(record.place, offsets[index] + 1)

    def _headers(self, record: Outbound) -> dict[str, str]:
        return {**record.headers, HEADER_WRITER: self._writer, HEADER_ID: record.id}

    def _that_fits(self, record: Outbound) -> Outbound:
        """The record; where its topic does not take it, a dead letter that names a file with it."""
        assert self._cluster is not None
        whole = Outgoing(key=record.key, value=record.value, headers=self._headers(record))
        if record.id not in self._refused and fits(self._cluster, whole):
            return record
        name = hashlib.blake2b(f"{record.topic}/{record.id}".encode(), digest_size=16).hexdigest()
        file = self._folder / "too-large" / name
        if not file.exists():
            file.parent.mkdir(exist_ok=True)
            replace_file(file, record.value, mode=0o600)
            log.error("%s of %s is too large for it, and kept in %s", record.id, record.topic, file)
        size = len(record.value)
        reference = {"topic": record.topic, "id": record.id, "file": str(file), "bytes": size}
        headers = {
            "code": "too_large",
            "message": f"{size} bytes do not fit into {record.topic}",
            "origin": f"{self._cluster.topic(record.topic)}/{record.partition}",
            "reference": "true",
        }
        value = msgspec.json.encode(reference)
        return replace(record, topic="dead-letters", value=value, headers=headers)

    # ------------------------------------------------------------------------------------ doubt
    def _give_up(self, places: set[Place]) -> None:
        """What was sent to `places` may be there or not."""
        self._doubtful |= places
        self.close()

    def _connected(self) -> Producer:
        if self._producer is None:
            found = self._locate()
            cluster = dataclasses.replace(found, unavailable_s=min(found.unavailable_s, TRY_S))
            self._know(cluster_id(cluster))
            self._cluster, self._producer = cluster, Producer(cluster)
        return self._producer

    def _know(self, name: str) -> None:
        """In another log the offsets of before say nothing."""
        if self._places.log == name:
            return
        if self._places.log:
            log.warning("the log is another one than before: %s", name)
        for place in self._places.known():
            self._places.put(place, 0)
            self._doubtful.add(place)
        self._places.log, self._are_kept = name, False

    def _read_back(self, places: set[Place]) -> None:
        by_topic: dict[str, set[int]] = defaultdict(set)
        for place in places:
            if place in self._doubtful or self._places.get(place) is None:
                by_topic[place[0]].add(place[1])
        for topic, partitions in by_topic.items():
            self._read_topic(topic, partitions)
        if not self._are_kept:
            self._keep()

    def _read_topic(self, topic: str, partitions: set[int]) -> None:
        assert self._cluster is not None
        name = self._cluster.topic(topic)
        with closing(Reader(self._cluster, name, dict.fromkeys(partitions, 0))) as reader:
            starts, ends = reader.starts(), reader.ends()
            for p in partitions:
                since = self._places.get((topic, p))
                if since is None:  # nothing of the journal was ever sent there
                    self._places.put((topic, p), ends[p])
                    self._are_kept = False
                    since = ends[p]
                elif not starts[p] <= since <= ends[p]:
                    since = starts[p]  # retention passed it, or the log lost its end
                reader.seek(p, since)
            found: dict[int, dict[str, list[int]]] = {p: {} for p in partitions}
            for record in reader.read_to(ends):
                if record.headers.get(HEADER_WRITER) == self._writer:
                    ids = found[record.partition]
                    ids.setdefault(record.headers.get(HEADER_ID, ""), []).append(record.offset)
        for p in partitions:
            self._found[topic, p] = found[p]
            self._doubtful.discard((topic, p))

    # ---------------------------------------------------------------------------------- the file
    def _keep(self) -> None:
        replace_file(self._file, msgspec.json.encode(self._places), sync=True)
        self._are_kept = True

    def _load(self) -> Places:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Places)
        except FileNotFoundError:
            return Places()
        except msgspec.DecodeError as error:
            raise OSError(f"{self._file} cannot be read: {error}") from error
