"""Records of one type, read from a topic that somebody else may have written into."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from connectors.kafka.client import Record
from connectors.records import decode_as

log = logging.getLogger(__name__)


def parsed(
    records: Iterable[Record], kind: Any, foreign: dict[int, str] | None = None
) -> Iterator[tuple[int, Any]]:
    """The offset of each record of one partition, and the struct of type (or union) `kind` in it.
    What is none is foreign: it says nothing to us, so every reader passes it over, with a line in
    the log or an entry of `foreign` (offset: place and reason). A record of ours that was damaged
    shows in what follows it: the chain of `steps` breaks there."""
    for record in records:
        try:
            yield record.offset, decode_as(record.value, kind)
        except msgspec.DecodeError as error:
            reason = f"{record.topic}/{record.partition}/{record.offset}: {error}"
            if foreign is None:
                log.warning("a foreign record is passed over: %s", reason)
            else:
                foreign[record.offset] = reason
