"""`python -m deploy.device NAME DEVICE SHAPE ANSWER SUPERVISOR`: one check in this process. Its
figures, or why it was skipped, go into the file ANSWER; a failure is an exception."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from deploy.device import engines, group, training
from deploy.device.parts import Figures, Skipped
from deploy.lifeline import die_with

CHECKS: dict[str, Callable[[str, str], Figures]] = {
    "group": group.broadcasts,
    "trainer": training.steps,
    "hf-memory": partial(engines.publish_and_generate, kind="hf", through="memory"),
    "hf-group": partial(engines.publish_and_generate, kind="hf", through="group"),
    "vllm-memory": partial(engines.publish_and_generate, kind="vllm", through="memory"),
    "vllm-group": partial(engines.publish_and_generate, kind="vllm", through="group"),
}


def main(name: str, device: str, shape: str, answer: str, supervisor: str) -> None:
    die_with(int(supervisor))
    try:
        found: Figures = {"figures": CHECKS[name](device, shape)}
    except Skipped as why:
        found = {"skipped": str(why)}
    Path(answer).write_text(json.dumps(found, allow_nan=False))


if __name__ == "__main__":
    main(*sys.argv[1:])
