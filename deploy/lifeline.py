"""A child that ends when its supervisor does, however the supervisor ends."""

from __future__ import annotations

import os
import signal
import threading
import time

from connectors.lifeline import get_signal_at_parents_death


def die_with(supervisor: int) -> None:
    """From now on this process is killed (-9: every role survives that) as soon as process
    `supervisor`, its parent, is gone; at once if it already is."""
    # By the kernel, if possible: even while this process is inside a long C call.
    if get_signal_at_parents_death(signal.SIGKILL):
        if os.getppid() != supervisor:  # it died before the call above
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(supervisor,), daemon=True, name="lifeline").start()


def _watch(supervisor: int) -> None:
    while os.getppid() == supervisor:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
