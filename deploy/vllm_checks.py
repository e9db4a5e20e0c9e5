"""Whether engines of kind `vllm` can start here: asked before a run starts, and by `doctor`.

`python -m deploy.vllm_checks FOLDER CONFIG [KEY=VALUE ...]` prepares such an engine for the model
in FOLDER as the engine role would, up to where it would take its memory; it ends, and says why, as
that role does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from connectors.config import Config, load
from connectors.engines.vllm import version
from deploy import errors

OWN_BYTES: Final = 1 << 30
"""What a vLLM engine takes on the CPU beside weights and KV cache, with some room (0.54 GB was
measured for a small model)."""
_SIZES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def missing(config: Config) -> str | None:
    """One line when the run's engines need a vLLM that is not installed; else None."""
    own = config.engine.kind == "vllm" and not config.engine.urls
    return version.problem() if own else None


def refusal(folder: Path, source: Sequence[str]) -> str | None:
    """Why an engine of the configuration (its file and overrides) cannot serve the model in
    `folder`, in one line; None when it can. In a process of its own: it takes vLLM some ten
    seconds."""
    command = [sys.executable, "-P", "-m", "deploy.vllm_checks", str(folder), *source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == errors.OK:
        return None
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"ended with {done.returncode}"


def memory_bytes(config: Config, folder: Path) -> tuple[int, int]:
    """(weights, KV cache) of one engine on the CPU, about."""
    from transformers import AutoConfig

    from connectors.engines.vllm.options import engine_arguments

    model = AutoConfig.from_pretrained(folder, local_files_only=True)
    arguments = engine_arguments(config, folder, model, on_cpu=True) | config.engine.options
    table = json.loads((folder / "config.json").read_text())
    stored = _SIZES.get(table.get("dtype") or table.get("torch_dtype") or "float32", 4)
    files = [*folder.glob("*.safetensors")] or [*folder.glob("*.bin")]
    num_bytes = sum(file.stat().st_size for file in files)
    return num_bytes * _SIZES[config.model.dtype] // stored, arguments["kv_cache_memory_bytes"]


def main(folder: str, config_file: str, *overrides: str) -> int:
    from connectors.engines.vllm import build

    config = load(config_file, overrides)
    model = config.model.model_copy(update={"path": folder})
    try:
        build(config.model_copy(update={"model": model}))
    except Exception as error:  # the process's edge
        answer = errors.explain(error)
        if answer is None:
            raise
        print(answer[1], file=sys.stderr)
        return answer[0]
    return errors.OK


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
