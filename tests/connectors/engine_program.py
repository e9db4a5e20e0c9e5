"""An engine as a process of its own: `engine_program.py CONFIG RUN_DIR NAME`. SIGUSR1 makes its
decoder fail: the next step of `hf`, the engine core's process of `vllm`."""

from __future__ import annotations

import signal
import sys
from typing import Any

import psutil

from connectors.config import load
from connectors.engines.server import serve_engine
from connectors.run_dir import RunDir


def break_decoder(kind: str) -> None:
    if kind == "vllm":
        for child in psutil.Process().children():
            child.kill()
        return
    from connectors.engines.hf import sampling

    def failing(*_: Any) -> Any:
        raise MemoryError("no memory for this step")

    sampling.draw = failing


if __name__ == "__main__":
    config = load(sys.argv[1])
    signal.signal(signal.SIGUSR1, lambda *_: break_decoder(config.engine.kind))
    serve_engine(config, RunDir(sys.argv[2]), sys.argv[3])
