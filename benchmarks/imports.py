"""How fast a foreign log becomes live traffic, and in how much memory: `headwater logs import`.

    python -P -m benchmarks.imports [--megabytes 500] [--format openai|messages|otel]

Writes a file of that size, imports it into a run of its own in a temporary folder (the embedded
broker beside it), imports it again, and prints seconds, rate and the importer's peak resident
memory, that of the broker apart.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

CONFIG: Final = '[model]\npath = "m"\n[tasks.support]\nreward = "exact_match"\n'
WORDS: Final = ("the", "weather", "in", "Bern", "is", "mild", "and", "will", "be", "tomorrow")


def _text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


def _messages(rng: random.Random, n: int) -> dict[str, Any]:
    turns = [
        {"role": role, "content": f"{n} {_text(rng, 60)}"}
        for _ in range(2)
        for role in ("user", "assistant")
    ]
    return {"messages": turns}


def _openai(rng: random.Random, n: int) -> dict[str, Any]:
    ids = [rng.randrange(50_000) for _ in range(500)]
    content = [{"token": "x", "logprob": -rng.random()} for _ in range(100)]
    answer = {"role": "assistant", "content": _text(rng, 70)}
    return {
        "session_id": f"s{n // 4}",
        "time": 1790000000 + n,
        "request": {
            "model": "support",
            "temperature": 1.0,
            "messages": [{"role": "user", "content": _text(rng, 300)}],
        },
        "response": {
            "id": f"chatcmpl-{n}",
            "model": "0.1",
            "prompt_token_ids": ids[100:],
            "choices": [
                {"message": answer, "token_ids": ids[:100], "logprobs": {"content": content}}
            ],
        },
    }


def _otel(rng: random.Random, n: int) -> dict[str, Any]:
    said = {
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": [
            {"role": "user", "parts": [{"type": "text", "content": _text(rng, 300)}]}
        ],
        "gen_ai.output.messages": [
            {"role": "assistant", "parts": [{"type": "text", "content": _text(rng, 70)}]}
        ],
    }
    attributes = [
        {"key": k, "value": {"stringValue": v if isinstance(v, str) else json.dumps(v)}}
        for k, v in said.items()
    ]
    span = {
        "traceId": f"{n // 4:032x}",
        "spanId": f"{n:016x}",
        "startTimeUnixNano": str((1790000000 + n) * 10**9),
        "attributes": attributes,
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


ROWS: Final[dict[str, Callable[[random.Random, int], dict[str, Any]]]] = {
    "openai": _openai,
    "messages": _messages,
    "otel": _otel,
}


def write(path: Path, form: str, num_bytes: int) -> int:
    """The number of rows."""
    rng, row, n = random.Random(0), ROWS[form], 0
    with path.open("w") as file:
        while file.tell() < num_bytes:
            file.write(json.dumps(row(rng, n)) + "\n")
            n += 1
    return n


def importing(path: Path, run: Path) -> tuple[dict[str, Any], float, float]:
    """What it answered, seconds, and its peak memory in MiB."""
    command = [sys.executable, "-P", "-m", "headwater", "logs", "import", path, run, "--json"]
    start = time.monotonic()
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.read())
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return answer, time.monotonic() - start, _mib(usage)


def _mib(usage: resource.struct_rusage) -> float:
    return usage.ru_maxrss / 1024  # KiB on Linux


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--format", choices=sorted(ROWS), default="openai")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="imports-") as folder:
        path, run = Path(folder, "log.jsonl"), Path(folder, "run")
        run.mkdir()
        Path(run, "config.toml").write_text(CONFIG)
        num = write(path, arguments.format, arguments.megabytes * 10**6)
        size = path.stat().st_size / 1e6
        print(f"{arguments.format}: {num} rows, {size:.0f} MB")
        for what in ("import", "again"):
            answer, took_s, peak = importing(path, run)
            print(
                f"{what}: {answer['written']} records written of {answer['read']} read, "
                f"{took_s:.1f} s ({size / took_s:.1f} MB/s), peak {peak:.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
