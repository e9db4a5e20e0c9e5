"""An engine as a process: its HTTP interface and its role entry point.

    POST /generate   GenerateRequest -> [Completion]         GET /state    EngineState
    POST /stream     GenerateRequest -> lines, see below     GET /health   200 unless it is dying
    POST /attach     {request_id}    -> [Completion] | null  GET /metrics  Prometheus text
    POST /cancel     {request_id}    -> [Completion]
    POST /weights/join | update | load | relabel | fence     see connectors.weights.wire

A stream is JSON, a line a Part, as the tokens come; the last line is {"done": [Completion]}, or an
error. Errors are {error, kind}: 400 "refused" never succeeds, 409 "version_gone" neither, 500
"error" may be sent again, 503 "unavailable" is no verdict on the request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from connectors.config import Config
from connectors.engines.engine import DecodingEngine
from connectors.engines.metrics import EngineMetrics
from connectors.engines.parts import Decoder, Weights
from connectors.engines.types import (
    EngineError,
    EngineStartError,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
    VersionGone,
)
from connectors.engines.wire import ErrorBody, Last, RequestId, decoded
from connectors.run_dir import RunDir
from connectors.weights import (
    FenceRequest,
    JoinRequest,
    LoadRequest,
    RelabelRequest,
    UpdateRequest,
    WeightsError,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
CLOSE_S = 2.0  # how long requests get to write their last answer at the end

ERRORS: dict[type[EngineError], tuple[str, int]] = {
    VersionGone: ("version_gone", 409),
    RequestRefused: ("refused", 400),
    EngineUnavailable: ("unavailable", 503),
    EngineError: ("error", 500),
}
"""The most particular first: kind and status."""

B = TypeVar("B")
Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """The engine's parts and the routes over them."""

    def __init__(self, decoder: Decoder, weights: Weights, *, max_running: int) -> None:
        self._decoder = decoder
        self._weights = weights
        self._engine = engine = DecodingEngine(decoder, weights, max_running=max_running)
        self._registry = CollectorRegistry()
        self._registry.register(
            EngineMetrics(engine.state_now, weights.update_durations, weights.pause_durations)
        )

    def start(self, on_fatal: Callable[[str], None]) -> None:
        self._engine.start(on_fatal)
        self._decoder.start()

    def close(self) -> None:
        self._engine.close()
        self._weights.close()
        self._decoder.stop()

    @property
    def dead(self) -> str | None:
        """Why nothing will be generated any more."""
        if self._engine.fatal is None and not self._decoder.alive:
            return "the decode thread ended"
        return self._engine.fatal

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.add_routes(
            [
                web.post("/generate", self.generate),
                web.post("/stream", self.stream),
                web.post("/attach", self.attach),
                web.post("/cancel", self.cancel),
                web.get("/state", self.state),
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.post("/weights/join", self._takes(JoinRequest, self._weights.join)),
                web.post("/weights/update", self._takes(UpdateRequest, self._weights.update)),
                web.post("/weights/load", self._takes(LoadRequest, self._weights.load)),
                web.post("/weights/relabel", self._takes(RelabelRequest, self._weights.relabel)),
                web.post("/weights/fence", self._takes(FenceRequest, self._weights.fence)),
            ]
        )
        return app

    async def generate(self, request: web.Request) -> web.Response:
        return _json(await self._engine.generate(await _body(request, GenerateRequest)))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request, GenerateRequest)
        lines = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})

        async def write(line: object) -> None:
            if not lines.prepared:  # until there is something to tell, an error is a status
                await lines.prepare(request)
            await lines.write(msgspec.json.encode(line) + b"\n")

        with contextlib.suppress(ConnectionError):  # the client is gone, the work goes on
            try:
                last: Last | ErrorBody = Last(done=await self._engine.stream(body, write))
            except EngineError as error:
                if not lines.prepared:
                    raise
                last = _explained(error)[0]
            await write(last)
        return lines

    async def attach(self, request: web.Request) -> web.Response:
        body = await _body(request, RequestId)
        return _json(await self._engine.attach(body.request_id))

    async def cancel(self, request: web.Request) -> web.Response:
        body = await _body(request, RequestId)
        return _json(await self._engine.cancel(body.request_id))

    async def state(self, _: web.Request) -> web.Response:
        return _json(await self._engine.state())

    async def health(self, _: web.Request) -> web.Response:
        if self.dead is not None:
            raise EngineUnavailable(self.dead)
        return _json({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _takes(self, kind: type[B], work: Callable[[B], Any]) -> Reply:
        """A blocking weights operation, beside the loop."""

        async def reply(request: web.Request) -> web.Response:
            body = await _body(request, kind)
            # Shielded: a sender that hangs up must not leave the operation half observed.
            done = await asyncio.shield(asyncio.to_thread(work, body))
            return _json({} if done is None else done)

        return reply


async def _body(request: web.Request, kind: type[B]) -> B:
    data = await request.read()
    try:
        body: B = decoded(data, kind)
    except ValueError as error:
        raise RequestRefused(f"the body is no {kind.__name__}: {error}") from error
    return body


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


@web.middleware
async def _errors(request: web.Request, handler: Reply) -> web.StreamResponse:
    try:
        return await handler(request)
    except EngineError as error:
        return _json(*_explained(error))
    except WeightsError as error:
        return web.Response(body=error.body(), status=error.status, content_type="application/json")
    except web.HTTPException:
        raise
    except Exception as error:  # a fault of ours: whoever asked gets an answer it can read
        log.exception("%s failed", request.path)
        return _json(ErrorBody(error=f"{type(error).__name__}: {error}"), 500)


def _explained(error: EngineError) -> tuple[ErrorBody, int]:
    """What the client gets to read, and the status."""
    kind, status = next(found for cause, found in ERRORS.items() if isinstance(error, cause))
    return ErrorBody(error=str(error), kind=kind), status


def serve_engine(config: Config, run_dir: RunDir, name: str, port: int = 0) -> None:
    """Serves `config.model.path` until SIGTERM or SIGINT; registers `name` in `run_dir` once it
    listens (loopback; port 0 takes a free one). EngineStartError when it cannot start, ConfigError
    for wrong `engine.options`, RuntimeError when the decoder dies."""
    decoder, weights = _parts(config)
    server = EngineServer(decoder, weights, max_running=config.engine.max_running)
    asyncio.run(serve(server, run_dir, name, port))


def _parts(config: Config) -> tuple[Decoder, Weights]:
    if config.engine.kind == "vllm":
        from connectors.engines.vllm import build as build_vllm

        return build_vllm(config)
    from connectors.engines.hf import build as build_hf

    return build_hf(config)


async def serve(server: EngineServer, run_dir: RunDir, name: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[str | None] = loop.create_future()

    def end(reason: str | None = None) -> None:
        if not ended.done():
            ended.set_result(reason)

    def stop(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(end)

    # Not asyncio's own handlers: those end with the loop, and a second SIGTERM while the process
    # winds up would make a clean exit a death by signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.start(on_fatal=end)
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_S
    )
    await runner.setup()
    try:
        url = await _listen(runner, port)
        run_dir.register(name, url=url)
        print(f"{name} serves {url}", flush=True)
        reason = await _ended(server, ended)
    finally:
        server.close()
        await runner.cleanup()
    if reason is not None:
        raise RuntimeError(reason)


async def _listen(runner: web.AppRunner, port: int) -> str:
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        raise EngineStartError(f"port {port}: cannot be listened on: {error.strerror}") from error
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _ended(server: EngineServer, ended: asyncio.Future[str | None]) -> str | None:
    """Waits for a signal or the decoder's death, which it also sees when no callback told of it."""
    while True:
        done, _ = await asyncio.wait([ended], timeout=1.0)
        if done:
            return ended.result()
        if server.dead is not None:
            return server.dead
