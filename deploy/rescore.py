"""What `headwater rescore` is asked for: a range of `rollouts`, and a reward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from connectors import plugins
from connectors.config import Config, ConfigError
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.topics import num_partitions
from deploy.log_range import resolve
from operators import rewards
from pipelines.rescore import Span


def reward_spec(config: Config, spec: str) -> str:
    """`spec`, a file in it looked up where the command is called, else beside the run's own code.
    ConfigError when it names nothing."""
    file, _, name = spec.rpartition(":")
    if file.endswith(".py"):
        here, beside = Path(file).resolve(), Path(config.base_dir, file).expanduser()
        if here.is_file():
            spec = f"{here}:{name}"
        elif not beside.is_file():
            raise ConfigError(f"--reward {spec}: there is neither {here} nor {beside}")
    plugins.check(spec, config.base_dir, rewards.NAMES)
    return spec


def span(cluster: Cluster, since: Sequence[str], until: Sequence[str]) -> Span:
    """The range `--from` and `--to` mean: by partition the first offset and the one to stop before,
    equal in partitions that they leave out."""
    offsets = dict.fromkeys(range(num_partitions(cluster, "rollouts")), 0)
    with closing(Reader(cluster, cluster.topic("rollouts"), offsets)) as reader:
        found, starts = resolve(reader, since, until), reader.starts()
    return {**starts, **found.first}, {**starts, **found.stop}
