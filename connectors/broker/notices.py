"""The broker's words to the person who runs it, one line each, on stderr."""

from __future__ import annotations

import contextlib
import sys


def notice(text: str) -> None:
    """Says it if it can: stderr may be a file on the disk that is full."""
    with contextlib.suppress(OSError):
        print(f"broker: {text}", file=sys.stderr, flush=True)
