"""What the APIs work on: the data directory, open and locked."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from connectors.broker.errors import DirectoryLocked, DirectoryUnusable
from connectors.broker.files import sync_folder
from connectors.broker.producer_ids import ProducerIds
from connectors.broker.topics import Topics


class DirectoryLock:
    """Held until `release` or the end of the process, however it ends."""

    def __init__(self, data_dir: Path) -> None:
        """DirectoryLocked if another process holds it, DirectoryUnusable if it cannot be taken."""
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise DirectoryUnusable(f"{data_dir}: cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise DirectoryLocked(
                f"{data_dir}: is in use by the broker with pid {owner}"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


class Broker:
    def __init__(self, data_dir: Path, *, sync: bool) -> None:
        """Opens what is stored, which takes as long as reading it. CorruptLog,
        DirectoryUnusable."""
        self.stopping = False
        try:
            self.producer_ids = ProducerIds(data_dir)
            self.topics = Topics(data_dir, sync=sync)
            if sync:
                sync_folder(data_dir)
                sync_folder(data_dir.parent)
        except OSError as error:
            raise DirectoryUnusable(f"{error.filename or data_dir}: {error.strerror}") from error

    def stop(self) -> None:
        """Long polls answer at once from here on."""
        self.stopping = True
        for topic in self.topics:
            for partition in topic.partitions:
                partition.wake()
