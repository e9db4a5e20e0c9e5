"""`headwater doctor`: whether this machine can run Headwater, and how to fix what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from connectors.broker.errors import BrokerError
from connectors.config import Config, ConfigError, load
from connectors.engines.vllm import version
from connectors.kafka.client import KafkaFailure
from connectors.kafka.locate import cluster
from connectors.kafka.security import settings
from connectors.kafka.topics import partition_counts
from connectors.prompt_lines import GENERATOR_PREFIX
from connectors.run_dir import RunDir
from deploy import gpus, vllm_checks
from deploy.errors import EnvironmentFailure
from deploy.log import broker_security
from deploy.run_folder import check_files, check_port
from trainer.staleness import configured_policy

_NEEDED: Final = (
    "torch", "transformers", "deepspeed", "bytewax", "kafka-python", "pyarrow", "numpy", "msgspec",
    "pydantic", "aiohttp",
)  # fmt: skip
MIN_MEMORY_BYTES: Final = 3 << 30
"""What the quickstart's roles take together, with some room."""
MIN_DISK_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """`fix` says what was found or, when not ok, what to do."""

    name: str
    ok: bool
    fix: str


def examine(config_file: str | None, overrides: Sequence[str] = ()) -> list[Check]:
    """Every check of the machine and, when a file is given, of what that configuration, with the
    `overrides` applied, needs."""
    checks = [_python(), *_packages(), _torch(), _memory(), _loopback()]
    config: Config | None = None
    if config_file is not None:
        try:
            config = load(config_file, overrides)
            configured_policy(config)
            checks.append(Check("configuration", True, config_file))
        except ConfigError as error:
            checks.append(Check("configuration", False, str(error)))
    checks.append(_disk(RunDir.of(config).path if config else Path.cwd()))
    if config is not None and config_file is not None:
        checks += _needs(config)
        if config.engine.kind == "vllm" and not config.engine.urls:
            checks += _vllm(config, [config_file, *overrides])
    return checks


def _python() -> Check:
    found = sys.version.split()[0]
    ok = (3, 11) <= sys.version_info[:2] < (3, 13)
    return Check("python", ok, found if ok else f"{found}: use Python 3.11 or 3.12")


def _packages() -> Iterator[Check]:
    missing = []
    found = []
    for package in _NEEDED:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    text = f"pip install {' '.join(missing)}" if missing else ", ".join(found)
    yield Check("packages", not missing, text)


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", False, f"cannot be imported: {error}")
    torch.zeros(2).sum()
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        return Check("torch", True, f"{torch.cuda.device_count()} GPUs ({', '.join(names)})")
    return Check("torch", True, "CPU only; no compiler is needed")


def _memory() -> Check:
    free = psutil.virtual_memory().available
    text = f"{free / 2**30:.1f} GiB free"
    ok = free >= MIN_MEMORY_BYTES
    return Check("memory", ok, text if ok else f"{text}: {MIN_MEMORY_BYTES >> 30} GiB are needed")


def _disk(folder: Path) -> Check:
    place = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(place).free
    text = f"{free / 2**30:.1f} GiB free at {place}"
    if not os.access(place, os.W_OK):
        return Check("disk", False, f"{place} cannot be written: choose another --run-dir")
    ok = free >= MIN_DISK_BYTES
    return Check("disk", ok, text if ok else f"{text}: make room for the log and checkpoints")


def _loopback() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)):
            return Check("loopback", True, "a port can be opened on 127.0.0.1")
    except OSError as error:
        return Check("loopback", False, f"no port can be opened on 127.0.0.1: {error.strerror}")


def _needs(config: Config) -> Iterator[Check]:
    """What this configuration needs beyond the machine."""
    try:
        check_files(config)
        yield Check("files", True, "the model and every file it names exist")
    except (ConfigError, EnvironmentFailure) as error:
        yield Check("files", False, str(error))
    if config.kafka.bootstrap_servers is not None:
        yield _reachable(config)
    elif config.broker.port:
        try:
            check_port(config.broker.port)
            yield Check("port", True, f"{config.broker.port} is free")
        except EnvironmentFailure as error:
            yield Check("port", False, f"{error}: set another broker.port, or 0 for a free one")
    if config.kafka.security.security_protocol != "PLAINTEXT":
        yield _security(config)
    if config.engine.num_gpus or config.trainer.num_gpus:
        yield _gpus(config)
    if any((task.prompts or "").startswith(GENERATOR_PREFIX) for task in config.tasks.values()):
        yield _reasoning_gym()


def _gpus(config: Config) -> Check:
    try:
        placed = gpus.placed(config)
    except EnvironmentFailure as error:
        return Check("gpus", False, str(error))
    return Check("gpus", True, ", ".join(f"{role}: {of or 'none'}" for role, of in placed.items()))


def _vllm(config: Config, source: Sequence[str]) -> Iterator[Check]:
    """Whether engines of that kind can be started for this configuration; `source` is its file and
    the overrides."""
    reason = vllm_checks.missing(config)
    yield Check("vllm", reason is None, reason or " ".join(version.installed() or ()))
    folder = config.resolve(config.model.path)
    if not (folder / "config.json").is_file():
        folder = RunDir.of(config).path / "model"  # where a run builds it
    if reason is not None:
        return
    if not (folder / "config.json").is_file():
        yield Check("engine", True, "not checked: the model is built when the run starts")
        return
    refused = vllm_checks.refusal(folder, source)
    yield Check("engine", refused is None, refused or f"vLLM can serve {folder}")
    if refused is None and config.engine.num_gpus == 0:
        yield _engine_memory(config, folder)


def _engine_memory(config: Config, folder: Path) -> Check:
    parts = (*vllm_checks.memory_bytes(config, folder), vllm_checks.OWN_BYTES)
    needed = config.engine.count * sum(parts)
    free = psutil.virtual_memory().available
    weights, cache, own = (f"{part / 2**30:.1f}" for part in parts)
    text = (
        f"engines take about {needed / 2**30:.1f} GiB (each of {config.engine.count}: weights "
        f"{weights}, KV cache {cache}, vLLM {own}), {free / 2**30:.1f} GiB are free"
    )
    if needed <= free:
        return Check("engine memory", True, text)
    remedy = "lower engine.options.kv_cache_memory_bytes or engine.count"
    return Check("engine memory", False, f"{text}: {remedy}")


def _reachable(config: Config) -> Check:
    servers = config.kafka.bootstrap_servers
    try:
        partition_counts(cluster(config, RunDir.of(config), unavailable_s=5.0))
    except (KafkaFailure, ConfigError) as error:
        return Check("broker", False, f"kafka.bootstrap_servers = {servers}: {error}")
    return Check("broker", True, f"{servers} answers")


def _security(config: Config) -> Check:
    """The files and the password that clients and the embedded broker need."""
    security = config.kafka.security
    try:
        asked = settings(security, config.resolve)
        known = broker_security(config).users if config.kafka.bootstrap_servers is None else None
    except (ConfigError, BrokerError) as error:
        return Check("security", False, str(error))
    if known is not None and not known.has(
        asked["sasl_plain_username"], asked["sasl_plain_password"]
    ):
        text = f"{config.broker.users} has no user {security.sasl_username} with this password"
        return Check("security", False, text)
    return Check("security", True, security.security_protocol)


def _reasoning_gym() -> Check:
    try:
        version = importlib.metadata.version("reasoning-gym")
    except importlib.metadata.PackageNotFoundError:
        return Check("reasoning-gym", False, "pip install -e '.[reasoning-gym]'")
    return Check("reasoning-gym", True, version)
