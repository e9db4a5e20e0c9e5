"""The gateway as a process: an OpenAI-compatible server in front of the run's engines.

    POST /v1/chat/completions        see `asked` for what is served; streamed or whole
    GET  /v1/models[/NAME]           `latest`, the run's name, and the versions held
    POST /v1/feedback                see `feedback`
    POST /v1/sessions/SESSION/end    the application says that a session is over
    GET  /health /metrics            without a key

All of /v1 also stands under /s/SESSION/v1. Errors have OpenAI's shape; what a request is counted
under when it is refused is the error's `code`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec
from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from connectors.engines.pool import EnginePool
from connectors.engines.types import Sampling
from connectors.gateway import asked as bodies_in
from connectors.gateway import bodies, feedback
from connectors.gateway.answers import Answer
from connectors.gateway.calls import Calls
from connectors.gateway.errors import Refused, no_model
from connectors.gateway.headers import Headers
from connectors.gateway.keys import Keys
from connectors.gateway.log import TrafficLog
from connectors.gateway.metrics import Metrics
from connectors.gateway.retries import Retries, Try
from connectors.gateway.sessions import Sessions, scoped
from connectors.records import Version
from connectors.text import Text
from connectors.traffic import End

log = logging.getLogger(__name__)

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]
LATEST: Final = "latest"
CLIENT_GONE: Final = 499


class GatewayServer:
    """The routes, over the parts that do the work. `names`: of the model whatever its version."""

    def __init__(
        self,
        *,
        names: tuple[str, ...],
        sampling: Sampling,
        text: Text,
        pool: EnginePool,
        keys: Keys,
        headers: Headers,
        sessions: Sessions,
        calls: Calls,
        retries: Retries,
        traffic: TrafficLog,
        metrics: Metrics,
        max_body_bytes: int,
    ) -> None:
        self._names, self._sampling, self._pool = names, sampling, pool
        self._keys, self._headers, self._sessions = keys, headers, sessions
        self._calls, self._retries, self._traffic = calls, retries, traffic
        self._metrics, self._max_body_bytes = metrics, max_body_bytes
        self._spell = partial(text.decode, special=True)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=[self._answered])
        routes = [
            web.get("/health", self.health, allow_head=False),
            web.get("/metrics", self.metrics, allow_head=False),
        ]
        for start in ("", "/s/{session}"):
            routes += [
                web.post(f"{start}/v1/chat/completions", self.chat),
                web.get(f"{start}/v1/models", self.models, allow_head=False),
                web.get(f"{start}/v1/models/{{model}}", self.model, allow_head=False),
                web.post(f"{start}/v1/feedback", self.feedback),
            ]
        routes.append(web.post("/v1/sessions/{session}/end", self.end))
        app.add_routes(routes)
        return app

    # ------------------------------------------------------------------------------- the routes
    async def chat(self, request: web.Request) -> web.StreamResponse:
        owner = self._owner(request)
        asked = bodies_in.read(await request.read(), self._sampling)
        caller = self._headers.caller(request, owner, asked.user)
        pinned = await self._pinned(asked.model)
        this = Try(
            owner=owner,
            session=caller.session,
            digest=asked.digest,
            idempotency_key=request.headers.get("idempotency-key"),
            number=_number(request.headers.get("x-stainless-retry-count")),
        )
        answer = self._retries.find(this)
        if answer is None:
            answer = self._calls.begin(caller, asked, pinned)
            self._retries.keep(this, answer)
        else:
            self._metrics.retries.inc()
        with answer.followed(lambda: _is_gone(request)):
            return await (self._stream if asked.stream else self._whole)(request, answer)

    async def models(self, request: web.Request) -> web.Response:
        self._owner(request)
        return _json(bodies.models(await self._served(), self._names[-1]))

    async def model(self, request: web.Request) -> web.Response:
        self._owner(request)
        name, served = request.match_info["model"], await self._served()
        if name not in served:
            raise no_model(name, served)
        return _json(bodies.model(name, self._names[-1]))

    async def feedback(self, request: web.Request) -> web.Response:
        owner = self._owner(request)
        facts = feedback.read(await request.read(), self._headers.session(request))
        try:
            self._traffic.write_feedback(owner, facts)
        except OSError as error:
            raise _unwritten(error) from error
        found = [{"id": f.id, "session": f.session or None, "call": f.call} for f in facts]
        return _json({"object": "feedback", "recorded": found})

    async def end(self, request: web.Request) -> web.Response:
        owner = self._owner(request)
        shown = self._headers.checked(request.match_info["session"], "session")
        session = scoped(owner, shown)
        self._sessions.forget(session)
        try:
            self._traffic.write_end(End(session=session, time=time.time()))
        except OSError as error:
            raise _unwritten(error) from error
        return _json({"object": "session", "id": shown, "ended": True})

    async def health(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def metrics(self, _: web.Request) -> web.Response:
        text = generate_latest(self._metrics.registry)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    # ------------------------------------------------------------------------------ the answers
    async def _stream(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        await answer.begun()
        response = web.StreamResponse(headers=_headers_of(answer))
        response.headers.update({"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with self._delivering(answer):
            await response.prepare(request)
            try:
                async for event in bodies.stream(answer, self._spell):
                    await response.write(event)
            except Refused as error:
                self._metrics.refused.labels(error.code).inc()
                await response.write(bodies.failure(error))
            await response.write_eof()
        return response

    async def _whole(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        await answer.ended()
        response = _json(bodies.completion(answer, self._spell))
        response.headers.update(_headers_of(answer))
        with self._delivering(answer):
            await response.prepare(request)
            await response.write_eof()
        return response

    @contextmanager
    def _delivering(self, answer: Answer) -> Iterator[None]:
        """A client that goes away inside ends it; one that stays has all of the answer."""
        try:
            yield
        except ConnectionError:
            self._metrics.disconnects.inc()
        else:
            answer.delivered = answer.delivered or answer.error is None

    # --------------------------------------------------------------------------- what they share
    def _owner(self, request: web.Request) -> str:
        return self._keys.owner(request.headers.get("Authorization"))

    async def _served(self) -> list[str]:
        return [*self._names, *map(str, await self._pool.versions())]

    async def _pinned(self, name: str) -> Version | None:
        """The version that a model's name pins. Refused (404) when no engine holds it."""
        if name in self._names:
            return None
        held = await self._pool.versions()
        found = next((version for version in held if str(version) == name), None)
        if found is None:
            raise no_model(name, [*self._names, *map(str, held)])
        return found

    @web.middleware
    async def _answered(self, request: web.Request, handler: Reply) -> web.StreamResponse:
        """Every end of a request is an answer of one shape, and counted."""
        try:
            response = await handler(request)
        except Refused as error:
            response = self._refused(error)
        except web.HTTPRequestEntityTooLarge:
            limit = self._max_body_bytes
            response = self._refused(
                Refused(413, f"The body is larger than {limit} bytes", code="body_too_large")
            )
        except web.HTTPException as error:
            what = f"{request.method} {request.path}"
            code = "not_found" if error.status == 404 else "bad_method"
            response = self._refused(Refused(error.status, f"Invalid URL ({what})", code=code))
        except ConnectionError:  # gone before its request was whole
            self._metrics.disconnects.inc()
            response = web.Response(status=CLIENT_GONE)
        except Exception as fault:  # a fault of ours: the client gets an answer it can read
            log.exception("%s failed", request.path)
            response = self._refused(Refused(500, type(fault).__name__, code="internal_error"))
        route = request.match_info.route.resource
        name = "none" if route is None else route.canonical.removeprefix("/s/{session}")
        self._metrics.requests.labels(name, str(response.status)).inc()
        return response

    def _refused(self, error: Refused) -> web.Response:
        self._metrics.refused.labels(error.code).inc()
        return _json(error.body(), error.status)


def _headers_of(answer: Answer) -> dict[str, str]:
    return {"x-headwater-session": answer.session, "x-headwater-version": str(answer.version)}


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) < 6 else 0


def _unwritten(error: OSError) -> Refused:
    return Refused(503, f"it could not be written: {error}", code="journal_failed")


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )
