"""How a role is told to end: SIGTERM and SIGINT set an event, which its loop looks at."""

from __future__ import annotations

import signal
import threading


def stop_on_signals(stop: threading.Event) -> threading.Event:
    """From now on SIGTERM and SIGINT set `stop`, which is returned. Does nothing else on any but
    the main thread, where Python takes no handlers."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    return stop
