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


def replace_file(path: Path, content: bytes, *, sync: bool = False, mode: int = 0o666) -> None:
    """`path` holds its old content or all of `content`, whatever is killed meanwhile; with `sync`,
    whatever loses power, too. OSError if the disk refuses, then the old content stays. `mode` is
    the new file's, less the umask."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(staged, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(content)
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


class _Lock:
    """An open file that the kernel locks; forgotten where it was closed."""

    _descriptor: int

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class FileLock(_Lock):
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


class SharedLock(_Lock):
    """Held by any number of processes at once, until `close` or their end. While `is_last` holds it
    alone, whoever wants to join waits."""

    def __init__(self, path: Path) -> None:
        """Waits while a process holds it alone. OSError if the file cannot be made."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        os.register_at_fork(after_in_child=self.close)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def is_last(self) -> bool:
        """Whether no other process holds it: then this one holds it alone; else it has left."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        return True
