"""The process of a rank that rank 0 started: `python -P -m trainer.worker FD`, FD its end of the
pipe to rank 0. What it then does is `trainer.rank`."""

from __future__ import annotations

import logging
import signal
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from connectors.lifeline import get_signal_at_parents_death

if TYPE_CHECKING:
    from trainer.rank import Open


def main(fd: int, open_rank: Open | None = None) -> int:
    """The exit code, as `trainer.rank.run`."""
    # Before torch is imported, which takes seconds.
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to the group: rank 0 ends it in order
        signal.signal(number, signal.SIG_IGN)
    get_signal_at_parents_death(signal.SIGKILL)  # even inside a long C call
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from trainer.rank import run

    return run(Connection(fd), open_rank)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
