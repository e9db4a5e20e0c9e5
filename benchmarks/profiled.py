"""A Python program under a profiler that counts each thread's own CPU seconds, so that it tells the
same on a busy machine; what waits costs nothing.

    python -P -m benchmarks.profiled OUT PROGRAM.py ARGUMENTS...

At the program's end OUT holds one JSON object: the threads' CPU seconds by function, own and with
callees, and by thread. Calls are slowed down: the shares of small functions are too large.
"""

from __future__ import annotations

import cProfile
import json
import runpy
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

_profiles: list[tuple[str, cProfile.Profile]] = []
_run_thread = threading.Thread.run


def _profiled_run(thread: threading.Thread) -> None:
    profile = cProfile.Profile(time.thread_time)
    _profiles.append((thread.name.rstrip("0123456789-_ ()"), profile))
    profile.enable()
    try:
        _run_thread(thread)
    finally:
        profile.disable()


def summary() -> dict[str, Any]:
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    threads: Counter[str] = Counter()
    for name, profile in _profiles:
        for entry in profile.getstats():
            where = _name(entry.code)
            own[where] += entry.inlinetime
            below[where] = max(below[where], entry.totaltime)
            threads[name] += entry.inlinetime
    return {
        "own": dict(own.most_common(60)),
        "with_callees": dict(below.most_common(120)),
        "threads": dict(threads),
    }


def _name(code: Any) -> str:
    if isinstance(code, str):
        return code
    return f"{code.co_qualname} ({'/'.join(Path(code.co_filename).parts[-3:])})"


def main() -> None:
    out, program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    threading.Thread.run = _profiled_run  # type: ignore[method-assign]
    profile = cProfile.Profile(time.thread_time)
    _profiles.append(("main", profile))
    profile.enable()
    try:
        runpy.run_path(program, run_name="__main__")
    finally:
        profile.disable()
        Path(out).write_text(json.dumps(summary()))


if __name__ == "__main__":
    main()
