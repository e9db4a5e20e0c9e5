"""How the command ends: exit codes and the one line that explains each failure.

`explain(error)` turns an exception into (exit code, line) when it is an answer to the user rather
than a fault of ours; None means it is a fault, and its traceback is worth keeping.
"""

from __future__ import annotations

import errno
import sys
from typing import Final

from connectors.config import ConfigError

OK: Final = 0
FAILED: Final = 1
CONFIGURATION: Final = 2
ENVIRONMENT: Final = 3
NOT_VERIFIED: Final = 4
INTERRUPTED: Final = 130


class EnvironmentFailure(RuntimeError):
    """The machine lacks something the command needs (a port, a lock, a broker, a model folder, disk
    space); the message is one line saying what, and what to do."""


class RunFailed(RuntimeError):
    """A role of the run failed for good; `code` is what it exited with."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


_OF_THE_MACHINE: Final = {
    errno.EADDRINUSE: "the port is taken by another process",
    errno.EADDRNOTAVAIL: "the address is not of this machine",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would grow beyond what the system allows (`ulimit -f`)",
    errno.EACCES: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.EMFILE: "too many open files (raise `ulimit -n`)",
}


_BY_NAME: Final = {
    FAILED: (
        "trainer.step_log.Fenced",
        "trainer.gang.RankDied",
        "connectors.weights.wire.EpochRefused",
    ),
    ENVIRONMENT: (
        "connectors.broker.errors.BrokerError",
        "connectors.kafka.client.KafkaFailure",
        "connectors.engines.types.EngineStartError",
        "pipelines.recovery_folder.RecoveryLocked",
        "pipelines.recovery_folder.RecoveryLost",
        "trainer.checkpoint.CheckpointFailed",
        "trainer.memory.MemoryShort",
    ),
    NOT_VERIFIED: (
        "trainer.reexecute.ReexecutionDiffers",
        "trainer.step_log.ChainBroken",
        "trainer.accounts.LedgerBroken",
    ),
}
"""By name: an error's module must not be imported to find out that the error is another one."""


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and line for an expected failure; None for a fault of ours."""
    if isinstance(error, ConfigError):
        return CONFIGURATION, _one_line(error)
    if isinstance(error, EnvironmentFailure):
        return ENVIRONMENT, _one_line(error)
    if isinstance(error, RunFailed):
        return error.code, _one_line(error)
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        where = f"{error.filename}: " if error.filename else ""
        return ENVIRONMENT, f"{where}{_OF_THE_MACHINE[error.errno]} ({_one_line(error)})"
    feed_failed = _loaded("trainer.feed.FeedFailed")
    if feed_failed is not None and isinstance(error, feed_failed) and error.__cause__ is not None:
        return explain(error.__cause__)  # the feed's thread died of it
    for code, names in _BY_NAME.items():
        if isinstance(error, tuple(filter(None, map(_loaded, names)))):
            return code, _one_line(error)
    return None


def _loaded(name: str) -> type[BaseException] | None:
    """The exception of that name, None while its module is not imported: then nobody raised it."""
    module, _, kind = name.rpartition(".")
    return getattr(sys.modules.get(module), kind, None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
