"""A trainer to be lost in the middle of an update, or one that gets no further than its first byte.

python weights_sender.py SNAPSHOT_FILE ENGINE_URL EPOCH TIMEOUT_S die|stop|load
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from connectors.records import Version
from connectors.weights import Peer, Plan, Snapshot, WeightsSender
from connectors.weights.group import Group
from connectors.weights.memory import Segment


def begin_update(
    folder: Path, snapshot: Snapshot, url: str, epoch: int, timeout_s: float, how: str
) -> subprocess.Popen[str]:
    """Starts it; returns when it began. `folder` takes the snapshot's file. `how`: it dies or stops
    at the first byte of a broadcast, or has its memory loaded from."""
    file = folder / "snapshot.pt"
    torch.save((msgspec.json.encode(snapshot.plan), snapshot.buckets, snapshot.digest), file)
    process = subprocess.Popen(
        [sys.executable, __file__, str(file), url, str(epoch), str(timeout_s), how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "began"
    return process


def main(file: str, url: str, epoch: str, timeout_s: str, how: str) -> None:
    layout, buckets, digest = torch.load(file)
    plan = msgspec.json.decode(layout, type=Plan)
    snapshot = Snapshot(plan, buckets, digest).copied(Segment.create(plan))
    sender = WeightsSender(float(timeout_s), "memory" if how == "load" else "group")
    if how == "load":
        print("began", flush=True)
    else:
        _break_off(signal.SIGKILL if how == "die" else signal.SIGSTOP)
    sender.publish(snapshot, Version(0, 7), int(epoch), [Peer(url)])


def _break_off(by: signal.Signals) -> None:
    broadcast = Group.broadcast

    def begin_only(self: Group, tensors: list[torch.Tensor], *args: Any) -> None:
        broadcast(self, tensors[:1], *args)
        print("began", flush=True)
        os.kill(os.getpid(), by)

    Group.broadcast = begin_only  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
