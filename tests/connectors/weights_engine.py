"""A process that holds weights and generates nothing: an engine as the weights channel sees one.

    python weights_engine.py WIDTH LAYERS SEED PORT    prints its URL, serves until it is killed

POST /break {"next": HOW} makes the next update fail: "refuse" it, "write" not all of it, "lie" in
the acknowledgement, "flip" the announced digest, "die" or "stop" once the sender has begun, be
"blind" to its memory.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

import msgspec
import torch
from aiohttp import web

from connectors.engines.host import this_host
from connectors.engines.types import EngineState
from connectors.records import Version
from connectors.weights import (
    Ack,
    FenceRequest,
    JoinRequest,
    LoadRequest,
    RelabelRequest,
    Staged,
    UpdateRequest,
    WeightsError,
    WeightsReceiver,
)


def model(width: int, layers: int, seed: int) -> torch.nn.Module:
    """The trainer's and the engines' model: equal arguments give equal bytes."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))


class FailingReceiver(WeightsReceiver):
    failure = ""
    num_updates = 0  # and loads
    num_loads = 0

    def _take_failure(self, *ways: str) -> str:
        way = self.failure if self.failure in ways else ""
        if way:
            self.failure = ""
        return way

    def _await_start(self, *args: Any) -> None:
        super()._await_start(*args)
        self._end_or_stop()

    def _end_or_stop(self) -> None:
        way = self._take_failure("die", "stop")
        if way:
            os.kill(os.getpid(), signal.SIGKILL if way == "die" else signal.SIGSTOP)

    def update(self, request: UpdateRequest) -> Ack:
        return self._install(self.receive(self._misread(request)))

    def load(self, request: LoadRequest) -> Ack:
        if self._take_failure("blind"):
            request = msgspec.structs.replace(request, fd=1 << 20)
        with self.loaded(self._misread(request)) as staged:
            self._end_or_stop()
            ack = self._install(staged)
        self.num_loads += 1
        return ack

    def _misread(self, request: Any) -> Any:
        if self._take_failure("refuse"):
            raise WeightsError("told to refuse")
        if self._take_failure("flip"):
            return msgspec.structs.replace(request, digest="0" * 16)
        return request

    def _install(self, staged: Staged) -> Ack:
        try:
            ack = self.apply(staged, self._write_one if self._take_failure("write") else None)
        except OSError as error:
            raise WeightsError(str(error)) from error
        if self._take_failure("lie"):
            return Ack(version=Version(9, 9), digest=ack.digest)
        self.num_updates += 1
        return ack

    def _write_one(self, name: str, tensor: torch.Tensor) -> None:
        if not name.startswith("0."):
            raise OSError(f"no room for {name}")
        self._parameters[name].copy_(tensor)


def application(receiver: FailingReceiver) -> web.Application:
    async def answer(request: web.Request, kind: type, work: Any) -> web.Response:
        body = msgspec.json.decode(await request.read(), type=kind)
        try:
            result = await asyncio.to_thread(work, body)
        except WeightsError as error:
            return web.Response(status=error.status, body=error.body())
        return web.Response(body=msgspec.json.encode({} if result is None else result))

    async def state(request: web.Request) -> web.Response:
        held = EngineState(
            version=receiver.version,
            digest=receiver.digest,
            epoch=receiver.epoch,
            num_running=0,
            num_queued=0,
            kv_use=0.0,
            host=this_host(),
            info={"num_updates": receiver.num_updates, "num_loads": receiver.num_loads},
        )
        return web.Response(body=msgspec.json.encode(held))

    async def fail(request: web.Request) -> web.Response:
        receiver.failure = (await request.json())["next"]
        return web.json_response({})

    routes = {
        "join": (JoinRequest, receiver.join),
        "update": (UpdateRequest, receiver.update),
        "load": (LoadRequest, receiver.load),
        "relabel": (RelabelRequest, receiver.relabel),
        "fence": (FenceRequest, receiver.fence),
    }
    app = web.Application(client_max_size=16 << 20)
    for name, (kind, work) in routes.items():

        async def handle(request: web.Request, kind: Any = kind, work: Any = work) -> web.Response:
            return await answer(request, kind, work)

        app.router.add_post(f"/weights/{name}", handle)
    app.router.add_get("/state", state)
    app.router.add_post("/break", fail)
    return app


async def serve(receiver: FailingReceiver, port: int) -> None:
    runner = web.AppRunner(application(receiver))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    width, layers, seed, port = (int(word) for word in sys.argv[1:5])
    asyncio.run(serve(FailingReceiver(model(width, layers, seed).named_parameters()), port))
