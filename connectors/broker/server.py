"""The broker's process: takes the directory's lock and the port, serves connections until told to
stop.

A connection is one task: read a request, answer it, read the next, so requests that a client has
sent ahead wait in its socket, and a client that does not read its answers holds one of them at
most. Record data goes from the page cache to the socket without passing through this process's
memory.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

from connectors.broker.api import API_VERSIONS_KEY, APIS, unsupported_api_versions
from connectors.broker.broker import Broker, DirectoryLock
from connectors.broker.errors import CannotListen, PortTaken
from connectors.broker.protocol import (
    MAX_REQUEST_BYTES,
    Call,
    MalformedRequest,
    Reply,
    parse_request_header,
)
from connectors.broker.segment import FileRange

GRACE_S = 2.0  # for requests in progress when told to stop
READ_AHEAD_BYTES = 1 << 20
SENDFILE_BYTES = 128 << 10  # below, one read and one write are cheaper


def serve(
    data_dir: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    fsync: str = "never",
    on_listening: Callable[[str, int], None] = lambda host, port: None,
) -> None:
    """Serves `data_dir` until SIGTERM or SIGINT, then returns. `fsync` is "never" (acknowledged
    records survive the end of the process) or "always" (and power loss). `on_listening(host, port)`
    is called once, when clients may connect. BrokerError, of one line, if it cannot start."""
    if fsync not in ("always", "never"):
        raise ValueError(f"fsync: always or never, got {fsync!r}")
    folder = Path(data_dir)
    lock = DirectoryLock(folder)
    try:
        with _bind(host, port) as listener:
            broker = Broker(folder, sync=fsync == "always")
            asyncio.run(_Server(broker, listener).run(on_listening))
    finally:
        lock.release()


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients that connect while the log is being opened wait for it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise CannotListen(f"{host}: is no address: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # With SO_REUSEADDR only this tells whether another process has the port.
        listener.listen()
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} of {host} is taken by another process") from error
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


class _Server:
    def __init__(self, broker: Broker, listener: socket.socket) -> None:
        self._broker = broker
        self._listener = listener
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.StreamWriter] = set()

    async def run(self, on_listening: Callable[[str, int], None]) -> None:
        stop = asyncio.Event()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        server = await asyncio.start_server(
            self._connected, sock=self._listener, limit=READ_AHEAD_BYTES
        )
        host, port = self._listener.getsockname()[:2]
        on_listening(host, port)
        await stop.wait()
        server.close()
        await self._finish()

    async def _finish(self) -> None:
        """Requests in progress are answered, within reason; then nothing is left."""
        self._broker.stop()
        for writer in self._idle:
            writer.transport.abort()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=GRACE_S)
            for task in late:
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._converse(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError):
            pass  # the client went away
        except MalformedRequest as error:
            peer = writer.get_extra_info("peername")
            print(f"broker: {peer}: {error}", file=sys.stderr, flush=True)
        except Exception:
            # One client's request must not take the log away from all others.
            traceback.print_exc()
        finally:
            writer.transport.abort() if task.cancelling() else writer.close()
            self._connections.discard(task)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not self._broker.stopping:
            self._idle.add(writer)
            try:
                (num_bytes,) = struct.unpack(">i", await reader.readexactly(4))
                if not 0 < num_bytes <= MAX_REQUEST_BYTES:
                    raise MalformedRequest(f"a request of {num_bytes} bytes")
                frame = await reader.readexactly(num_bytes)
            finally:
                self._idle.discard(writer)
            await self._answer(frame, writer)

    async def _answer(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        header = parse_request_header(frame)
        version = header.version
        api = APIS.get(header.api_key)
        if api is None or not api.min_version <= version <= api.max_version:
            if header.api_key != API_VERSIONS_KEY:
                raise MalformedRequest(f"API {header.api_key} version {version} is not supported")
            reply: Reply | None = unsupported_api_versions()
            version = 0
        else:
            request = api.decode(frame, header)
            host, port = writer.get_extra_info("sockname")[:2]
            call = Call(broker=self._broker, version=version, host=host, port=port)
            reply = await api.answer(call, request)
        if reply is not None:
            await _send(writer, reply.pieces(version, header.correlation_id))


async def _send(writer: asyncio.StreamWriter, pieces: list[bytes | FileRange]) -> None:
    """Returns when the socket has taken all but a little of it."""
    loop = asyncio.get_running_loop()
    for piece in pieces:
        if isinstance(piece, bytes):
            writer.write(piece)
        elif piece.num_bytes < SENDFILE_BYTES:
            writer.write(piece.read())
            await writer.drain()
        else:
            await loop.sendfile(writer.transport, piece.file, piece.position, piece.num_bytes)
    await writer.drain()
