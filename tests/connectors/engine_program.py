"""An `hf` engine as a process of its own: `engine_program.py CONFIG RUN_DIR NAME [dying]`. The
fourth argument makes its decoder fail after some tokens."""

from __future__ import annotations

import sys
from typing import Any

from connectors.config import load
from connectors.engines import sampling
from connectors.engines.server import serve_engine
from connectors.run_dir import RunDir


def _fail_after(num_steps: int) -> None:
    draw, left = sampling.draw, [num_steps]

    def failing(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no memory for this step")
        return draw(*arguments)

    sampling.draw = failing


if __name__ == "__main__":
    if sys.argv[4:] == ["dying"]:
        _fail_after(10)
    serve_engine(load(sys.argv[1]), RunDir(sys.argv[2]), sys.argv[3])
