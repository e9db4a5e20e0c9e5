"""`headwater prompts load`: checks prompts and writes them into a run's topic.

What a stage would dead-letter anyway is refused here already, with its line number, so that a
typing error costs no grant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from connectors.config import Config, ConfigError, load
from connectors.kafka.client import Producer
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.prompt_lines import GENERATOR_PREFIX, open_lines
from connectors.records import Prompt, encode
from connectors.run_dir import RunDir
from deploy import run_folder
from deploy.log import opened

FLUSH_EVERY: Final = 1000
"""Records held in memory at most."""
MAX_PROBLEMS: Final = 5
"""Lines explained one by one; the rest is counted."""


@dataclass(slots=True)
class Loaded:
    written: int = 0
    rejected: int = 0
    problems: list[str] = field(default_factory=list)

    def reject(self, where: str, why: str) -> None:
        self.rejected += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{where}: {why}")


def load_prompts(
    run: str,
    *,
    file: str | None = None,
    generator: str | None = None,
    count: int = 100,
    seed: int = 0,
    task: str | None = None,
) -> Loaded:
    """Writes the prompts of `file` (JSONL) or of a reasoning-gym `generator` into the topic of
    `run` (a run's folder or a TOML file), round-robin over its partitions. `task` is for prompts
    that name none; the only task of the run when it is not given."""
    if (file is None) == (generator is None):
        raise ConfigError("prompts load: give either FILE or --reasoning-gym NAME")
    config, run_dir = run_named(run)
    if task is None and len(config.tasks) == 1:
        task = next(iter(config.tasks))
    if task is not None and task not in config.tasks:
        raise ConfigError(f"--task {task}: is no task of the run; known: {', '.join(config.tasks)}")
    if file is not None:
        found = _found(str(Path(file).resolve()), None, seed)
    else:
        found = _found(f"{GENERATOR_PREFIX}{generator}", count, seed)
    loaded = Loaded()
    with opened(config, run_dir) as cluster:
        partitions = config.kafka.partitions
        ensure_topics(cluster, topics(partitions))
        producer = Producer(cluster)
        for where, line in found:
            prompt = _checked(line, where, task, config, loaded)
            if prompt is not None:
                key = prompt.id.encode() if prompt.id is not None else None
                partition = loaded.written % partitions
                producer.send(cluster.topic("prompts"), partition, encode(prompt), key=key)
                loaded.written += 1
                if loaded.written % FLUSH_EVERY == 0:
                    producer.flush()
        producer.flush()
        producer.close()
    return loaded


def run_named(run: str) -> tuple[Config, RunDir]:
    """Of a run's folder, or of its TOML file."""
    if Path(run).is_file():
        config = load(run)
        return config, RunDir.of(config)
    run_dir = RunDir(run)
    return run_folder.load_run(run_dir), run_dir


def _checked(
    line: bytes, where: str, task: str | None, config: Config, loaded: Loaded
) -> Prompt | None:
    try:
        value: Any = msgspec.json.decode(line)
        if isinstance(value, dict) and task is not None:
            value.setdefault("task", task)
        prompt = msgspec.convert(value, Prompt)
    except (msgspec.DecodeError, ValueError) as error:  # a ValidationError is both
        loaded.reject(where, str(error))
        return None
    if prompt.task not in config.tasks:
        loaded.reject(where, f"unknown task {prompt.task!r}; known: {', '.join(config.tasks)}")
        return None
    return prompt


def _found(source: str, count: int | None, seed: int) -> Iterator[tuple[str, bytes]]:
    """(where it stands, line) of each prompt; the first `count` when that is given."""
    lines = open_lines(source, base_dir="", seed=seed)
    num_lines = lines.num_lines if count is None else count
    assert num_lines is not None  # a generator comes with a count
    for k in range(num_lines):
        yield f"{source} {k + 1}", lines.line(k)
