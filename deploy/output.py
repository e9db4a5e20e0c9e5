"""What a command prints: readable lines, or with --json exactly one object on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any


@contextmanager
def stdout_for_answer(as_json: bool) -> Iterator[None]:
    """With --json, sends whatever is printed meanwhile (libraries log to stdout) to stderr, at the
    level of file descriptors, so that the answer printed afterwards is alone on stdout."""
    if not as_json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def answer(as_json: bool, value: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Prints `value` as one line of JSON, or `lines`."""
    if as_json:
        print(json.dumps(value, allow_nan=False), flush=True)
    else:
        print("\n".join(lines), flush=True)
