"""A gateway on the loopback, in the test's own loop, over a scripted model or real engines."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from connectors.engines.types import (
    Completion,
    EngineError,
    GenerateRequest,
    Part,
    Sampling,
)
from connectors.gateway.calls import Calls
from connectors.gateway.headers import Headers
from connectors.gateway.keys import Keys
from connectors.gateway.log import TrafficLog
from connectors.gateway.metrics import Metrics
from connectors.gateway.redaction import Redaction
from connectors.gateway.retries import Retries
from connectors.gateway.server import GatewayServer
from connectors.gateway.sessions import Sessions
from connectors.records import Segment, Version
from connectors.text import Text
from connectors.traffic import Call, End, Feedback, decode_traffic

NUM_PARTITIONS = 4

TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %} {{ t['function']['name'] }}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and '</think>' in m['content'] and not loop.last %}"
    "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML that knows tools and drops the thoughts of earlier turns."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def with_tool_template(model: Path, folder: Path) -> Path:
    """A copy of the model that has TOOL_TEMPLATE."""
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


class ScriptedPool:
    """A model that writes what it is told to: `texts` in turn, the last for ever, ended by its stop
    id; `by` bytes a part, each after `gate` is open. `fails`: raised before anything is told, or
    after `told_before` parts. `changes`: the version after the first part."""

    def __init__(self, text: Text, *texts: str | Sequence[int], by: int = 4) -> None:
        self._text, self.texts, self.by = text, list(texts) or ["yes"], by
        self.version = Version(0, 3)
        self.changes: Version | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: EngineError | None = None
        self.told_before = 0
        self.is_held_up = False
        self.requests: list[GenerateRequest] = []
        self.num_running = 0

    async def stream(
        self, request: GenerateRequest, told: Callable[[Part], None]
    ) -> tuple[Completion, ...]:
        self.requests.append(request)
        self.num_running += 1
        try:
            return await self._generated(request, told)
        finally:
            self.num_running -= 1

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        return await self.stream(request, lambda part: None)

    async def versions(self) -> list[Version]:
        return [self.version]

    def held_up(self, request_id: str) -> bool:
        return self.is_held_up

    async def _generated(
        self, request: GenerateRequest, told: Callable[[Part], None]
    ) -> tuple[Completion, ...]:
        written = [self._ids(request) for _ in range(request.num_samples)]
        made = [self._completion(ids, request) for ids in written]
        num_told = 0
        for start in range(0, max(len(ids) for ids in written), self.by):
            for k, done in enumerate(made):
                await self.gate.wait()
                if self.fails is not None and num_told == self.told_before:
                    raise self.fails
                if (part := _part(k, done, start, start + self.by)) is not None:
                    told(part)
                    num_told += 1
                await asyncio.sleep(0)
        return tuple(made)

    def _ids(self, request: GenerateRequest) -> tuple[int, ...]:
        written = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        if not isinstance(written, str):
            return tuple(written)
        stop = self._text.encode("<|im_end|>")
        return tuple([*self._text.encode(written), *stop][: request.sampling.max_tokens])

    def _completion(self, ids: tuple[int, ...], request: GenerateRequest) -> Completion:
        later = self.version if self.changes is None else self.changes
        cut = min(self.by, len(ids))
        segments = [Segment(0, cut, self.version.incarnation, self.version.number)]
        if len(ids) > cut:
            if later == self.version:
                segments = [Segment(0, len(ids), later.incarnation, later.number)]
            else:
                segments.append(Segment(cut, len(ids), later.incarnation, later.number))
        stopped = ids[-1] in request.sampling.stop_ids
        return Completion(
            token_ids=ids,
            logprobs=tuple(-0.25 * (1 + i % 7) for i in range(len(ids))),
            segments=tuple(segments),
            finish_reason="stop" if stopped else "length",
        )


def _part(sample: int, done: Completion, start: int, end: int) -> Part | None:
    if start >= len(done.token_ids):
        return None
    version = next(s.version for s in done.segments if s.end > start)
    ids = done.token_ids[start:end]
    return Part(
        sample=sample,
        token_ids=ids,
        logprobs=done.logprobs[start:end],
        segments=(Segment(0, len(ids), version.incarnation, version.number),),
    )


class Journal:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.fails: OSError | None = None
        self.num_waiting = 0

    def write(self, record: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.records.append(record)


@dataclass
class Bench:
    url: str
    journal: Journal
    pool: Any
    text: Text
    sessions: Sessions
    http: aiohttp.ClientSession
    serving: Calls

    @property
    def calls(self) -> list[Call]:
        return [r for r in self._of("agent-traffic") if isinstance(r, Call)]

    @property
    def ends(self) -> list[End]:
        return [r for r in self._of("agent-traffic") if isinstance(r, End)]

    @property
    def facts(self) -> list[Feedback]:
        return self._of("feedback")

    def _of(self, topic: str) -> list[Any]:
        values = [r.value for r in self.journal.records if r.topic == topic]
        if topic == "feedback":
            return [msgspec.json.decode(value, type=Feedback) for value in values]
        return [decode_traffic(value) for value in values]

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        async with self.http.get(self.url + path, headers=headers) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def chat(
        self,
        messages: str | list[dict[str, Any]],
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", body(messages, **more), headers)

    async def events(self, **more: Any) -> list[Any]:
        """Of a streamed answer; the last is "[DONE]" if it came."""
        url = self.url + "/v1/chat/completions"
        async with self.http.post(url, json=body("hi", stream=True) | more) as answer:
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            lines = (await answer.text()).split("\n\n")
        found = [line.removeprefix("data: ") for line in lines if line]
        return [f if f == "[DONE]" else msgspec.json.decode(f) for f in found]

    async def metric(self, name: str) -> float:
        """`name` with its labels, as the gateway's /metrics has it; 0 where it is not there."""
        async with self.http.get(self.url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        found = [line for line in lines if line.startswith(f"headwater_gateway_{name} ")]
        return float(found[0].split()[-1]) if found else 0.0


def body(messages: str | list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return {"model": "latest", "messages": said, **more}


@asynccontextmanager
async def gateway(
    text: Text,
    pool: Any,
    *,
    keys_file: Path | None = None,
    redact: Sequence[str] = (),
    tasks: Sequence[str] = ("t",),
    sampling: Sampling | None = None,
    context_tokens: int = 1024,
    retry_s: float = 600.0,
    max_sessions: int = 100,
    max_body_bytes: int = 1 << 20,
    journal: Journal | None = None,
) -> AsyncIterator[Bench]:
    """Serving inside. `journal`: of an earlier one."""
    journal = journal or Journal()
    sessions = Sessions(text, max_sessions)
    metrics = Metrics(
        waiting=lambda: journal.num_waiting,
        running=lambda: calls.num_running,
        sessions=lambda: len(sessions),
    )
    traffic = TrafficLog(journal, Redaction(redact), metrics, NUM_PARTITIONS)  # type: ignore[arg-type]
    calls = Calls(text, pool, sessions, traffic, metrics, context_tokens)
    server = GatewayServer(
        names=("latest", "shop"),
        sampling=sampling or Sampling(max_tokens=200, stop_ids=text.stop_ids),
        text=text,
        pool=pool,
        keys=Keys(keys_file),
        headers=Headers(tasks, tasks[0] if len(tasks) == 1 else None),
        sessions=sessions,
        calls=calls,
        retries=Retries(retry_s),
        traffic=traffic,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
    )
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with aiohttp.ClientSession() as http:
        try:
            yield Bench(url, journal, pool, text, sessions, http, calls)
        finally:
            await calls.close(0.1)
            await runner.cleanup()


@asynccontextmanager
async def served(text: Text, *written: str, **settings: Any) -> AsyncIterator[Bench]:
    """A gateway over a model that writes these answers."""
    async with gateway(text, ScriptedPool(text, *written), **settings) as bench:
        yield bench


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 120))
