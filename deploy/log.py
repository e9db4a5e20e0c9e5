"""Reaching a run's log: the cluster a configuration means, and the embedded broker behind it."""

from __future__ import annotations

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from deploy.errors import EnvironmentFailure


def bootstrap_servers(config: Config, run_dir: RunDir) -> str:
    """host:port of the log: Apache Kafka if the configuration names one, else the embedded broker."""
    if config.kafka.bootstrap_servers is not None:
        return config.kafka.bootstrap_servers
    if config.broker.port:
        return f"127.0.0.1:{config.broker.port}"
    address = run_dir.url("broker")
    if address is None:
        raise EnvironmentFailure(f"no broker is registered in {run_dir.path}: start it first")
    return address


def cluster(config: Config, run_dir: RunDir, *, unavailable_s: float = 60.0) -> Cluster:
    """The run's log; clients of it wait `unavailable_s` for a broker that does not answer."""
    return Cluster(
        bootstrap_servers=bootstrap_servers(config, run_dir),
        namespace=config.run.namespace,
        max_message_bytes=config.kafka.max_message_bytes,
        security=config.kafka.security,
        unavailable_s=unavailable_s,
    )
