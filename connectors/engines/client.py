"""One engine over HTTP. What it answers is checked here, so that whoever asks may rely on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import msgspec
from msgspec.structs import replace

from connectors.engines.answers import misfit, nonsense
from connectors.engines.told import Told
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    Part,
    RequestRefused,
    VersionGone,
)
from connectors.engines.wire import (
    MAX_ANSWER_BYTES,
    ErrorBody,
    Last,
    RequestId,
    decoded,
    decoded_line,
)

CONNECT_S = 5.0
STATE_S = 2.0  # an engine that takes longer to say how it is counts as unreachable

# Generation takes as long as it takes, and the caller has its own time cap.
ENDLESS = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)

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

    async def stream(self, request: GenerateRequest, told: Callable[[Part], None]) -> Completions:
        """Like `generate`, after `told` got each of the tokens, in parts as they come. On an error
        what was told until then is a beginning of what the engine would have answered."""
        so_far = [Told() for _ in range(request.num_samples)]
        done: Completions | None = None
        async with aclosing(self._lines("/stream", request)) as lines:
            async for line in lines:
                if done is not None:
                    raise self._no_sense("it goes on after its end")
                if isinstance(line, ErrorBody):
                    raise _failure(self.url, line)
                if isinstance(line, Last):
                    done = await self._ended(line.done, so_far, request)
                else:
                    await self._check_part(line, so_far, request)
                    so_far[line.sample].add(line)
                    told(line)
        if done is None:
            raise EngineUnavailable(f"{self.url}: the stream broke off")
        return done

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
            raise self._no_sense(why)
        return done

    async def _check_part(self, part: Part, so_far: list[Told], request: GenerateRequest) -> None:
        """EngineError unless it makes sense, as in `checked`."""
        if self._state is None or misfit(part, so_far, request, self._state) is not None:
            why = misfit(part, so_far, request, await self.state())
            if why is not None:
                raise self._no_sense(why)

    async def _ended(
        self, done: Completions, so_far: list[Told], request: GenerateRequest
    ) -> Completions:
        await self.checked(done, request)
        for told, whole in zip(so_far, done, strict=True):
            if told.completion(whole.finish_reason) != whole:
                raise self._no_sense("it ends with other tokens than it told")
        return done

    def _no_sense(self, why: object) -> EngineError:
        return EngineError(f"{self.url}: the answer makes no sense: {why}")

    async def _post(self, path: str, body: msgspec.Struct, kind: Any) -> Any:
        return await self._call("POST", path, msgspec.json.encode(body), kind, ENDLESS)

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
        async with aclosing(self._chunks(method, path, body, timeout)) as chunks:
            data = await self._read(chunks)
        try:
            return decoded(data, kind)
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: the answer makes no sense: {error}") from error

    async def _lines(
        self, path: str, body: msgspec.Struct
    ) -> AsyncGenerator[Part | Last | ErrorBody, None]:
        """Of an answer that is a stream, as they come."""
        begun = bytearray()
        data = msgspec.json.encode(body)
        async with aclosing(self._chunks("POST", path, data, ENDLESS)) as chunks:
            async for chunk in chunks:
                *ends, rest = chunk.split(b"\n")
                for end in ends:
                    begun += end
                    yield self._line(begun)
                    begun.clear()
                begun += rest
                self._check_size(begun)

    def _line(self, data: bytes | bytearray) -> Part | Last | ErrorBody:
        try:
            return decoded_line(data)
        except ValueError as error:
            raise self._no_sense(error) from error

    async def _chunks(
        self, method: str, path: str, body: bytes | None, timeout: aiohttp.ClientTimeout
    ) -> AsyncGenerator[bytes, None]:
        """The answer's body as it comes. EngineUnavailable when the line breaks; what a status
        other than 200 stands for."""
        try:
            async with self._sessions.open().request(
                method, self.url + path, data=body, timeout=timeout
            ) as answer:
                if answer.status != 200:
                    data = await self._read(answer.content.iter_any())
                    raise _failure(self.url, _error_body(answer.status, data))
                async for chunk in answer.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            message = str(error) or type(error).__name__
            raise EngineUnavailable(f"{self.url}: {message}") from error

    async def _read(self, chunks: AsyncIterator[bytes]) -> bytes:
        data = bytearray()
        async for chunk in chunks:
            data += chunk
            self._check_size(data)
        return bytes(data)

    def _check_size(self, data: bytearray) -> None:
        if len(data) > MAX_ANSWER_BYTES:
            raise EngineError(f"{self.url}: the answer exceeds {MAX_ANSWER_BYTES} bytes")


def _error_body(status: int, data: bytes) -> ErrorBody:
    try:
        body: ErrorBody = decoded(data, ErrorBody)
    except ValueError:
        body = ErrorBody(error=f"HTTP {status}")
    return replace(body, kind="unavailable") if status == 503 else body


def _failure(url: str, body: ErrorBody) -> EngineError:
    kinds = {
        "refused": RequestRefused,
        "version_gone": VersionGone,
        "unavailable": EngineUnavailable,
    }
    return kinds.get(body.kind, EngineError)(f"{url}: {body.error}")
