"""A TCP proxy on the loopback that hurts what passes through it, on command.

    client ──▶ proxy ──▶ server      drop     every connection is cut now
           ◀──       ◀──             delay    every piece waits a while
                                     stall    one direction carries nothing, connections stay up
                                     refuse   a new connection is cut at once

A Kafka client asks the broker where the broker is. The answer names the address at which the proxy
reaches it, so with `kafka` it is replaced by the proxy's own, as any Kafka proxy does; nothing else
is changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from typing import Final, Literal

Direction = Literal["to server", "to client"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("to server", "to client")

HOST: Final = "127.0.0.1"
PIECE_BYTES: Final = 64 << 10


class Proxy:
    """Takes connections at HOST:`port` once constructed, and serves them on a thread of its own.
    Commands are given from any other thread and take effect within a piece."""

    def __init__(self, server_port: int, *, kafka: bool = False) -> None:
        self._server_port = server_port
        listener = socket.create_server((HOST, 0))
        self.port: int = listener.getsockname()[1]
        self._address = (_address(server_port), _address(self.port)) if kafka else None
        self._delay_s = 0.0
        self._refuses = False
        self._open = {direction: asyncio.Event() for direction in DIRECTIONS}
        for flow in self._open.values():
            flow.set()
        self._connections: set[asyncio.StreamWriter] = set()
        self._closed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve(listener)), daemon=True
        )
        self._thread.start()

    def drop(self) -> None:
        self._command(self._drop)

    def delay(self, seconds: float) -> None:
        self._delay_s = seconds

    def stall(self, direction: Direction) -> None:
        self._command(self._open[direction].clear)

    def refuse(self) -> None:
        self._refuses = True

    def restore(self) -> None:
        """Ends delay, stall and refusal."""
        self._delay_s, self._refuses = 0.0, False
        for flow in self._open.values():
            self._command(flow.set)

    def close(self) -> None:
        self._command(self._closed.set)
        self._thread.join(10.0)

    def _command(self, act: Callable[[], object]) -> None:
        self._loop.call_soon_threadsafe(act)

    def _drop(self) -> None:
        for writer in self._connections:
            writer.transport.abort()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listener)
        await self._closed.wait()
        server.close()
        self._drop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            from_server, to_server = await asyncio.open_connection(HOST, self._server_port)
        except OSError:  # it is down
            writer.transport.abort()
            return
        answers = _pieces(from_server) if self._address is None else self._answers(from_server)
        pumps = [
            asyncio.create_task(self._pump(_pieces(reader), to_server, "to server")),
            asyncio.create_task(self._pump(answers, writer, "to client")),
        ]
        ends = {writer, to_server}
        self._connections |= ends
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._connections -= ends
        for pump in pumps:
            pump.cancel()
        for end in ends:
            end.close()

    async def _pump(
        self, pieces: AsyncIterator[bytes], writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        """Until either end is gone."""
        with contextlib.suppress(ConnectionError):
            async for piece in pieces:
                await asyncio.sleep(self._delay_s)
                await self._open[direction].wait()
                writer.write(piece)
                await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
        """A broker's answers, each with its length in front. One that names the broker is small."""
        assert self._address is not None
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(4)
                (left,) = struct.unpack(">i", head)
                if left <= PIECE_BYTES:
                    yield head + (await reader.readexactly(left)).replace(*self._address)
                    continue
                yield head
                while left:
                    piece = await reader.readexactly(min(left, PIECE_BYTES))
                    left -= len(piece)
                    yield piece


async def _pieces(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(PIECE_BYTES):
        yield piece


def _address(port: int) -> bytes:
    """Host and port as they follow each other in an answer of the Kafka protocol."""
    return HOST.encode() + struct.pack(">i", port)
