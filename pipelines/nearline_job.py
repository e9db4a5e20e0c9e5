"""The near-line stage as a job of its own: what the configuration says, and running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from connectors import transcript_tokens
from connectors.config import Config, ConfigError, Task
from connectors.kafka.async_op import end_work
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.source import STOP, StopFlag
from connectors.kafka.topics import num_partitions
from connectors.plugins import load
from connectors.run_dir import RunDir
from connectors.signals import stop_on_signals
from connectors.text import Text
from connectors.traffic import Call
from connectors.transcripts import transcript
from operators.labels import COMBINE, Rule
from operators.live_groups import Room, value_key
from operators.session_state import Limits
from operators.traces import Recompute, Tokenise
from pipelines.facts import STAGE
from pipelines.job import belongs, run_flow, wait_for_log
from pipelines.nearline import nearline_flow
from pipelines.nearline_work import Settings
from pipelines.recovery_folder import RecoveryFolder

FEEDBACK: Final = "feedback"
"""`tasks.NAME.reward`: what was said is the reward."""


def run_nearline(
    config: Config, run_dir: RunDir, recompute: Recompute, *, stop: StopFlag = STOP
) -> None:
    """Runs until SIGTERM, SIGINT or `stop`. ConfigError, BrokerUnavailable, RecoveryLocked or
    RecoveryLost when it cannot start or go on."""
    stop_on_signals(stop)
    settings = settings_of(config, Text(config.resolve(config.model.path)), recompute)
    with closing(RecoveryFolder(run_dir.recovery(STAGE))) as folder:
        cluster = wait_for_log(config, run_dir, stop)
        if cluster is None:
            return
        flow = nearline_flow(cluster, settings, stop)
        run_dir.register(STAGE)
        try:
            run_flow(
                flow,
                folder,
                belongs(flow, cluster, config.kafka.partitions),
                written=lambda: _trimmed(cluster),
            )
        finally:
            end_work(_nothing)


def settings_of(config: Config, text: Text, recompute: Recompute) -> Settings:
    """ConfigError where it has no [nearline], or names a function that cannot be loaded."""
    section = config.nearline
    if section is None:
        raise ConfigError("nearline: the configuration has no section [nearline]")
    values = {name: task.feedback.value_of for name, task in config.tasks.items()}

    def key_of(call: Call) -> str:
        return value_key(call, values[call.task])

    return Settings(
        limits=Limits(
            idle_s=section.idle_s,
            max_calls=section.max_calls,
            rules={name: _rule(config, name, task) for name, task in config.tasks.items()},
            rewarded=frozenset(n for n, task in config.tasks.items() if task.reward == FEEDBACK),
            key_of=key_of,
            sessions_per_user=section.sessions_per_user,
            cap_window_s=section.cap_window_s,
        ),
        room=Room(
            context_tokens=config.model.context_tokens,
            tokens_per_session=section.tokens_per_session,
        ),
        temperature=config.sampling.temperature,
        tokenise=_tokenise(text),
        recompute=recompute,
        values=values,
    )


def _rule(config: Config, name: str, task: Task) -> Rule:
    said = task.feedback
    try:
        combine = said.combine if said.combine in COMBINE else load(said.combine, config.base_dir)
    except ConfigError as error:
        known = ", ".join(COMBINE)
        raise ConfigError(f"tasks.{name}.feedback.combine: {error}; known: {known}") from error
    return Rule(
        window_s=said.window_s,
        correction_s=said.correction_s,
        fallback={"wait": None, "default": said.default, "tracker": "tracker"}[said.provisional],
        combine=combine,
        names=tuple(said.names),
        low=said.low,
        high=said.high,
        timeout_s=task.reward_timeout_s,
    )


def _tokenise(text: Text) -> Tokenise:
    def tokenise(
        messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        row = {"messages": [dict(m) for m in messages], "tools": [dict(t) for t in tools]}
        return transcript_tokens.tokenise(text, transcript(row, "messages"))

    return tokenise


def _trimmed(cluster: Cluster) -> str | None:
    """`rollouts`, where it no longer holds all that was written: facts of it may be gone. Else a
    job without its snapshots starts anew, and finds out what it had written."""
    offsets = dict.fromkeys(range(num_partitions(cluster, "rollouts")), 0)
    with closing(Reader(cluster, cluster.topic("rollouts"), offsets)) as reader:
        return cluster.topic("rollouts") if any(reader.starts().values()) else None


async def _nothing() -> None:
    """No client has to be closed."""
