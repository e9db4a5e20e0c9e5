"""One partition, read by a thread of its own: what the broker has sent is there at once, and
nobody has to ask for it.

    broker ──long poll──▶ thread ──▶ records ahead ──has, take──▶ a source
                            ▲ waits while MAX_AHEAD_BYTES are ahead
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Final

from connectors.kafka.client import Reader, Record

POLL_S: Final = 0.5
"""Longest wait for the broker, which ends it: how long a closed one may live on."""
MAX_AHEAD_BYTES: Final = 8 << 20
"""Once so many are ahead, no more are asked for."""
RECORD_BYTES: Final = 512
"""What a record takes beside its value."""


class ReadAhead:
    """Goes on where `reader` stands in `partition`, its only one. The thread has `reader` to itself
    from now on, and closes it."""

    def __init__(self, reader: Reader, partition: int) -> None:
        self._reader, self._partition = reader, partition
        self._records: deque[Record] = deque()
        self._num_bytes = 0
        self._passed = reader.positions()[partition]
        self._failure: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="read-ahead", daemon=True).start()

    def has(self, offset: int) -> bool:
        """Whether it is known what is at `offset`, the next one to be taken: `take` then gives it.
        Raises what the reader raised (`Reader.poll`) once nothing is ahead."""
        with self._changed:
            if self._records or self._passed > offset:
                return True
            if self._failure is not None:
                raise self._failure
            return False

    def take(self, offset: int) -> Record | None:
        """The record at `offset`; None where the log holds none."""
        with self._changed:
            if not self._records or self._records[0].offset != offset:
                return None
            return self._pop()

    def take_all(self) -> list[Record]:
        """Those ahead now. Raises as `has`."""
        with self._changed:
            if not self._records and self._failure is not None:
                raise self._failure
            return [self._pop() for _ in range(len(self._records))]

    def _pop(self) -> Record:
        record = self._records.popleft()
        self._num_bytes -= RECORD_BYTES + len(record.value)
        self._changed.notify()
        return record

    def close(self) -> None:
        """Returns at once; the thread ends within POLL_S."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._may_read():
                found = self._reader.poll(POLL_S)
                passed = self._reader.positions()[self._partition]
                with self._changed:
                    self._records += found
                    self._num_bytes += sum(RECORD_BYTES + len(record.value) for record in found)
                    self._passed = passed
        except Exception as error:  # whoever takes gets it
            with self._changed:
                self._failure = error
        finally:
            self._reader.close()

    def _may_read(self) -> bool:
        """Waits for room. False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._num_bytes < MAX_AHEAD_BYTES)
            return not self._closed
