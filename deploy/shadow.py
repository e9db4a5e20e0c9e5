"""The folder of a shadow trainer: made from a run's configuration, then a run's folder like any.

DIR/config.toml   the run's, with a namespace and checkpoints of its own, and [trainer.source]
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil
import tomli_w

from connectors.config import Config, ConfigError, Source, load
from connectors.files import replace_file
from connectors.kafka.client import Cluster, Reader
from connectors.kafka.tail import PolicyTail
from connectors.kafka.topics import partition_counts
from connectors.run_dir import RunDir
from deploy import run_folder

_log = logging.getLogger(__name__)

MAY_CHANGE: Final = ("trainer.", "checkpoint.", "run.seed=", "model.path=")
_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,100}")
_WRITERS: Final = ("trainer", "rollout", "reward", "dataflow")


def check_overrides(overrides: Sequence[str]) -> None:
    """ConfigError for a key that a shadow trainer cannot change."""
    for override in overrides:
        key = override.strip()
        if not key.startswith(MAY_CHANGE) or key.startswith("trainer.source"):
            raise ConfigError(
                f"--set {override}: a shadow trains on the run's trajectories as they are: it may "
                "change [trainer], [checkpoint], run.seed and model.path"
            )


def check_folder(folder: RunDir) -> None:
    """ConfigError for a folder that holds something else."""
    if folder.config_file.is_file() or not folder.path.is_dir():
        return
    if other := sorted(f.name for f in folder.path.iterdir() if f.name != run_folder.LOCK):
        raise ConfigError(
            f"{folder.path}: holds other files ({other[0]}); a shadow needs a folder of its own"
        )


def make(
    run: RunDir, folder: RunDir, log: Cluster, overrides: Sequence[str], trajectories: str | None
) -> None:
    """Makes the folder of a new shadow on `run`, whose log is `log`. `trajectories`: another
    namespace than the run's to train on."""
    if not _NAME.fullmatch(folder.path.name):
        raise ConfigError(f"{folder.path.name}: the folder's name becomes a topic's; use a-z0-9._-")
    before = run_folder.load_run(run)
    if before.trainer.source is not None:
        raise ConfigError(f"{run.path}: is a shadow's folder itself; name the run it is of")
    if before.nearline is not None:
        raise ConfigError(
            f"{run.path}: trains live traffic, and a shadow trains in the order of the grants, of "
            "which live traffic has none: a run with [nearline] has no shadow"
        )
    config = load(run.config_file, overrides)
    url = config.checkpoint.url
    if url == before.checkpoint.url and any(o.startswith("checkpoint.url") for o in overrides):
        raise ConfigError(f"checkpoint.url: {url} holds the run's own checkpoints")
    table = config.model_dump(exclude_none=True)
    if url == before.checkpoint.url:
        table["checkpoint"].pop("url", None)
    table["run"] |= {
        "name": folder.path.name,
        "dir": str(folder.path),
        "namespace": f"{before.run.namespace}shadow.{folder.path.name}.",
    }
    source = _source(run, before, log, trajectories or before.run.namespace)
    table["trainer"]["source"] = source.model_dump()
    folder.path.mkdir(parents=True, exist_ok=True)
    place = run_folder.Source(folder=before.base_dir)
    replace_file(folder.path / "source.json", msgspec.json.encode(place))
    run_folder.write_config(folder, tomli_w.dumps(table).encode())
    if any(source.starts):
        _log.warning(
            "the beginning of %strajectories is gone (trimmed): the shadow trains the initial "
            "model on what is left, and passes over the groups before",
            source.namespace,
        )


def resume(
    run: RunDir, folder: RunDir, overrides: Sequence[str], trajectories: str | None
) -> tuple[str, ...]:
    """Takes changed settings over into a shadow's folder: 'key: old -> new'. ConfigError when it is
    not a shadow's of this run, or its log depends on a changed key."""
    source = run_folder.load_run(folder).trainer.source
    if source is None:
        raise ConfigError(f"{folder.path}: is the folder of a run; a shadow needs one of its own")
    if Path(source.run) != run.path:
        raise ConfigError(f"{folder.path}: is a shadow of {source.run}, not of {run.path}")
    if trajectories not in (None, source.namespace):
        raise ConfigError(
            f"--trajectories {trajectories}: {folder.path} trains on {source.namespace} since its "
            "start; choose another folder"
        )
    if not overrides:
        return ()
    config = run_folder.with_source(load(folder.config_file, overrides), folder)
    return run_folder.retake(config, folder)


def is_at_work(run: RunDir) -> bool:
    """Whether anything on this machine may write to the run's log."""
    return any(role.name in _WRITERS and _is_ours(role.pid) for role in run.roles())


def _is_ours(pid: int) -> bool:
    """A process that got the pid of a dead role is none of ours."""
    try:
        return any("headwater" in part for part in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _source(run: RunDir, config: Config, log: Cluster, namespace: str) -> Source:
    """Where a shadow that starts now reads, and how far some of what was granted may be missing: in
    another namespace, or where retention removed the beginning."""
    partitions = dict.fromkeys(range(config.kafka.partitions), 0)
    trained = replace(log, namespace=namespace)
    if partition_counts(trained, ["trajectories"]).get("trajectories") != len(partitions):
        raise ConfigError(
            f"{trained.topic('trajectories')} is no topic of {len(partitions)} partitions: rescore "
            "the run's rollouts into that namespace first"
        )
    with (
        closing(PolicyTail(log)) as tail,
        closing(Reader(log, log.topic("prompts"), partitions)) as prompts,
        closing(Reader(trained, trained.topic("trajectories"), partitions)) as reader,
    ):
        tail.catch_up()
        starts, ends = _listed(reader.starts()), _listed(reader.ends())
        found: dict[str, Any] = {
            "run": str(run.path),
            "grants": config.run.namespace,
            "namespace": namespace,
            "starts": starts,
        }
        partly = namespace != config.run.namespace or any(starts) or any(prompts.starts().values())
        if partly:
            limits = tail.latest.limits if tail.latest is not None else [0] * len(partitions)
            found |= {"ends": ends, "limits": list(limits)}
    return Source(**found)


def _listed(offsets: dict[int, int]) -> list[int]:
    return [offsets[p] for p in sorted(offsets)]
