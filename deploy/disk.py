"""A full disk, said once and waited out for a while: the broker refuses what it cannot store, every
client tries again, and nothing acknowledged is lost."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from deploy.errors import EnvironmentFailure

FULL_BYTES: Final = 16 << 20
PATIENCE_S: Final = 60.0


_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def room_or_later() -> Iterator[None]:
    """What the block cannot write because the disk is full may be written another time: the run
    must not end for a line on its screen."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


class DiskWatch:
    """Of the disk that holds `path`; `free` tells its free bytes."""

    def __init__(self, path: Path, free: Callable[[Path], int] = free_bytes) -> None:
        self._path, self._free = path, free
        self._full_since: float | None = None

    @property
    def is_full(self) -> bool:
        """As it was at the last look."""
        return self._full_since is not None

    def look(self, now: float) -> str | None:
        """A line when the disk fills up or has room again; `now` in seconds. EnvironmentFailure
        once it has been full for PATIENCE_S."""
        if self._free(self._path) >= FULL_BYTES:
            was_full, self._full_since = self._full_since is not None, None
            return f"the disk of {self._path} has room again: the run goes on" if was_full else None
        if self._full_since is None:
            self._full_since = now
            return f"the disk of {self._path} is full: the run waits {PATIENCE_S:g} s for room"
        if now - self._full_since > PATIENCE_S:
            raise EnvironmentFailure(
                f"the disk of {self._path} is full: make room and start again, nothing is lost"
            )
        return None
