"""One engine over HTTP. What it answers is checked here, so that whoever asks may rely on it."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

from connectors.engines.answers import nonsense
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    RequestRefused,
)
from connectors.engines.wire import MAX_ANSWER_BYTES, ErrorBody, RequestId, decoded

CONNECT_S = 5.0
STATE_S = 2.0  # an engine that takes longer to say how it is counts as unreachable

Completions = tuple[Completion, ...]


class Sessions:
    """The HTTP session of one asyncio loop, opened at its first use."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Every running request holds a connection; how many run is not the connector's matter.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class HttpEngine:
    """For the users of one asyncio loop. Engines may share `sessions`. An answer that makes no
    sense is an EngineError with the reason."""

    def __init__(
        self, url: str, *, state_s: float = STATE_S, sessions: Sessions | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._state_s = state_s
        self._sessions = sessions or Sessions()
        self._state: EngineState | None = None  # as it was last told

    async def generate(self, request: GenerateRequest) -> Completions:
        done: Completions = await self._post("/generate", request, Completions)
        return await self.checked(done, request)

    async def attach(self, request_id: str) -> Completions | None:
        body = RequestId(request_id=request_id)
        known: Completions | None = await self._post("/attach", body, Completions | None)
        return None if known is None else await self.checked(known)

    async def cancel(self, request_id: str) -> Completions:
        body = RequestId(request_id=request_id)
        partials: Completions = await self._post("/cancel", body, Completions)
        return await self.checked(partials)

    async def state(self) -> EngineState:
        state: EngineState = await self._get("/state", EngineState)
        self._state = state
        return state

    async def check_health(self) -> None:
        """EngineError unless it says that it is well: its state may be told by a process whose
        decoder is dead."""
        await self._get("/health", msgspec.Raw)

    async def close(self) -> None:
        await self._sessions.close()

    async def checked(
        self, done: Completions, request: GenerateRequest | None = None
    ) -> Completions:
        """`done`, if it makes sense (as the answer to `request`); EngineError otherwise. It must
        be of no version newer than the engine says that it holds: said after the answer, if what
        it said before leaves a doubt."""
        if self._state is not None and nonsense(done, request, self._state) is None:
            return done
        if (why := nonsense(done, request, await self.state())) is not None:
            raise EngineError(f"{self.url}: the answer makes no sense: {why}")
        return done

    async def _post(self, path: str, body: msgspec.Struct, kind: Any) -> Any:
        # Without an end: generation takes as long as it takes, and the caller has its own time cap.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        return await self._call("POST", path, msgspec.json.encode(body), kind, timeout)

    async def _get(self, path: str, kind: Any) -> Any:
        timeout = aiohttp.ClientTimeout(total=self._state_s)
        return await self._call("GET", path, None, kind, timeout)

    async def _call(
        self,
        method: str,
        path: str,
        body: bytes | None,
        kind: Any,
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        try:
            async with self._sessions.open().request(
                method, self.url + path, data=body, timeout=timeout
            ) as answer:
                data = await self._read(answer)
                status = answer.status
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = str(error) or type(error).__name__
            raise EngineUnavailable(f"{self.url}: {message}") from error
        if status != 200:
            raise _failure(self.url, status, data)
        try:
            return decoded(data, kind)
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: the answer makes no sense: {error}") from error

    async def _read(self, answer: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for part in answer.content.iter_any():
            data += part
            if len(data) > MAX_ANSWER_BYTES:
                raise EngineError(f"{self.url}: the answer exceeds {MAX_ANSWER_BYTES} bytes")
        return bytes(data)


def _failure(url: str, status: int, data: bytes) -> EngineError:
    try:
        body = decoded(data, ErrorBody)
    except ValueError:
        body = ErrorBody(error=f"HTTP {status}")
    message = f"{url}: {body.error}"
    if body.kind == "refused":
        return RequestRefused(message)
    if status == 503:
        return EngineUnavailable(message)
    return EngineError(message)
