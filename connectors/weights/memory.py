"""Weights that lie in memory other processes of this host can map: no copy travels.

The owner lays a plan's buckets into one memory file, which has no name and dies with its last user;
a reader opens it as /proc/PID/fd/FD. A lock on the file keeps the two apart. Readers share it, each
on an open file of its own: it ends with the reader, kill -9 included, and lasts while one is
stopped. The owner takes it alone, without waiting, before it writes to a file that was announced.

Memory files are Linux's. Elsewhere `Segment.create` gives None.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from connectors.weights.layout import Digester, Plan
from connectors.weights.wire import DigestMismatch, LoadRequest, MemoryUnreadable, UpdateAborted

log = logging.getLogger(__name__)

ALIGN_BYTES = 4096  # each bucket starts at a multiple
MAX_THREADS = 4  # of one reader
MADV_POPULATE_READ = 22  # Linux 5.14; the mmap module does not name it


def segment_bytes(layout: Plan) -> int:
    """The size of the memory file that holds the plan's buckets."""
    return _starts(layout)[-1]


def _starts(layout: Plan) -> list[int]:
    """The byte each bucket starts at, and that after the last."""
    starts = [0]
    for size in layout.sizes:
        end = starts[-1] + size * layout.torch_dtype.itemsize
        starts.append(-(-end // ALIGN_BYTES) * ALIGN_BYTES)
    return starts


def _buckets(mapped: mmap.mmap, layout: Plan) -> list[Tensor]:
    """Views of the mapping, which lives as long as one of them."""
    return [
        torch.frombuffer(mapped, dtype=layout.torch_dtype, count=size, offset=start)
        for size, start in zip(layout.sizes, _starts(layout)[:-1], strict=True)
    ]


class Segment:
    """A plan's buckets in a memory file of this process, which stays until the object goes."""

    def __init__(self, fd: int, layout: Plan, buckets: list[Tensor]) -> None:
        self.fd = fd
        self.num_bytes = segment_bytes(layout)
        self.buckets = buckets
        weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, layout: Plan) -> Segment | None:
        """None where memory files cannot be had: on another system, in a sandbox, beyond a
        limit."""
        if sys.platform != "linux":
            return None
        num_bytes, fd = segment_bytes(layout), -1
        try:
            fd = os.memfd_create("headwater-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            # All of it now, which is ten times faster than page by page at the first write.
            os.posix_fallocate(fd, 0, num_bytes)
            # Never smaller: whoever maps it can read all of it for as long as it wants.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            log.warning("no memory to share %d bytes of weights in: %s", num_bytes, error.strerror)
            return None
        return cls(fd, layout, _buckets(mapped, layout))

    def reserve(self) -> bool:
        """Whether nobody reads it; then nobody can until `share`. Again is no matter."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def share(self) -> None:
        """What is written may be read."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)


@contextlib.contextmanager
def reading(request: LoadRequest) -> Iterator[Sequence[Tensor]]:
    """The buckets of another process's segment, as they lie there: nobody writes to them until the
    end, after which they must not be used any more. MemoryUnreadable when they are not there;
    UpdateAborted when the owner is writing to them."""
    fd = _open(request)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpdateAborted(
                f"{request.version} was given up: its memory has another use"
            ) from error
        yield _buckets(_mapped(fd, request.num_bytes), request.plan)
    finally:
        # The lock ends here even if the descriptor was inherited by a child.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def check(buckets: Sequence[Tensor], request: LoadRequest, called_off: Callable[[], bool]) -> None:
    """DigestMismatch when the bytes are not those announced; UpdateAborted as soon as
    `called_off()` says so. It is most of a load's time, hence the threads."""
    layout = request.plan

    def fold(start: int, bucket: Tensor) -> Digester:
        if called_off():
            raise UpdateAborted(f"{request.version} was called off")
        part = Digester(layout.torch_dtype, "cpu", start=start)
        part.update(bucket)
        return part

    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
        starts = itertools.accumulate(layout.sizes[:-1], initial=0)
        whole, *parts = threads.map(fold, starts, buckets)
    for part in parts:
        whole.add(part)
    if whole.hex() != request.digest:
        raise DigestMismatch(f"read {whole.hex()}, announced as {request.digest}")


def _open(request: LoadRequest) -> int:
    path, expected = f"/proc/{request.pid}/fd/{request.fd}", segment_bytes(request.plan)
    try:
        # Without waiting: what is there now may be a pipe.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise MemoryUnreadable(f"{path}: {error.strerror}") from error
    about = os.fstat(fd)
    if (
        stat.S_ISREG(about.st_mode)
        and about.st_size == request.num_bytes == expected
        and _cannot_shrink(fd)
    ):
        return fd
    os.close(fd)
    raise MemoryUnreadable(
        f"{path}: is no memory of this plan: {about.st_size} bytes, announced as "
        f"{request.num_bytes}, the plan takes {expected}"
    )


def _cannot_shrink(fd: int) -> bool:
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:  # no memory file
        return False


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    try:
        # A private copy that is never written to, so never made: torch takes no read-only memory.
        mapped = mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise MemoryUnreadable(f"cannot be mapped: {error.strerror}") from error
    with contextlib.suppress(OSError):  # an older kernel: page by page, which is only slower
        mapped.madvise(MADV_POPULATE_READ)
    return mapped
