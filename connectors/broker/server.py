"""The broker's process: takes the directory's lock and the port, serves until told to stop.

A connection is one task: read a request, answer it, read the next, so requests that a client has
sent ahead wait in its socket. Record data is read as the client takes it, so one that does not read
its answer costs a chunk of memory, however much it asked for.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import signal
import socket
import struct
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

from connectors.broker.api import (
    API_VERSIONS_KEY,
    APIS,
    BEFORE_AUTHENTICATION,
    unsupported_api_versions,
)
from connectors.broker.broker import Broker, lock_directory
from connectors.broker.errors import CannotListen, PortTaken
from connectors.broker.notices import notice
from connectors.broker.protocol import (
    MAX_REQUEST_BYTES,
    Call,
    MalformedRequest,
    Reply,
    RequestHeader,
    parse_request_header,
)
from connectors.broker.security import MAX_UNPROVEN_BYTES, OPEN, Security, Session
from connectors.broker.segment import FileRange

HANDSHAKE_S = 10.0  # of TLS
LINGER_S = 0.5
GRACE_S = 2.0  # for requests in progress when told to stop
READ_AHEAD_BYTES = 1 << 20
CHUNK_BYTES = 256 << 10  # of record data in memory for each client that is slow to read


def serve(
    data_dir: str | Path,
    host: str = "127.0.0.1",
    port: int = 0,
    fsync: str = "never",
    on_listening: Callable[[str, int], None] = lambda host, port: None,
    security: Security = OPEN,
) -> None:
    """Serves `data_dir` until SIGTERM or SIGINT, then returns. `fsync` is "never" (acknowledged
    records survive the end of the process) or "always" (and power loss). `on_listening(host, port)`
    is called once, when clients may connect. Without `security` it serves everybody, in the clear.
    BrokerError, of one line, if it cannot start."""
    if fsync not in ("always", "never"):
        raise ValueError(f"fsync: always or never, got {fsync!r}")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a file is open for each segment
    folder = Path(data_dir)
    with closing(lock_directory(folder)), _bind(host, port) as listener:
        asyncio.run(_run(folder, fsync == "always", listener, on_listening, security))


async def _run(
    data_dir: Path,
    sync: bool,
    listener: socket.socket,
    on_listening: Callable[[str, int], None],
    security: Security,
) -> None:
    stop = asyncio.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    broker = await asyncio.to_thread(Broker, data_dir, sync=sync)
    if not stop.is_set():
        await _Server(broker, security).run(listener, on_listening, stop)


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
    def __init__(self, broker: Broker, security: Security) -> None:
        self._broker = broker
        self._security = security
        self._connections: set[asyncio.Task[None]] = set()
        self._idle: set[asyncio.StreamWriter] = set()

    async def run(
        self,
        listener: socket.socket,
        on_listening: Callable[[str, int], None],
        stop: asyncio.Event,
    ) -> None:
        server = await asyncio.start_server(
            self._connected,
            sock=listener,
            limit=READ_AHEAD_BYTES,
            ssl=self._security.tls,
            ssl_handshake_timeout=HANDSHAKE_S if self._security.tls is not None else None,
        )
        host, port = listener.getsockname()[:2]
        on_listening(host, port)
        retaining = asyncio.create_task(self._broker.topics.keep_retaining())
        retaining.add_done_callback(lambda _: stop.set())
        await stop.wait()
        server.close()
        await self._finish()
        retaining.cancel()
        with suppress(asyncio.CancelledError):
            await retaining

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
            notice(f"client {writer.get_extra_info('peername')}: {error}")
        except Exception:
            # One client's request must not take the log away from all others.
            notice(traceback.format_exc())
        finally:
            writer.transport.abort() if task.cancelling() else writer.close()
            self._connections.discard(task)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(self._security.users, str(writer.get_extra_info("peername")))
        while not (self._broker.stopping or session.failed):
            frame = await self._next_frame(reader, writer, session)
            header = parse_request_header(frame)
            version, answer = self._answer(frame, header, writer, session)
            del frame  # it may be large, and the answer takes its time
            reply = await answer
            if reply is not None:
                await _send(writer, reply.pieces(version, header.correlation_id))
        if session.failed:
            # Some clients lose an answer that the end of the connection follows at once.
            await asyncio.wait_for(reader.read(1), LINGER_S)

    async def _next_frame(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: Session
    ) -> bytes:
        largest = MAX_REQUEST_BYTES if session.authenticated else MAX_UNPROVEN_BYTES
        self._idle.add(writer)
        try:
            (num_bytes,) = struct.unpack(">i", await reader.readexactly(4))
            if not 0 < num_bytes <= largest:
                raise MalformedRequest(f"a request of {num_bytes} bytes")
            return await reader.readexactly(num_bytes)
        finally:
            self._idle.discard(writer)

    def _answer(
        self,
        frame: bytes,
        header: RequestHeader,
        writer: asyncio.StreamWriter,
        session: Session,
    ) -> tuple[int, Awaitable[Reply | None]]:
        """The answer to be awaited, and the version in which to encode it."""
        if not session.authenticated and header.api_key not in BEFORE_AUTHENTICATION:
            raise MalformedRequest(f"API {header.api_key} before authentication")
        api = APIS.get(header.api_key)
        if api is not None and api.min_version <= header.version <= api.max_version:
            request = api.decode(frame, header)
            host, port = writer.get_extra_info("sockname")[:2]
            call = Call(
                broker=self._broker,
                session=session,
                version=header.version,
                host=host,
                port=port,
                client_id=header.client_id,
                client_host=writer.get_extra_info("peername")[0],
            )
            return header.version, api.answer(call, request)
        if header.api_key == API_VERSIONS_KEY:
            return 0, unsupported_api_versions()
        raise MalformedRequest(f"API {header.api_key} version {header.version} is not supported")


async def _send(writer: asyncio.StreamWriter, pieces: list[bytes | FileRange]) -> None:
    """Returns when the socket has taken all but a little of it."""
    for piece in pieces:
        for chunk in [piece] if isinstance(piece, bytes) else piece.chunks(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
