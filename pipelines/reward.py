"""The reward half: unscored groups in, scored groups out; what closed before passes through.

rollouts ─▶ [first terminal of a group] ─▶ [score ▶ version filter] ─▶ trajectories
                                                                    └─▶ dead-letters
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import bytewax.operators as op
from bytewax.dataflow import Stream

from connectors.arrow import CorruptRecord
from connectors.config import Config, ConfigError
from connectors.kafka.async_op import AsyncWork
from connectors.kafka.client import Cluster, Record
from connectors.kafka.source import STOP, Item, ItemReader, LogSource, StopFlag
from connectors.kafka.tail import PolicyTail
from connectors.kafka.terminals import UnknownRecord, outgoing, terminal, unreadable
from connectors.plugins import load
from connectors.records import Closed, Group, Version, parse_group_id
from connectors.settled import Intervals, settle
from connectors.text import Text
from operators import rewards
from operators.rewards import MissingPackage, Rewards, RewardTask
from operators.user_code import UserCode
from operators.version_filter import is_stale
from pipelines.closures import note
from pipelines.routing import Routed, write

logger = logging.getLogger(__name__)

Work = Callable[[Item], Awaitable[Sequence[Routed]]]
FirstTerminal = Callable[[Intervals | None, Item], tuple[Intervals, list[Item]]]
POLICY_POLL_S: Final = 0.25


def rollouts_source(cluster: Cluster, stop: StopFlag = STOP, *, trimmed: bool = False) -> LogSource:
    """`trimmed`: the trainer removes groups that ended."""
    return LogSource(cluster, "rollouts", granted=False, stop=stop, trimmed=trimmed)


def reward_half(
    rollouts: Stream,
    cluster: Cluster,
    work: Work,
    stop: StopFlag = STOP,
    *,
    into: Cluster | None = None,
    trimmed: bool = False,
) -> None:
    """What becomes of the items of `rollouts_source`; `work` is `score(...)`. `into`: under another
    namespace than the `rollouts`. `trimmed`: as for the source."""
    first = op.stateful_flat_map(
        "first_terminal", rollouts, first_terminal(cluster.topic("prompts"))
    )
    refetch = ItemReader(cluster, "rollouts", trimmed=trimmed)
    scored = op.stateful_batch("score", first, AsyncWork(work, refetch, stop=stop))
    write("reward", scored, into or cluster, "trajectories")


def first_terminal(prompts_topic: str) -> FirstTerminal:
    """Drops the second terminal of a prompt. Keys that are no prompt's of the item's partition
    pass: the scorer, or the feed, knows what they are."""

    def first(settled: Intervals | None, item: Item) -> tuple[Intervals, list[Item]]:
        settled = settled or ()
        group_id = _group_id(item.record) if item.record is not None else None
        if group_id is None:
            return settled, [item]
        prompt = parse_group_id(group_id)
        if (prompt.topic, prompt.partition) != (prompts_topic, item.origin.partition):
            return settled, [item]
        settled, new = settle(settled, prompt.offset)
        if not new:
            logger.warning("ignored a second terminal of %s at %s", group_id, item.origin)
        return settled, [item] if new else []

    return first


class DropBefore:
    """The version below which groups are dropped early, as last announced. Asks `policy` at most
    every POLICY_POLL_S, off the loop's thread."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tail: PolicyTail | None = None
        self._asked_at = float("-inf")
        self._asking = asyncio.Lock()

    async def now(self) -> Version | None:
        async with self._asking:
            if time.monotonic() - self._asked_at >= POLICY_POLL_S:
                await asyncio.to_thread(self._poll)
                self._asked_at = time.monotonic()
        latest = self._tail.latest if self._tail is not None else None
        return latest.drop_before if latest is not None else None

    def _poll(self) -> None:
        if self._tail is None:
            self._tail = PolicyTail(self._cluster)
        self._tail.catch_up()


def score(
    rewards: Callable[[Group], Awaitable[Group | Closed]],
    drop_before: DropBefore | None,
    cluster: Cluster,
    wanted: Callable[[Group | Closed], bool] = lambda ended: True,
) -> Work:
    """The work of one record of `rollouts`: its terminal; a dead letter if it cannot be read.
    Without `drop_before` nothing is too old; what is not `wanted` comes to nothing."""

    async def work(item: Item) -> list[Routed]:
        record = item.record
        if record is None:
            return []  # an offset without a record settles nothing
        try:
            ended = terminal(record)
        except (CorruptRecord, UnknownRecord) as error:
            return _unreadable(record, error)
        if not wanted(ended):
            return []
        if isinstance(ended, Group):
            ended = note(await _scored(ended))
        return [Routed("trajectories", outgoing(cluster, ended))]

    async def _scored(group: Group) -> Group | Closed:
        """Filtered before scoring, which may be dear, and after it, which may take long."""
        if (end := await _too_old(group)) is not None:
            return end
        ended = await rewards(group)
        if isinstance(ended, Closed):
            return ended
        return await _too_old(ended) or ended

    async def _too_old(group: Group) -> Closed | None:
        return None if drop_before is None else _stale(group, await drop_before.now())

    def _unreadable(record: Record, error: CorruptRecord | UnknownRecord) -> list[Routed]:
        code, letter = unreadable(cluster, record, error)
        routed = [Routed("dead-letters", letter)]
        if (group_id := _group_id(record)) is not None:
            end = Closed.now(group_id, "malformed", f"{code}: {error}")
            routed.append(Routed("trajectories", outgoing(cluster, end)))
        return routed

    return work


def rewards_operator(config: Config, text: Text) -> Rewards:
    """The scorers the configuration means; ConfigError when one cannot be loaded."""
    tasks = {
        name: RewardTask(
            score=load_scorer(config, task.reward),
            timeout_s=task.reward_timeout_s,
            retries=task.reward_retries,
        )
        for name, task in config.tasks.items()
    }
    return Rewards(tasks, text, UserCode("rewards"))


def load_scorer(config: Config, spec: str) -> rewards.Scorer:
    """A built-in scorer or the user's; ConfigError when it is neither."""
    if spec in rewards.BUILT_IN:
        return rewards.BUILT_IN[spec]
    if spec == "reasoning-gym":
        try:
            return rewards.reasoning_gym()
        except MissingPackage as error:
            raise ConfigError(str(error)) from error
    if ":" not in spec:
        known = ", ".join([*rewards.BUILT_IN, "reasoning-gym"])
        raise ConfigError(f"reward {spec}: is none of {known} and no module:function or file.py:f")
    return load(spec, config.base_dir)


def _stale(group: Group, drop_before: Version | None) -> Closed | None:
    if not is_stale(group, drop_before):
        return None
    message = f"oldest version {group.oldest}, dropped before {drop_before}"
    return Closed.now(group.group_id, "stale", message, group.task)


def _group_id(record: Record) -> str | None:
    """The record's key, if it is a prompt's coordinates."""
    try:
        group_id = (record.key or b"").decode()
        parse_group_id(group_id)
    except ValueError:
        return None
    return group_id
