"""A trainer that gets no further than the first byte of an update.

python weights_sender.py ENGINE_URL WIDTH LAYERS SEED EPOCH TIMEOUT_S die|stop
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch

from connectors.records import Version
from connectors.weights import Snapshot, WeightsSender, plan, shapes_of
from connectors.weights.group import Group
from tests.connectors.weights_engine import model

url, width, layers, seed, epoch, timeout_s, how = sys.argv[1:]
broadcast = Group.broadcast


def begin_only(self: Group, tensors: list[torch.Tensor], *args: Any) -> None:
    broadcast(self, tensors[:1], *args)
    print("began", flush=True)
    os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)


Group.broadcast = begin_only  # type: ignore[method-assign]
named = dict(model(int(width), int(layers), int(seed)).named_parameters())
snapshot = Snapshot.take(named, plan(shapes_of(named), torch.float32))
WeightsSender(float(timeout_s)).publish(snapshot, Version(0, 7), int(epoch), [url])
