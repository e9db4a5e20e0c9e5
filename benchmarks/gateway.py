"""What the gateway adds, and whether it loses anything.

    python -P -m benchmarks.gateway
    python -P -m benchmarks.gateway --calls 5000 --json FILE

Latency: `--streams` clients at once, each with one request after the other, in turn against the
engine's own /stream and against the gateway's /v1/chat/completions in front of the same engine: the
`hf` kind and the tests' tiny model, in a process that shares the machine's cores. Both ask for the
same tokens: the same prompt ids, sampling and seeds. First text is the first moment at which the
tokens so far spell whole characters; whole, when the answer has ended. Rounds alternate, the first
is left out; percentiles are over the requests of the others, `added` is the difference of two.

Loss: `--calls` calls, every second one streamed, through the gateway to an engine that answers with
canned tokens at once. The broker is killed (SIGKILL) after a third of them and started again after
`--away-s`. Lost are answers that a client got in full and the log lacks; doubled, calls that the
log has more than once; altered, those whose text is not what the client got. All are counted from
the log. Broker, engine and gateway are processes; traffic is on the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec
import numpy as np
import tomli_w

from benchmarks import table
from benchmarks.plumbing import Processes
from connectors.engines.client import HttpEngine
from connectors.engines.types import GenerateRequest, Part, Sampling
from connectors.gateway.texts import UNFINISHED
from connectors.kafka.client import Cluster, read_all
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import Version
from connectors.run_dir import RunDir
from connectors.text import Text
from connectors.traffic import Call, decode_traffic
from connectors.weights import WeightsSender
from tests.broker_process import BrokerProcess
from tests.models import tiny_model

PARTITIONS: Final = 2
TOKENS: Final = 64
LOG_S: Final = 120.0
"""For the last records to reach the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    engine: str
    gateway: str
    broker: BrokerProcess
    text: Text

    @property
    def cluster(self) -> Cluster:
        return Cluster(bootstrap_servers=self.broker.bootstrap)


@contextmanager
def served(folder: Path, *, canned: bool) -> Iterator[Service]:
    """An engine, a gateway and a broker, all of them new."""
    folder.mkdir(parents=True)
    model = tiny_model(folder / "model")
    with ExitStack() as stack:
        broker = BrokerProcess(folder / "broker")
        stack.callback(broker.stop)
        file, run_dir = folder / "config.toml", RunDir(folder / "run")
        file.write_text(tomli_w.dumps(configuration(model, broker)))
        ensure_topics(Cluster(bootstrap_servers=broker.bootstrap), topics(PARTITIONS))
        processes = Processes(file, run_dir)
        stack.callback(processes.end)
        (processes.stand_in if canned else processes.product)("engine")
        engine = str(run_dir.url("engine-0"))
        digest = asyncio.run(digest_of(engine))
        with closing(WeightsSender(20, "memory")) as sender:
            sender.relabel(Version(0, 0), digest, 1, [engine])
        processes.product("gateway")
        gateway = str(run_dir.url("gateway"))
        yield Service(engine=engine, gateway=gateway, broker=broker, text=Text(model))


def configuration(model: Path, broker: BrokerProcess) -> dict[str, Any]:
    return {
        "run": {"name": "gateway"},
        "kafka": {"partitions": PARTITIONS, "bootstrap_servers": broker.bootstrap},
        "model": {"path": str(model), "context_tokens": 512},
        "engine": {"max_running": 64},
        "sampling": {"max_tokens": TOKENS},
        "gateway": {},
        "tasks": {"t": {"reward": "exact_match"}},
    }


async def digest_of(url: str) -> str:
    engine = HttpEngine(url)
    try:
        return (await engine.state()).digest
    finally:
        await engine.close()


