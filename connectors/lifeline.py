"""What a child process does about its parent's death."""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def get_signal_at_parents_death(number: signal.Signals) -> bool:
    """From now on the kernel sends it to this process when the thread that started this process
    ends, which a parent's death implies. False where there is no such thing (not Linux)."""
    if sys.platform != "linux":
        return False
    failed: int = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    return failed == 0
