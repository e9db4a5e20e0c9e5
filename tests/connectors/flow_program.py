"""A whole dataflow for the kill tests, in a process of its own: granted source, async work, sink.

python flow_program.py BOOTSTRAP RECOVERY_DIR
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path

import bytewax.operators as op
from bytewax._bytewax import cli_main
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig

from connectors.kafka.async_op import AsyncWork
from connectors.kafka.client import Cluster
from connectors.kafka.sink import LogSink, Outgoing
from connectors.kafka.source import STOP, Item, ItemReader, LogSource
from pipelines.recovery_folder import forget_unfinished


async def work(item: Item) -> list[Outgoing]:
    """Mostly short, sometimes longer than several snapshots; its output differs from process to
    process, as generation does."""
    assert item.record is not None
    await asyncio.sleep(random.choice([0.005, 0.05, 0.1, 0.6]))
    version = f"{item.min_version} {item.resubmitted}"
    value = f"{item.record.value.decode()} by {os.getpid()} at {version}"
    return [Outgoing(key=str(item.origin), value=value.encode())]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    cluster = Cluster(bootstrap_servers=sys.argv[1], unavailable_s=30.0)
    flow = Dataflow("flow")
    items = op.input("in", flow, LogSource(cluster, "prompts", granted=True))
    done = op.stateful_batch("work", items, AsyncWork(work, ItemReader(cluster, "prompts")))
    op.output("out", done, LogSink(cluster, "rollouts", "rollout"))
    folder = Path(sys.argv[2])
    forget_unfinished(sorted(folder.glob("part-*.sqlite3")))
    recovery = RecoveryConfig(folder)
    cli_main(flow, epoch_interval=timedelta(seconds=0.1), recovery_config=recovery)


if __name__ == "__main__":
    main()