# -------------------------------------------------------------------------------------- latency
@dataclass(slots=True)
class Times:
    """Milliseconds, one for each request, and tokens of all answers."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    num_tokens: int = 0


def latency(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with served(folder, canned=False) as service:
        return asyncio.run(_latency(service, arguments))


async def _latency(service: Service, arguments: argparse.Namespace) -> dict[str, Any]:
    engine, gateway = Times(), Times()
    direct = HttpEngine(service.engine)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        for round_ in range(arguments.rounds + 1):
            into = (engine, gateway) if round_ else (Times(), Times())  # the first warms up
            seeds = [
                [1000 * (round_ * arguments.streams + stream) + turn for turn in range(5)]
                for stream in range(arguments.streams)
            ]

            async def of_engine(mine: list[int], times: Times = into[0]) -> None:
                for seed in mine:
                    await ask_engine(service, direct, seed, times)

            async def of_gateway(mine: list[int], times: Times = into[1]) -> None:
                for seed in mine:
                    await ask_gateway(service, http, seed, times)

            sides = [of_engine, of_gateway]
            for side in sides if round_ % 2 else reversed(sides):
                await asyncio.gather(*(side(mine) for mine in seeds))
    await direct.close()
    return {
        "streams": arguments.streams,
        "requests": len(engine.whole),
        "tokens": TOKENS,
        "generated": {"engine": engine.num_tokens, "gateway": gateway.num_tokens},
        "ms": {
            f"{name}_{part}": {
                f"p{q}": round(float(np.percentile(getattr(times, part), q)), 2) for q in (50, 95)
            }
            for name, times in (("engine", engine), ("gateway", gateway))
            for part in ("first", "whole")
        },
    }


def messages(seed: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"question {seed}"}]


async def ask_engine(service: Service, engine: HttpEngine, seed: int, times: Times) -> None:
    text = service.text
    ids = text.encode(text.render(messages(seed)))
    sampling = Sampling(max_tokens=TOKENS, stop_ids=text.stop_ids, seed=seed)
    request = GenerateRequest(
        request_id=f"direct-{seed}-{time.monotonic_ns()}", token_ids=tuple(ids), sampling=sampling
    )
    heard: list[tuple[float, Part]] = []
    begun = time.perf_counter()
    (done,) = await engine.stream(request, lambda part: heard.append((time.perf_counter(), part)))
    times.whole.append(1000 * (time.perf_counter() - begun))
    times.num_tokens += len(done.token_ids)
    so_far: list[int] = []
    for when, part in heard:
        so_far += part.token_ids
        if (shown := text.decode(so_far)) and not shown.endswith(UNFINISHED):
            times.first.append(1000 * (when - begun))
            break


async def ask_gateway(
    service: Service, http: aiohttp.ClientSession, seed: int, times: Times
) -> None:
    begun = time.perf_counter()
    first = None
    body = {"messages": messages(seed), "seed": seed, "stream_options": {"include_usage": True}}
    async for event in events(service, http, body):
        if usage := event.get("usage"):
            times.num_tokens += usage["completion_tokens"]
        elif first is None and event["choices"][0]["delta"].get("content"):
            first = 1000 * (time.perf_counter() - begun)
    times.whole.append(1000 * (time.perf_counter() - begun))
    if first is not None:
        times.first.append(first)


async def events(
    service: Service, http: aiohttp.ClientSession, body: dict[str, Any]
) -> AsyncIterator[Any]:
    """Of a streamed answer; RuntimeError unless it came in full."""
    asked = {"model": "latest", "stream": True, **body}
    async with http.post(f"{service.gateway}/v1/chat/completions", json=asked) as answer:
        if answer.status != 200:
            raise RuntimeError(await answer.text())
        async for line in answer.content:
            if line == b"data: [DONE]\n":
                return
            if line.startswith(b"data: "):
                event = msgspec.json.decode(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                yield event
    raise RuntimeError("the stream broke off")


# ----------------------------------------------------------------------------------------- loss
def loss(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    with served(folder, canned=True) as service:
        began = time.monotonic()
        answered, failed = asyncio.run(_calls(service, arguments))
        took_s = time.monotonic() - began
        found = recorded(service, set(answered), LOG_S)
        in_log_s = time.monotonic() - began
    times = Counter(call.id for call in found)
    said = {call.id: call.choices[0].message["content"] for call in found}
    return {
        "calls": arguments.calls,
        "answered": len(answered),
        "failed": failed,
        "broker_away_s": arguments.away_s,
        "calls_s": round(took_s, 1),
        "all_in_log_s": round(in_log_s, 1),
        "calls_per_s": round(arguments.calls / took_s, 1),
        "recorded": len(found),
        "lost": len(answered.keys() - times.keys()),
        "doubled": sum(count > 1 for count in times.values()),
        "altered": sum(said.get(name, text) != text for name, text in answered.items()),
    }


async def _calls(service: Service, arguments: argparse.Namespace) -> tuple[dict[str, str], int]:
    """Text by id of each answer that came in full, and how many did not."""
    answered: dict[str, str] = {}
    numbers = iter(range(arguments.calls))
    failed = 0

    async def client(http: aiohttp.ClientSession) -> None:
        nonlocal failed
        for number in numbers:
            try:
                name, text = await answer(service, http, number)
                answered[name] = text
            except (RuntimeError, aiohttp.ClientError):
                failed += 1

    async def outage() -> None:
        while len(answered) + failed < arguments.calls // 3:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(service.broker.kill9)
        await asyncio.sleep(arguments.away_s)
        await asyncio.to_thread(service.broker.start)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await asyncio.gather(outage(), *(client(http) for _ in range(arguments.streams)))
    return answered, failed


async def answer(service: Service, http: aiohttp.ClientSession, number: int) -> tuple[str, str]:
    body = {"messages": messages(number), "seed": number}
    if number % 2:
        name, text = "", ""
        async for event in events(service, http, body):
            name, text = event["id"], text + event["choices"][0]["delta"].get("content", "")
        return name, text
    asked = {"model": "latest", **body}
    async with http.post(f"{service.gateway}/v1/chat/completions", json=asked) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        found = msgspec.json.decode(await response.read())
    return found["id"], found["choices"][0]["message"]["content"]


def recorded(service: Service, wanted: set[str], timeout_s: float) -> list[Call]:
    """The calls in the log, once it has all that are wanted or `timeout_s` has passed."""
    cluster = service.cluster
    deadline = time.monotonic() + timeout_s
    while True:
        records = read_all(cluster, cluster.topic("agent-traffic"), range(PARTITIONS))
        calls = [c for r in records if isinstance(c := decode_traffic(r.value), Call)]
        if wanted <= {call.id for call in calls} or time.monotonic() > deadline:
            return calls
        time.sleep(0.2)


# --------------------------------------------------------------------------------------- output
def shown(found: dict[str, Any]) -> str:
    lines = []
    if timed := found.get("latency"):
        ms = timed["ms"]
        rows = [
            [
                f"{part} {q}", f"{ms[f'engine_{part}'][q]:.1f}", f"{ms[f'gateway_{part}'][q]:.1f}",
                f"{ms[f'gateway_{part}'][q] - ms[f'engine_{part}'][q]:+.1f}",
            ]
            for part in ("first", "whole") for q in ("p50", "p95")
        ]  # fmt: skip
        lines += [
            f"{timed['streams']} streams of up to {timed['tokens']} tokens, "
            f"{timed['requests']} requests a side, "
            f"{timed['generated']['engine']} and {timed['generated']['gateway']} tokens",
            table.table(["ms", "engine", "gateway", "added"], rows),
            "",
        ]
    if lost := found.get("loss"):
        lines += [
            f"{lost['calls']} calls ({lost['calls_per_s']:g}/s), the broker killed and away for "
            f"{lost['broker_away_s']:g} s",
            table.table(
                ["answered", "failed", "recorded", "lost", "doubled", "altered"],
                [[str(lost[name]) for name in
                  ("answered", "failed", "recorded", "lost", "doubled", "altered")]],
            ),
        ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=20, help="clients at once")
    parser.add_argument("--rounds", type=int, default=6, help="of latency, 5 requests a client")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--away-s", type=float, default=5.0)
    parser.add_argument("--only", choices=("latency", "loss"))
    parser.add_argument("--json", metavar="FILE", help="one JSON object, '-' prints it")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"machine": table.machine()}
    with tempfile.TemporaryDirectory() as temporary:
        for part in (latency, loss):
            if arguments.only in (None, part.__name__):
                found[part.__name__] = part(Path(temporary) / part.__name__, arguments)
    if arguments.json:
        table.write(found, arguments.json)
    else:
        print(json.dumps(found))
    print(shown(found))


if __name__ == "__main__":
    main()
