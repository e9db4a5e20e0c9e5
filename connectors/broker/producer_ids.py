"""Producer ids, never given twice, also after `kill -9`: they are reserved on disk in blocks."""

from __future__ import annotations

from pathlib import Path

from connectors.broker.errors import CorruptLog
from connectors.files import replace_file

BLOCK = 1000


class ProducerIds:
    def __init__(self, data_dir: Path) -> None:
        """CorruptLog if the file is damaged; OSError when the disk refuses."""
        self._file = data_dir / "producer-ids"
        self._next = self._reserved = 1
        if self._file.exists():
            text = self._file.read_text()
            if not text.isdecimal():
                raise CorruptLog(f"{self._file}: holds no producer id")
            self._next = self._reserved = int(text)
        self._reserve()

    def allocate(self) -> int:
        """OSError when a block has to be reserved and the disk refuses."""
        if self._next == self._reserved:
            self._reserve()
        self._next += 1
        return self._next - 1

    def _reserve(self) -> None:
        replace_file(self._file, str(self._next + BLOCK).encode(), sync=True)
        self._reserved = self._next + BLOCK
