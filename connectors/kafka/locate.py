"""The cluster a configuration means: Apache Kafka if it names one, else the embedded broker."""

from __future__ import annotations

import dataclasses

from connectors.config import Config
from connectors.kafka.client import BrokerUnavailable, Cluster
from connectors.kafka.security import settings
from connectors.run_dir import RunDir


def topics(partitions: int) -> dict[str, int]:
    """Every topic of a run (without namespace) and its partition count."""
    many = (
        "prompts", "rollouts", "trajectories", "dead-letters", "evaluations",
        "agent-traffic", "feedback",
    )  # fmt: skip
    return dict.fromkeys(many, partitions) | {"policy": 1, "steps": 1}


def cluster(config: Config, run_dir: RunDir, *, unavailable_s: float = 60.0) -> Cluster:
    """The run's log; clients of it wait `unavailable_s` for a broker that does not answer.
    BrokerUnavailable when the run has no broker yet, ConfigError when a file that
    `kafka.security` names is missing."""
    return Cluster(
        bootstrap_servers=_bootstrap_servers(config, run_dir),
        namespace=config.run.namespace,
        max_message_bytes=config.kafka.max_message_bytes,
        security=settings(config.kafka.security, config.resolve),
        unavailable_s=unavailable_s,
    )


def source(config: Config, own: Cluster) -> Cluster:
    """Where the `trajectories` are that the run's steps train on: its own, but for a shadow's."""
    if config.trainer.source is None:
        return own
    return dataclasses.replace(own, namespace=config.trainer.source.namespace)


def _bootstrap_servers(config: Config, run_dir: RunDir) -> str:
    if config.kafka.bootstrap_servers is not None:
        return config.kafka.bootstrap_servers
    if config.broker.port:
        return f"127.0.0.1:{config.broker.port}"
    address = run_dir.url("broker")
    if address is None:
        raise BrokerUnavailable(f"no broker is registered in {run_dir.path}: start it first")
    return address
