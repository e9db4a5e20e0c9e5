"""`steps`, the trainer's write-ahead log: epochs, manifests and who may still write them.

Which manifests count (`chain`), by position in the log alone:
* a `Begin` opens a new epoch: its own offset;
* a manifest counts if its epoch is that of the latest `Begin` before it. One that a fenced trainer
  managed to write after a newer `Begin` is void;
* step numbers run on: the manifest of step s follows that of s - 1, across epochs too. A trainer
  that recovers from checkpoint c re-executes the manifests after c and writes none of them again;
  the next one it writes is that of the last step + 1. So a step number is once on the chain.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from connectors.kafka.client import Cluster, Producer, Reader
from connectors.records import Begin, Manifest, StepRecord, decode_as, encode

PARTITION = 0


class Fenced(RuntimeError):
    """A newer trainer has begun: this one must stop, nothing it writes counts any more."""


class ChainBroken(ValueError):
    """A manifest that counts does not follow the one before it."""


@dataclass(slots=True, kw_only=True)
class Chain:
    """The steps that count, folded from `steps` in offset order. `breaks` says which of them does
    not follow the one before it."""

    manifests: list[Manifest] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    epoch: int = -1
    _begun: bool = False
    _first_step: int | None = None  # of a whole log; unknown for a trimmed one

    def observe(self, offset: int, record: StepRecord) -> None:
        if isinstance(record, Begin):
            self.epoch, self._begun = offset, True
            if offset == 0:
                self._first_step = record.resumed_step + 1
            return
        if not self._begun and record.epoch > self.epoch:
            # A trimmed log: its first manifests stand without their `Begin`, and the highest epoch
            # among them is the one that counted (a lower one was fenced before the trimmed part
            # ended).
            self.manifests, self.breaks, self.epoch = [], [], record.epoch
        if record.epoch != self.epoch:
            return
        if not self.manifests and self._first_step not in (None, record.step):
            self.breaks.append(f"the first step is {record.step}, not {self._first_step}")
        self.breaks += _breaks(self.manifests[-1] if self.manifests else None, offset, record)
        self.manifests.append(record)

    @property
    def step(self) -> int:
        return self.manifests[-1].step if self.manifests else 0


def _breaks(last: Manifest | None, offset: int, record: Manifest) -> Iterator[str]:
    if last is None:
        pass
    elif record.step != last.step + 1:
        yield f"step {record.step} at offset {offset} follows step {last.step}"
    elif record.digest_before != last.digest:
        yield (
            f"step {record.step} starts from {record.digest_before}, step {last.step} ended at "
            f"{last.digest}"
        )
    if record.skipped is not None and record.digest != record.digest_before:
        yield f"step {record.step} was skipped but changed the weights"


def chain(records: Iterable[tuple[int, StepRecord]]) -> list[Manifest]:
    """The manifests that count, in step order, from `(offset, record)` pairs in offset order.
    ChainBroken where one does not follow the one before it."""
    found = Chain()
    for offset, record in records:
        found.observe(offset, record)
    if found.breaks:
        raise ChainBroken(found.breaks[0])
    return found.manifests


class StepLog:
    """One trainer's access to `steps`. Not thread-safe; the trainer's main loop owns it.

    epoch  of this trainer once it has begun, else None
    """

    def __init__(self, cluster: Cluster) -> None:
        self.epoch: int | None = None
        self._cluster = cluster
        self._topic = cluster.topic("steps")
        self._producer = Producer(cluster)
        self._tail: Reader | None = None
        self._last_step: int | None = None

    def begin(self, resumed_step: int) -> int:
        """Opens an epoch that fences every trainer before this one, in `steps` and in `policy`, and
        returns it. `resumed_step`: of the checkpoint this trainer starts from, 0 without one."""
        begin = Begin(
            epoch=None,
            writer=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            resumed_step=resumed_step,
            started_at=time.time(),
        )
        epoch = self._producer.append(self._topic, PARTITION, encode(begin))
        spoken = Begin(
            epoch=epoch,
            writer=begin.writer,
            resumed_step=resumed_step,
            started_at=begin.started_at,
        )
        self._producer.append(self._cluster.topic("policy"), PARTITION, encode(spoken))
        if self._tail is not None:
            self._tail.close()
        self._tail = Reader(self._cluster, self._topic, {PARTITION: epoch + 1})
        counted = self.manifests()
        self._last_step = counted[-1].step if counted else resumed_step
        if self._last_step < resumed_step:
            raise ChainBroken(
                f"the checkpoint is of step {resumed_step}, but the last manifest in {self._topic} "
                f"is of step {self._last_step}: the log is not the one it was written with"
            )
        self.epoch = epoch
        return epoch

    def append(self, manifest: Manifest) -> int:
        """Writes the manifest and reads it back: its offset. Once this returns the step counts.

        Fenced if a newer `Begin` lies before it. ChainBroken, and nothing written, unless it is the
        manifest of this epoch's next step."""
        if self.epoch is None or self._tail is None or self._last_step is None:
            raise RuntimeError("append before begin")
        if manifest.epoch != self.epoch or manifest.step != self._last_step + 1:
            raise ChainBroken(
                f"the manifest of step {manifest.step} in epoch {manifest.epoch} cannot follow "
                f"step {self._last_step} in epoch {self.epoch}"
            )
        offset = self._producer.append(self._topic, PARTITION, encode(manifest))
        for at, record in self._read_to(self._tail, offset):
            if isinstance(record, Begin):
                raise Fenced(
                    f"trainer {record.writer} began epoch {at}; epoch {self.epoch} is fenced and "
                    f"its step {manifest.step} does not count"
                )
        self._last_step = manifest.step
        return offset

    def manifests(self, after_step: int = 0) -> list[Manifest]:
        """The chain as it is in the log now, from step `after_step` + 1 on."""
        return [m for m in chain(read_steps(self._cluster)) if m.step > after_step]

    def close(self) -> None:
        self._producer.close()
        if self._tail is not None:
            self._tail.close()

    def _read_to(self, reader: Reader, offset: int) -> Iterator[tuple[int, StepRecord]]:
        """Everything not read yet, up to `offset`, which is known to be written."""
        while reader.positions()[PARTITION] <= offset:
            # One record a poll: what lies behind `offset` stays for the next read-back.
            for record in reader.poll(0.5, max_records=1):
                yield record.offset, decode_as(record.value, StepRecord)


def read_steps(cluster: Cluster) -> Iterator[tuple[int, StepRecord]]:
    """All of `steps` up to its end at the call, for `chain`."""
    with closing(Reader(cluster, cluster.topic("steps"), {PARTITION: 0})) as reader:
        ends = reader.ends()
        reader.rewind()
        for record in reader.read_to(ends):
            if record.offset < ends[PARTITION]:
                yield record.offset, decode_as(record.value, StepRecord)
