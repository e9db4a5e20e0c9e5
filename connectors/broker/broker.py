"""What the APIs work on: the data directory, open and locked."""

from __future__ import annotations

import uuid
from pathlib import Path

from connectors.broker.errors import DirectoryLocked, DirectoryUnusable
from connectors.broker.groups import Groups
from connectors.broker.offsets import Offsets
from connectors.broker.producer_ids import ProducerIds
from connectors.broker.topics import Topics
from connectors.files import FileLock, Locked, replace_file, sync_path


def lock_directory(data_dir: Path) -> FileLock:
    """DirectoryLocked if another broker holds it, DirectoryUnusable if it cannot be taken."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        return FileLock(data_dir / "lock")
    except OSError as error:
        raise DirectoryUnusable(f"{data_dir}: cannot be used: {error.strerror}") from error
    except Locked as error:
        raise DirectoryLocked(
            f"{data_dir}: is in use by the broker with pid {error.pid}"
        ) from error


class Broker:
    def __init__(self, data_dir: Path, *, sync: bool) -> None:
        """Opens what is stored, which takes as long as reading it. CorruptLog,
        DirectoryUnusable."""
        self.stopping = False
        try:
            self.cluster_id = _cluster_id(data_dir)
            self.producer_ids = ProducerIds(data_dir)
            self.topics = Topics(data_dir, sync=sync)
            self.groups = Groups(Offsets(data_dir / "offsets", sync=sync), self.topics)
            if sync:
                sync_path(data_dir)
                sync_path(data_dir.parent)
        except OSError as error:
            raise DirectoryUnusable(f"{error.filename or data_dir}: {error.strerror}") from error

    def stop(self) -> None:
        """Long polls, and who waits in a group, are answered at once from here on."""
        self.stopping = True
        for topic in self.topics:
            for partition in topic.partitions:
                partition.wake()
        self.groups.stop()


def _cluster_id(data_dir: Path) -> str:
    """Made up once for a data directory: it tells one log from another."""
    file = data_dir / "cluster-id"
    if not file.exists():
        replace_file(file, uuid.uuid4().hex.encode(), sync=True)
    return file.read_text()
