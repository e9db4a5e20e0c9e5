"""Keeps `prompts` ahead of the grants, from the files and generators the tasks name.

    task lines ──(which task: by the index)──▶ prompts, partition = index mod partitions
    policy (limits) ──▶ how far ahead the topic is

Every record carries its running index and, after it, how many lines of each task were used. A
killed feeder finds at the partitions' ends the indices each of them got, and goes on there: nothing
is written twice, nothing is left out. A line that is no prompt is written as it is; the rollout
stage says what is wrong with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, KafkaFailure, Producer, Reader, Record, RecordTooLarge
from connectors.kafka.tail import PolicyTail
from connectors.kafka.topics import num_partitions
from connectors.prompt_lines import PromptLines, json_object, open_lines, with_task

HEADER_FEED = "feed"
"""Running index of a fed record."""
HEADER_USED = "feed-used"
"""JSON {task: lines used}, this record included."""
FLUSH_RECORDS = 256
LOOK_S = 0.25
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples are spread evenly

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """A task that is fed."""

    name: str
    lines: PromptLines
    share: float
    repeat: bool

    def has(self, k: int) -> bool:
        return self.repeat or self.lines.num_lines is None or k < self.lines.num_lines

    def value(self, k: int) -> bytes:
        num_lines = self.lines.num_lines
        return with_task(self.lines.line(k if num_lines is None else k % num_lines), self.name)


def feed_prompts(cluster: Cluster, config: Config, stop: threading.Event) -> None:
    """Runs until `stop`, or until no task has a prompt left. ConfigError at once when a task's file
    is missing or empty; BrokerUnavailable after an outage (started again, it goes on)."""
    fed = [
        Fed(
            name=name,
            lines=open_lines(task.prompts, base_dir=config.base_dir, seed=config.run.seed),
            share=task.share,
            repeat=task.repeat,
        )
        for name, task in config.tasks.items()
        if task.prompts is not None
    ]
    if not fed:
        return
    ahead = max(64, 4 * config.trainer.groups_per_step)
    feeder = Feeder(cluster, fed, ahead)
    try:
        while not stop.is_set():
            if not feeder.top_up():
                _log.info("every prompt is written; the feeder has nothing left to do")
                return
            stop.wait(LOOK_S)
    finally:
        feeder.close()


class Feeder:
    """`ahead`: records in `prompts` that are not granted yet."""

    def __init__(self, cluster: Cluster, fed: list[Fed], ahead: int) -> None:
        self._topic = cluster.topic("prompts")
        self._fed, self._ahead = fed, ahead
        count = num_partitions(cluster, "prompts")
        self._reader = Reader(cluster, self._topic, dict.fromkeys(range(count), 0))
        self._starts = self._reader.starts()
        self._progress = _progress(self._reader, count)
        self._tail = PolicyTail(cluster)
        self._producer = Producer(cluster)

    def top_up(self) -> bool:
        """Writes until the topic is `ahead` of the grants; False when no task has a prompt left."""
        while self._tail.poll():
            pass
        granted = self._starts
        if self._tail.latest is not None:
            granted = {p: max(granted[p], n) for p, n in enumerate(self._tail.latest.limits)}
        missing = self._ahead - sum(end - granted[p] for p, end in self._reader.ends().items())
        for _ in range(missing):
            if not self._write_next():
                self._producer.flush()
                return False
        self._producer.flush()
        return True

    def close(self) -> None:
        for client in (self._producer, self._tail, self._reader):
            client.close()

    def _write_next(self) -> bool:
        """The next index that its partition does not hold yet."""
        progress = self._progress
        while True:
            index, partition = progress.index, progress.index % len(progress.last)
            task = choose(self._fed, progress.used, index)
            if task is None:
                return False
            k = progress.used.get(task.name, 0)
            progress.used[task.name] = k + 1
            progress.index += 1
            if index > progress.last[partition]:
                break
        value, used = task.value(k), msgspec.json.encode(progress.used).decode()
        headers = {HEADER_FEED: str(index), HEADER_USED: used}
        try:
            self._producer.send(
                self._topic, partition, value, key=_prompt_id(value), headers=headers
            )
        except RecordTooLarge as error:
            raise ConfigError(
                f"tasks.{task.name}.prompts: prompt {k} has {len(value)} bytes, more than "
                "kafka.max_message_bytes allows"
            ) from error
        progress.last[partition] = index
        if index % FLUSH_RECORDS == 0:
            self._producer.flush()
        return True


@dataclass(slots=True)
class _Progress:
    """index  the next index to look at
    used   lines of each task used by the indices before it
    last   the newest index each partition holds; -1 for none"""

    last: list[int]
    index: int = 0
    used: dict[str, int] = field(default_factory=dict)


def choose(fed: list[Fed], used: Mapping[str, int], index: int) -> Fed | None:
    """The task of `index`, by share among those with lines left: multiples of the golden ratio are
    spread over the unit interval, so the mix is even at any length and needs no memory."""
    left = [task for task in fed if task.has(used.get(task.name, 0))]
    if not left:
        return None
    point = (index * _GOLDEN % 2**64) / 2**64 * sum(task.share for task in left)
    for task in left:
        point -= task.share
        if point < 0:
            return task
    return left[-1]


def _progress(reader: Reader, count: int) -> _Progress:
    """Where a dead feeder stopped. It may have got further in one partition than in another, so the
    scan goes back until it holds the record just before the first index that is missing."""
    window = 2 * FLUSH_RECORDS
    ends, starts = reader.ends(), reader.starts()
    while True:
        first = {p: max(starts[p], end - window) for p, end in ends.items()}
        records = _fed_records(reader, first, ends)
        last = [-1] * count
        for record, index in records:
            last[record.partition] = max(last[record.partition], index)
        whole = first == starts
        missing = min(n + count if n >= 0 else p for p, n in enumerate(last))
        if missing == 0 and whole:
            return _Progress(last=last)
        before = next((record for record, index in records if index == missing - 1), None)
        if before is not None and (min(last) >= 0 or whole):
            used = msgspec.json.decode(before.headers[HEADER_USED], type=dict[str, int])
            return _Progress(last=last, index=missing, used=used)
        if whole:
            raise KafkaFailure(f"prompts: the fed record {missing - 1} is not in the log any more")
        window *= 4


def _fed_records(
    reader: Reader, first: Mapping[int, int], ends: Mapping[int, int]
) -> list[tuple[Record, int]]:
    """The fed records of [first, ends), with their indices."""
    for partition, offset in first.items():
        reader.seek(partition, offset)
    return [
        (record, int(record.headers[HEADER_FEED]))
        for record in reader.read_to(ends)
        if HEADER_FEED in record.headers
    ]


def _prompt_id(value: bytes) -> bytes | None:
    name = (json_object(value) or {}).get("id")
    return name.encode() if isinstance(name, str) else None
