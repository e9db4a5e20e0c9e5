"""A snapshot's memory as a test sees it, and a process that reads it: `weights_reader.py REQUEST`
prints "reading" once it does, and goes on until a line on its input ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from connectors.records import Version
from connectors.weights import LoadRequest, Snapshot
from connectors.weights.memory import Segment, check, reading


def segment_of(snapshot: Snapshot) -> Segment:
    assert snapshot.segment is not None
    return snapshot.segment


def request_for(snapshot: Snapshot) -> LoadRequest:
    segment = segment_of(snapshot)
    return LoadRequest(
        epoch=1,
        version=Version(0, 1),
        digest=snapshot.digest,
        plan=snapshot.plan,
        pid=os.getpid(),
        fd=segment.fd,
        num_bytes=segment.num_bytes,
        timeout_s=5.0,
    )


def in_use(snapshot: Snapshot) -> bool:
    """Whether the owner may not write; it gives the segment back at once if it may."""
    free = segment_of(snapshot).reserve()
    if free:
        segment_of(snapshot).share()
    return not free


class Reader:
    """Reading when the constructor returns."""

    def __init__(self, request: LoadRequest) -> None:
        body = msgspec.json.encode(request).decode()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.connectors.weights_reader", body],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "reading"

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> str:
        """Reads once more: "whole" when the bytes are still those announced, else the error."""
        assert self._process.stdin is not None
        self._process.stdin.write("end\n")
        self._process.stdin.flush()
        found = self._line()
        self._process.wait(30)
        return found

    def kill9(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def reader(request: LoadRequest) -> Iterator[Reader]:
    started = Reader(request)
    try:
        yield started
    finally:
        started.kill9()


def main(body: str) -> None:
    request = msgspec.json.decode(body, type=LoadRequest)
    with reading(request) as buckets:
        check(buckets, request, lambda: False)
        print("reading", flush=True)
        sys.stdin.readline()
        check(buckets, request, lambda: False)
    print("whole", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
