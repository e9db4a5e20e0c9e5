"""The gateway role: from a configuration to a server that ends with SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import threading
from contextlib import closing
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from connectors.config import Config, ConfigError, Gateway
from connectors.engines.pool import EnginePool
from connectors.engines.types import Sampling
from connectors.gateway.calls import Calls
from connectors.gateway.headers import Headers
from connectors.gateway.keys import Keys
from connectors.gateway.log import TrafficLog
from connectors.gateway.metrics import Metrics
from connectors.gateway.recorder import Recorder
from connectors.gateway.redaction import Redaction
from connectors.gateway.retries import Retries
from connectors.gateway.server import LATEST, GatewayServer
from connectors.gateway.sessions import Sessions
from connectors.kafka.locate import cluster
from connectors.run_dir import RunDir
from connectors.signals import stop_on_signals
from connectors.text import Text

NAME: Final = "gateway"
END_S: Final = 5.0
"""How long answers on their way, and then their last records, may take at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What the configuration names, read before anything is started."""

    section: Gateway
    keys: Keys
    redaction: Redaction
    text: Text

    @classmethod
    def of(cls, config: Config) -> Read:
        """ConfigError when something of it cannot be used."""
        section = checked(config)
        keys_file = section.keys_file
        read = cls(
            section=section,
            keys=Keys(None if keys_file is None else config.resolve(keys_file)),
            redaction=Redaction(section.redact),
            text=Text(config.resolve(config.model.path)),
        )
        if not read.text.has_template:
            raise ConfigError("gateway: the model's tokenizer has no chat template")
        return read


def serve_gateway(config: Config, run_dir: RunDir, port: int | None = None) -> None:
    """Serves until SIGTERM or SIGINT; registers in `run_dir` once it listens. ConfigError when the
    configuration is none of a gateway's, OSError when the port is taken."""
    read = Read.of(config)
    stop = stop_on_signals(threading.Event())
    recorder = Recorder(lambda: cluster(config, run_dir), run_dir.path / NAME, writer=NAME)
    with closing(recorder):
        asyncio.run(_serve(config, read, run_dir, port, recorder, stop))
        recorder.wait_empty(END_S)


def checked(config: Config) -> Gateway:
    """The section; ConfigError when it is missing or names a task that the run has not."""
    section = config.gateway
    if section is None:
        raise ConfigError("gateway: the configuration has no section [gateway]")
    if section.task is not None and section.task not in config.tasks:
        known = ", ".join(config.tasks)
        raise ConfigError(f"gateway.task: there is no task {section.task}; known are {known}")
    return section


async def _serve(
    config: Config,
    read: Read,
    run_dir: RunDir,
    port: int | None,
    recorder: Recorder,
    stop: threading.Event,
) -> None:
    pool = EnginePool(lambda: run_dir.engine_urls(config))
    server, calls = _parts(config, read, pool, recorder)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=END_S)
    await runner.setup()
    try:
        host, at = read.section.host, _port(read.section, run_dir) if port is None else port
        site = web.TCPSite(runner, host, at)
        await site.start()
        url = f"http://{host}:{runner.addresses[0][1]}"
        run_dir.register(NAME, url=url)
        print(f"{NAME} serves {url}/v1", flush=True)
        await asyncio.to_thread(stop.wait)
        await site.stop()
        await calls.close(END_S)
    finally:
        await runner.cleanup()
        await pool.close()


def _parts(
    config: Config, read: Read, pool: EnginePool, recorder: Recorder
) -> tuple[GatewayServer, Calls]:
    section, text = read.section, read.text
    sessions = Sessions(text, section.max_sessions)
    metrics = Metrics(
        waiting=lambda: recorder.num_waiting,
        running=lambda: calls.num_running,
        sessions=lambda: len(sessions),
    )
    traffic = TrafficLog(recorder, read.redaction, metrics, config.kafka.partitions)
    calls = Calls(text, pool, sessions, traffic, metrics, config.model.context_tokens)
    only = next(iter(config.tasks)) if len(config.tasks) == 1 else None
    server = GatewayServer(
        names=(LATEST, config.run.name),
        sampling=_sampling(config, text),
        text=text,
        pool=pool,
        keys=read.keys,
        headers=Headers(config.tasks, section.task or only),
        sessions=sessions,
        calls=calls,
        retries=Retries(section.retry_s),
        traffic=traffic,
        metrics=metrics,
        max_body_bytes=section.max_body_bytes,
    )
    return server, calls


def _sampling(config: Config, text: Text) -> Sampling:
    """Of requests that leave it open."""
    section = config.sampling
    return Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        max_tokens=section.max_tokens,
        stop_ids=tuple(section.stop_ids) or text.stop_ids,
    )


def _port(section: Gateway, run_dir: RunDir) -> int:
    """That of the configuration, else that of the run's last gateway: clients have its address."""
    before = run_dir.url(NAME)
    return section.port or (urlsplit(before).port or 0 if before is not None else 0)
