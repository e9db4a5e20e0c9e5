"""Files that are replaced whole, files and folders that must last, and a lock between processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def sync_path(path: Path) -> None:
    """Makes a file's content, or the creations, removals and renames in a folder, survive power
    loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes, *, sync: bool = False) -> None:
    """`path` holds its old content or all of `content`, whatever is killed meanwhile; with `sync`,
    whatever loses power, too. OSError if the disk refuses, then the old content stays."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        staged.write_bytes(content)
        if sync:
            sync_path(staged)
        staged.replace(path)
    except OSError:
        staged.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


class Locked(RuntimeError):
    """Another process holds the lock: `pid`, as text, "?" while it has not yet said so."""

    def __init__(self, path: Path, pid: str) -> None:
        super().__init__(f"{path} is held by process {pid}")
        self.pid = pid


class FileLock:
    """Held until `close` or the end of the process, however it ends. Processes forked from this one
    do not hold it: what user code leaves behind locks nobody out."""

    def __init__(self, path: Path) -> None:
        """Makes the file and writes this process's pid into it. Locked if another process holds
        it, OSError if it cannot be made."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip()
            self.close()
            raise Locked(path, pid or "?") from error
        os.register_at_fork(after_in_child=self.close)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
