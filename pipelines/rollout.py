"""The rollout half: granted prompts in, one terminal a prompt out.

prompts ─▶ [granted source] ─▶ [roll: n agents on the engines] ─▶ rollouts
                                                              └─▶ dead-letters
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import bytewax.operators as op
from bytewax.dataflow import Stream

from connectors.config import Config, ConfigError
from connectors.engines.types import Engine, Sampling
from connectors.kafka.async_op import AsyncWork
from connectors.kafka.client import Cluster
from connectors.kafka.dead_letters import dead_letter
from connectors.kafka.source import STOP, Item, ItemReader, LogSource, StopFlag
from connectors.kafka.terminals import outgoing
from connectors.kafka.topics import num_partitions
from connectors.plugins import load
from connectors.text import Text
from operators import agents
from operators.rollout import AgentTask, Rollout, Settings, check_agent
from operators.user_code import UserCode
from pipelines.closures import note
from pipelines.routing import Routed, write

Work = Callable[[Item], Awaitable[Sequence[Routed]]]


def prompts_source(cluster: Cluster, stop: StopFlag = STOP, *, anew: bool = False) -> LogSource:
    """`anew`: from offset 0, so that a granted prompt that retention removed is closed, not
    forgotten."""
    first = dict.fromkeys(range(num_partitions(cluster, "prompts")), 0) if anew else None
    return LogSource(cluster, "prompts", granted=True, stop=stop, first=first)


def rollout_half(prompts: Stream, cluster: Cluster, work: Work, stop: StopFlag = STOP) -> None:
    """What becomes of the items of `prompts_source`; `work` is `roll(...)`."""
    refetch = ItemReader(cluster, "prompts")
    rolled = op.stateful_batch("roll", prompts, AsyncWork(work, refetch, stop=stop))
    write("rollout", rolled, cluster, "rollouts")


def roll(rollout: Rollout, cluster: Cluster) -> Work:
    """The work of one prompt: its terminal, and its dead letter if it could not be read."""

    async def work(item: Item) -> list[Routed]:
        value = item.record.value if item.record is not None else None
        orders = item.orders.take if item.orders is not None else None
        rolled = await rollout(value, item.origin, item.min_version, item.resubmitted, orders)
        routed = [Routed("rollouts", outgoing(cluster, note(rolled.terminal)))]
        if (letter := rolled.dead_letter) is not None:
            written = dead_letter(
                cluster, item.origin, value or b"", code=letter.code, message=letter.message
            )
            routed.append(Routed("dead-letters", written))
        return routed

    return work


def rollout_operator(config: Config, engine: Engine, text: Text) -> Rollout:
    """The operator the configuration means; ConfigError when an agent cannot be loaded."""
    tasks = {
        name: AgentTask(agent=load_agent(config, task.agent), group_size=task.group_size)
        for name, task in config.tasks.items()
    }
    return Rollout(settings(config), tasks, engine, text, UserCode("agents"))


def settings(config: Config) -> Settings:
    return Settings(
        seed=config.run.seed,
        sampling=Sampling(
            temperature=config.sampling.temperature,
            top_p=config.sampling.top_p,
            max_tokens=config.sampling.max_tokens,
            stop_ids=tuple(config.sampling.stop_ids),
        ),
        context_tokens=config.model.context_tokens,
        time_cap_s=config.staleness.time_cap_s,
    )


def load_agent(config: Config, spec: str) -> agents.Agent:
    """A built-in agent or the user's; ConfigError when it is neither."""
    if spec in agents.BUILT_IN:
        return agents.BUILT_IN[spec]
    if ":" not in spec:
        known = ", ".join(agents.BUILT_IN)
        raise ConfigError(f"agent {spec}: is none of {known} and no module:function or file.py:f")
    agent = load(spec, config.base_dir)
    try:
        check_agent(agent)
    except TypeError as error:
        raise ConfigError(f"agent {spec}: {error}") from error
    return agent
