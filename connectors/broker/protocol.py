"""Frames and headers of the Kafka protocol; bodies are encoded and decoded by kafka-python's
classes.

A frame is an int32 length and that many bytes. Record data in a response is not encoded with it: a
stand-in takes its place and `Reply.pieces` gives, in its stead, the range of the segment file,
which the server sends without reading it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from connectors.broker.security import Session
from connectors.broker.segment import FileRange

if TYPE_CHECKING:
    from connectors.broker.broker import Broker

MAX_REQUEST_BYTES = 100 << 20
_INT32 = struct.Struct(">i")
_HEADER = struct.Struct(">hhih")  # api key, version, correlation id, length of the client id


class MalformedRequest(ValueError):
    """The bytes are no request that this broker can answer; the connection is of no more use."""


class RequestHeader(NamedTuple):
    api_key: int
    version: int
    correlation_id: int
    client_id: str
    rest: int
    """Position behind the client id."""


def parse_request_header(frame: bytes) -> RequestHeader:
    try:
        api_key, version, correlation_id, client_id_bytes = _HEADER.unpack_from(frame)
    except struct.error as error:
        raise MalformedRequest("a request shorter than its header") from error
    rest = _HEADER.size + max(client_id_bytes, 0)
    client_id = frame[_HEADER.size : rest].decode(errors="replace")
    return RequestHeader(api_key, version, correlation_id, client_id, rest)


def after_tags(frame: bytes, position: int) -> int:
    """Position behind the tagged fields at `position`, which flexible request headers end with."""
    num_tags, position = _unsigned_varint(frame, position)
    for _ in range(num_tags):
        _, position = _unsigned_varint(frame, position)
        num_bytes, position = _unsigned_varint(frame, position)
        position += num_bytes
    return position


def _unsigned_varint(frame: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(frame) and shift <= 28:
        byte = frame[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise MalformedRequest("a varint that does not end")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What an API function knows besides the request's body."""

    broker: Broker
    session: Session
    version: int
    host: str
    """The address under which the client reached the broker."""
    port: int
    client_id: str
    """As the client names itself."""
    client_host: str


class Api(NamedTuple):
    """One API: the versions from `min_version` to `max_version` are answered."""

    request: Any
    """kafka-python's request class."""
    min_version: int
    max_version: int
    answer: Callable[[Call, Any], Awaitable[Reply | None]]
    """None: the client expects no answer."""

    def decode(self, frame: bytes, header: RequestHeader) -> Any:
        """The request's body; MalformedRequest if it is none."""
        position = header.rest
        if self.request.flexible_version_q(header.version):
            position = after_tags(frame, position)
        try:
            return self.request.decode(memoryview(frame)[position:], version=header.version)
        # kafka-python's decoders raise whatever the bytes make them stumble over.
        except Exception as error:
            raise MalformedRequest(f"no {self.request.name}: {error}") from error


@dataclass(slots=True)
class Reply:
    """`message` is a response of kafka-python's; `ranges` is what the stand-ins in it stand for."""

    message: Any = None
    ranges: list[FileRange] = field(default_factory=list)

    def stand_in(self, data: FileRange | None) -> bytes:
        """What to give as `records` in a message so that `data` is sent there."""
        if data is None:
            return b""
        self.ranges.append(data)
        return _STAND_IN

    def pieces(self, version: int, correlation_id: int) -> list[bytes | FileRange]:
        """The whole frame, in the order of sending."""
        self.message.API_VERSION = version
        self.message.with_header(correlation_id=correlation_id)
        encoded = bytes(self.message.encode(header=True))
        texts = encoded.split(_STAND_IN)
        pieces: list[bytes | FileRange] = []
        for text, data in zip(texts, self.ranges, strict=False):
            # In the versions that carry stand-ins the data follows its int32 length.
            pieces += [text[: -_INT32.size] + _INT32.pack(data.num_bytes), data]
        pieces.append(texts[-1])
        num_bytes = sum(len(p) if isinstance(p, bytes) else p.num_bytes for p in pieces)
        pieces[0] = _INT32.pack(num_bytes) + pieces[0]  # type: ignore[operator]
        return pieces


_STAND_IN = os.urandom(24)
