"""What Headwater adds to the processes of its vLLM engines. vLLM calls `register` in each of them,
by the entry point `vllm.general_plugins` in pyproject.toml.

It also calls it in every other vLLM of this Python environment (a judge model, say): those lack the
variable CAUSE and are left as they are.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from pathlib import Path

from connectors.engines.vllm.environment import CAUSE, FOLDER
from connectors.lifeline import get_signal_at_parents_death


def register() -> None:
    """May be called more than once in a process."""
    cause = os.environ.get(CAUSE)
    if cause is None:
        return
    from connectors.engines.vllm import sampling

    sampling.install()
    _register_transfer()
    parent = multiprocessing.parent_process()
    if parent is not None:
        _die_with(parent, Path(cause).parent)
        _leave_cause(Path(cause))


def _register_transfer() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered before
        WeightTransferEngineFactory.register_engine(
            "headwater", "connectors.engines.vllm.transfer", "HeadwaterTransfer"
        )


def _die_with(parent: multiprocessing.process.BaseProcess, folder: Path) -> None:
    """vLLM's engine process outlives a killed parent, and would keep its memory for good; what it
    leaves in `folder` goes with it."""

    def watch() -> None:
        parent.join()
        last = multiprocessing.current_process().name.startswith("EngineCore")  # no worker of it
        if last and folder.name.startswith(FOLDER):
            shutil.rmtree(folder, ignore_errors=True)  # nobody is there to read it
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
    get_signal_at_parents_death(signal.SIGCONT)  # so that it comes to this in a stopped one too


def _leave_cause(file: Path) -> None:
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, _Cause) for handler in logger.handlers):
        logger.addHandler(_Cause(file))


class _Cause(logging.Handler):
    """Writes the last exception that vLLM logged, as one line: its parent only learns that the
    process is gone."""

    def __init__(self, file: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or "root cause" in str(error):  # a worker has said it already
            return
        self._file.write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
