"""`steps`, the trainer's write-ahead log: epochs, manifests, forks and who may still write them.

Which manifests count (`Chain`), by position in the log alone:
* a `Begin` opens a new epoch: its own offset;
* a manifest counts if its epoch is that of the latest `Begin` before it. One that a fenced trainer
  managed to write after a newer `Begin` is void;
* step numbers run on: the manifest of step s follows that of s - 1, across epochs too. A trainer
  that recovers from checkpoint c re-executes the manifests after c and writes none of them again;
  the next one it writes is that of the last step + 1;
* a forking `Begin` whose parent is the incarnation at its position, and whose number fits, opens
  the next incarnation. A `rollback` at N gives up the manifests after N: step N + 1 comes again. A
  `rebuild` at the last step gives up none: only the weights of that step are others from there on.
  Any other forking `Begin` is a plain one.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import msgspec

from connectors.kafka.client import Cluster, Producer, Reader
from connectors.kafka.parsed import parsed
from connectors.records import Begin, Fork, Manifest, StepRecord, Version, encode

PARTITION = 0


class Fenced(RuntimeError):
    """A newer trainer has begun: this one must stop, nothing it writes counts any more."""


class ChainBroken(ValueError):
    """A manifest that counts does not follow the one before it."""


@dataclass(slots=True, kw_only=True)
class Chain:
    """The steps that count, folded from `steps` in offset order.

    breaks       which of them do not follow the one before
    incarnation  that the next step is trained in
    lineage      the fork of each incarnation that was opened
    forks        the begins that opened them, each with its epoch
    given_up     manifests that a rollback gave up
    """

    manifests: list[Manifest] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    epoch: int = -1
    incarnation: int = 0
    lineage: dict[int, Fork] = field(default_factory=dict)
    forks: list[Begin] = field(default_factory=list)
    given_up: list[Manifest] = field(default_factory=list)
    highest: int = 0  # incarnation that any begin named
    _rebuilt: dict[int, tuple[Version, str]] = field(default_factory=dict)  # by step
    _base: tuple[int, str] | None = None  # the last fork's step and digest
    _begun: bool = False
    _first_step: int | None = None  # of a whole log; unknown for a trimmed one

    def observe(self, offset: int, record: StepRecord) -> None:
        if isinstance(record, Begin):
            self._begin(offset, record)
            return
        if not self._begun and record.epoch > self.epoch:
            # A trimmed log: its first manifests stand without their `Begin`, and the highest epoch
            # among them is the one that counted (a lower one was fenced before the trimmed part
            # ended).
            self.manifests, self.breaks, self.epoch = [], [], record.epoch
            self.incarnation = self.highest = record.version.incarnation
        if record.epoch != self.epoch:
            return
        if not self.manifests and self._first_step not in (None, record.step):
            self.breaks.append(f"the first step is {record.step}, not {self._first_step}")
        self.breaks += self._breaks(offset, record)
        self.manifests.append(record)

    @property
    def step(self) -> int:
        """The last one; 0 before the first."""
        if self.manifests:
            return self.manifests[-1].step
        return self._base[0] if self._base else (self._first_step or 1) - 1

    @property
    def version(self) -> Version:
        """That the next step trains at."""
        return Version(self.incarnation, self.step)

    @property
    def rebuilt(self) -> dict[int, str]:
        """Of each step on the chain at which a rebuild left other weights than its manifest says:
        their digest."""
        return {step: digest for step, (_, digest) in self._rebuilt.items()}

    def manifest(self, step: int) -> Manifest | None:
        """Of `step`, None where it is not in the log or not on the chain."""
        at = step - self.manifests[0].step if self.manifests else -1
        return self.manifests[at] if 0 <= at < len(self.manifests) else None

    def digest_at(self, step: int) -> str | None:
        """Of the weights after `step`, as the next step starts from them; None where the log does
        not say it."""
        if step in self._rebuilt:
            return self._rebuilt[step][1]
        if (found := self.manifest(step)) is not None:
            return found.digest
        if (following := self.manifest(step + 1)) is not None:
            return following.digest_before
        return self._base[1] if self._base and self._base[0] == step else None

    def version_at(self, step: int) -> Version:
        """Under which the weights of `digest_at(step)` were made, which a checkpoint names; a
        rollback to `step` made none."""
        if step in self._rebuilt:
            return self._rebuilt[step][0]
        if (found := self.manifest(step)) is not None:
            return found.version
        path = [f.fork.parent for f in self.forks if f.fork is not None and f.fork.number >= step]
        return Version(min(path, default=self.incarnation), step)

    def holds(self, step: int, version: Version, digest: str) -> bool:
        """Whether a checkpoint that names these is of a step on the chain."""
        return (self.version_at(step), self.digest_at(step)) == (version, digest)

    def after(self, version: Version) -> list[Begin | Manifest]:
        """In log order, the manifests and forks that a state of `version` has not seen."""
        forks = [f for f in self.forks if f.incarnation > version.incarnation]
        found: list[Begin | Manifest] = []
        for manifest in self.manifests:
            while forks and _epoch(forks[0]) <= manifest.epoch:
                found.append(forks.pop(0))
            if manifest.step > version.number:
                found.append(manifest)
        return found + forks

    def _begin(self, offset: int, begin: Begin) -> None:
        fork = begin.fork
        if not self._begun and not self.manifests:
            if offset == 0:
                self._first_step = begin.resumed_step + 1
            self.incarnation = begin.incarnation if fork is None else fork.parent
        self.epoch, self._begun = offset, True
        self.highest = max(self.highest, begin.incarnation)
        if fork is None or not self._fits(fork):
            return
        self.incarnation = begin.incarnation
        self.lineage[begin.incarnation] = fork
        self.forks.append(msgspec.structs.replace(begin, epoch=offset))
        if fork.reason == "rebuild":
            self._rebuilt[fork.number] = (Version(begin.incarnation, fork.number), begin.digest)
        else:
            self.given_up += [m for m in self.manifests if m.step > fork.number]
            self.manifests = [m for m in self.manifests if m.step <= fork.number]
            self._rebuilt = {s: what for s, what in self._rebuilt.items() if s <= fork.number}
        self._base = (fork.number, begin.digest)

    def _fits(self, fork: Fork) -> bool:
        if fork.parent != self.incarnation:
            return False
        if self._first_step is None and not self.manifests:  # a trimmed log: it must be believed
            return True
        first = self.step if fork.reason == "rebuild" else (self._first_step or 1) - 1
        return first <= fork.number <= self.step

    def _breaks(self, offset: int, record: Manifest) -> Iterator[str]:
        last = self.step
        digest = self.digest_at(last)
        if digest is not None and record.step != last + 1:
            yield f"step {record.step} at offset {offset} follows step {last}"
        elif digest is not None and record.digest_before != digest:
            yield (
                f"step {record.step} starts from {record.digest_before}, step {last} ended at "
                f"{digest}"
            )
        if record.version != Version(self.incarnation, record.step):
            yield (
                f"step {record.step} has version {record.version} in incarnation {self.incarnation}"
            )
        if record.skipped is not None and record.digest != record.digest_before:
            yield f"step {record.step} was skipped but changed the weights"


def _epoch(begin: Begin) -> int:
    assert begin.epoch is not None  # those in Chain.forks have one
    return begin.epoch


def chain(records: Iterable[tuple[int, StepRecord]]) -> list[Manifest]:
    """The manifests that count, in step order, from `(offset, record)` pairs in offset order.
    ChainBroken where one does not follow the one before it."""
    found = Chain()
    for offset, record in records:
        found.observe(offset, record)
    return _checked(found).manifests


def _checked(found: Chain) -> Chain:
    if found.breaks:
        raise ChainBroken(found.breaks[0])
    return found


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
        self._read: tuple[Chain, int] | None = None  # and its end, while nothing is appended

    def begin(
        self,
        resumed_step: int,
        fork: Fork | None = None,
        digest: str = "",
        excluded: Sequence[str] = (),
    ) -> int:
        """Opens an epoch that fences every trainer before this one, in `steps` and in `policy`, and
        returns it. `resumed_step`: of the checkpoint this trainer starts from, 0 without one. With
        a `fork` it opens the next incarnation too, from weights of `digest`; Fenced if another one
        was opened meanwhile, and this fork so does not count."""
        before = self.chain()
        if before.manifests and before.step < resumed_step:
            raise ChainBroken(
                f"the checkpoint is of step {resumed_step}, but the last manifest in {self._topic} "
                f"is of step {before.step}: the log is not the one it was written with"
            )
        begin = Begin(
            epoch=None,
            writer=f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}",
            resumed_step=resumed_step,
            started_at=time.time(),
            incarnation=before.incarnation if fork is None else before.highest + 1,
            fork=fork,
            digest=digest,
            excluded=tuple(excluded),
        )
        epoch = self._producer.append(self._topic, PARTITION, encode(begin))
        spoken = msgspec.structs.replace(begin, epoch=epoch)
        self._producer.append(self._cluster.topic("policy"), PARTITION, encode(spoken))
        if self._tail is not None:
            self._tail.close()
        self._tail = Reader(self._cluster, self._topic, {PARTITION: epoch + 1})
        now = self.chain()
        if fork is not None and now.lineage.get(begin.incarnation) != fork:
            raise Fenced(
                f"incarnation {fork.parent} was left or went on while it was forked at "
                f"{fork.number}: the fork at offset {epoch} of {self._topic} does not count"
            )
        self._last_step = now.step if now.manifests else resumed_step
        self.epoch = epoch
        return epoch

    def chain(self) -> Chain:
        """As it is in the log now. ChainBroken where a step does not follow the one before it."""
        found, start = self._read or (Chain(), 0)
        for offset, record in read_steps(self._cluster, start):
            found.observe(offset, record)
            start = offset + 1
        self._read = (found, start)
        return _checked(found)

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
        self._read = None
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
        """The chain's in the log now, from step `after_step` + 1 on."""
        return [m for m in self.chain().manifests if m.step > after_step]

    def close(self) -> None:
        self._producer.close()
        if self._tail is not None:
            self._tail.close()

    def _read_to(self, reader: Reader, offset: int) -> Iterator[tuple[int, StepRecord]]:
        """Everything not read yet, up to `offset`, which is known to be written."""
        while reader.positions()[PARTITION] <= offset:
            # One record a poll: what lies behind `offset` stays for the next read-back.
            yield from parsed(reader.poll(0.5, max_records=1), StepRecord)


def read_steps(cluster: Cluster, start: int = 0) -> Iterator[tuple[int, StepRecord]]:
    """All of `steps` from offset `start` up to its end at the call, for `Chain`."""
    with closing(Reader(cluster, cluster.topic("steps"), {PARTITION: start})) as reader:
        ends = reader.ends()
        reader.seek(PARTITION, max(start, reader.starts()[PARTITION]))
        records = reader.read_to(ends)
        yield from parsed((r for r in records if r.offset < ends[PARTITION]), StepRecord)
