"""Trimming the log: once old checkpoints are gone, what only they needed goes too.

    oldest kept checkpoint on the chain ──▶ its ledger ──▶ DeleteRecords

`steps`         before the manifest that follows that checkpoint
`trajectories`  before what its ledger has not read, and before every group open in it
`rollouts`      before the first group that had not ended when it was saved: those before it are in
                `trajectories`, so no reward stage needs them
`policy`        keeps all, and `prompts` are the user's

Every kept checkpoint is at that one or after it, so each of them can still be recovered from; while
there are fewer than are to be kept nothing goes, so one that is damaged has another before it. A
step that is not on the chain moves nothing: neither a fenced trainer nor another run's checkpoints
can cost this one its log.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping
from contextlib import closing

from connectors.kafka.client import Cluster, KafkaFailure, Reader
from connectors.kafka.topics import delete_records
from connectors.records import Manifest, parse_group_id
from connectors.settled import includes
from trainer.checkpoint import CheckpointFailed, CheckpointStore
from trainer.checkpoint_meta import kept_on_chain
from trainer.feed_state import FeedState
from trainer.step_log import PARTITION, Chain, read_steps
from trainer.traffic import Traffic, topics_of

log = logging.getLogger(__name__)

Points = dict[str, dict[int, int]]
"""By topic (without namespace) and partition, the offset before which nothing is needed."""


class Trimmer:
    """A thread that trims once for each `wake`, also for those before `close`. A broker or a store
    that is away only puts it off: it is tried again at the next `wake`, which raises whatever else
    ended the thread."""

    def __init__(
        self, cluster: Cluster, store: CheckpointStore, keep: int, *, shadow: bool = False
    ) -> None:
        """Nothing goes while fewer than `keep` checkpoints lead on. `shadow`: the trajectories are
        another run's, who trims them itself."""
        self._cluster, self._store, self._keep, self._shadow = cluster, store, keep, shadow
        self._rollouts: dict[int, int] = {}  # of each partition, before it all groups had ended
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the thread
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="trimmer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._asked.put(True)

    def close(self) -> None:
        self._asked.put(False)
        self._thread.join(30.0)

    def _run(self) -> None:
        try:
            while self._asked.get():
                self._try()
        except BaseException as error:  # the thread's edge: the owner gets it from wake()
            self._failure = error

    def _try(self) -> None:
        try:
            self.trim()
        except (KafkaFailure, CheckpointFailed) as error:
            log.warning("the log is not trimmed this time: %s", error)

    def trim(self) -> Points:
        """Trims once; where the log starts now, of what there was something to trim of."""
        chain, offsets = self._read_steps()
        kept = kept_on_chain(self._store, chain)
        if len(kept) < self._keep:
            return {}
        oldest = kept[0]
        points: Points = {}
        # While nothing follows, the checkpoint's own manifest says that it is on the chain.
        following = [*chain.after(oldest.version), chain.manifest(oldest.step)][0]
        if isinstance(following, Manifest):
            points["steps"] = {PARTITION: offsets[following.epoch, following.step]}
        elif following is not None and following.epoch is not None:  # a fork: its epoch's offset
            points["steps"] = {PARTITION: following.epoch}
        if not self._shadow:
            points["trajectories"] = oldest.feed.terminals_from()
            points["rollouts"] = {
                partition: self._ended_before(partition, oldest.feed)
                for partition in range(len(oldest.feed.read))
            }
        starts = delete_records(self._cluster, points)
        log.info("the log starts where the checkpoint of step %d needs it: %s", oldest.step, starts)
        return starts

    def _read_steps(self) -> tuple[Chain, Mapping[tuple[int, int], int]]:
        """The chain, and the offset of each manifest by its epoch and step."""
        chain, offsets = Chain(), {}
        for offset, record in read_steps(self._cluster):
            chain.observe(offset, record)
            if isinstance(record, Manifest):
                offsets[record.epoch, record.step] = offset
        return chain, offsets

    def _ended_before(self, partition: int, feed: FeedState) -> int:
        """Where in `rollouts` the first group lies that had not ended in `feed`. Reads on from
        where it stopped the last time."""
        topic, prompts = self._cluster.topic("rollouts"), self._cluster.topic("prompts")
        traffic, of_traffic = Traffic(feed.traffic), topics_of(self._cluster)
        with closing(Reader(self._cluster, topic, {partition: 0})) as reader:
            start = max(reader.starts()[partition], self._rollouts.get(partition, 0))
            reader.seek(partition, start)
            self._rollouts[partition] = start
            for record in reader.read_to(reader.ends(), 100):
                ended = _ended(record.key, prompts, feed, traffic, of_traffic)
                if ended is False:
                    break
                if ended:
                    self._rollouts[partition] = record.offset + 1
        return self._rollouts[partition]


def _ended(
    key: bytes | None,
    prompts: str,
    feed: FeedState,
    traffic: Traffic,
    of_traffic: tuple[str, ...],
) -> bool | None:
    """Whether the group's terminal had been read; None for a key that names no group."""
    try:
        group_id = (key or b"").decode()
        origin = parse_group_id(group_id)
    except ValueError:
        return None
    if origin.topic in of_traffic:
        return traffic.is_over(group_id)
    if origin.topic != prompts or origin.partition >= len(feed.frontier):
        return False
    settled = origin.offset < feed.frontier[origin.partition] or includes(
        feed.settled[origin.partition], origin.offset
    )
    return settled and group_id not in feed.unread
