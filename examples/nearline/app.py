"""An agent application as people have them: it answers users through the official OpenAI client,
and passes on what they press. All that makes its traffic training data is the base URL.

    headwater run examples/nearline.toml &
    python examples/nearline/app.py --sessions 8000

Every so often it prints the share of right answers among those just served, which users' thumbs are
only a noisy, late and incomplete sign of. `--export DIR` also writes the application's own log, as
an observability product would export it: texts and scores, no token ids.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
import uuid
from collections import deque
from datetime import UTC, datetime
from pathlib import Path

import users
from openai import APIError, AsyncOpenAI

WINDOW = 400
"""Answers the printed share is of."""
SAID_EVERY = 400


class Application:
    """`minute_s`: seconds of this run that one simulated minute takes."""

    def __init__(self, client: AsyncOpenAI, minute_s: float, export: Export | None) -> None:
        self._client, self._minute_s, self._export = client, minute_s, export
        self._right: deque[bool] = deque(maxlen=WINDOW)
        self.served: list[bool] = []
        self._later: set[asyncio.Task[None]] = set()

    async def session(self, rng: random.Random) -> None:
        """One user: asks once or twice, then leaves. Thumbs come when they come."""
        name = uuid.UUID(int=rng.getrandbits(128)).hex
        messages: list[dict[str, str]] = []
        while True:
            asked, wanted = users.question(rng)
            messages.append({"role": "user", "content": asked})
            started = time.time()
            answer = await self._client.chat.completions.create(
                model="latest",
                messages=messages,  # type: ignore[arg-type]
                extra_headers={"x-headwater-session": name},
            )
            said = answer.choices[0].message.content or ""
            self._serve(said == wanted)
            if self._export is not None:
                self._export.observation(name, answer.id, messages, said, started)
            messages.append({"role": "assistant", "content": said})
            for thumb in users.thumbs(said == wanted, rng):
                self._spawn(self._press(name, answer.id, thumb, rng.getrandbits(64)))
            if rng.random() > users.SHARE_AGAIN:
                return
            await asyncio.sleep(rng.expovariate(1 / users.MEAN_PAUSE) * self._minute_s)

    async def drain(self, limit_s: float) -> None:
        """Waits for what users still have to say, but not for ever."""
        if self._later:
            await asyncio.wait(self._later, timeout=limit_s)
        for task in self._later:
            task.cancel()

    async def _press(self, session: str, call: str, thumb: users.Thumb, number: int) -> None:
        await asyncio.sleep(thumb.after * self._minute_s)
        body = {"id": f"{call}/{number:x}", "session": session, "call": call,
                "name": "thumb", "value": thumb.value}  # fmt: skip
        await self._client.post("/feedback", cast_to=object, body=body)
        if self._export is not None:
            self._export.score(session, call, body["id"], thumb.value)

    def _serve(self, is_right: bool) -> None:
        self._right.append(is_right)
        self.served.append(is_right)
        if len(self.served) % SAID_EVERY == 0:
            share = sum(self._right) / len(self._right)
            print(
                f"{len(self.served):6d} answers, {share:.2f} of the last {WINDOW} right", flush=True
            )

    def _spawn(self, work) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)


class Export:
    """The application's own log, in the columns of Langfuse's export."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._observations = (folder / "observations.jsonl").open("a")
        self._scores = (folder / "scores.jsonl").open("a")

    def observation(
        self, session: str, call: str, messages: list[dict[str, str]], said: str, started: float
    ) -> None:
        row = {
            "id": call, "trace_id": session, "session_id": session, "type": "GENERATION",
            "start_time": _stamp(started), "end_time": _stamp(time.time()),
            "input": json.dumps(messages),
            "output": json.dumps({"role": "assistant", "content": said}),
            "provided_model_name": "latest",
        }  # fmt: skip
        print(json.dumps(row), file=self._observations, flush=True)

    def score(self, session: str, call: str, number: str, value: float) -> None:
        row = {"id": number, "timestamp": _stamp(time.time()), "trace_id": session,
               "observation_id": call, "session_id": session, "name": "thumb", "value": value,
               "source": "API", "data_type": "NUMERIC"}  # fmt: skip
        print(json.dumps(row), file=self._scores, flush=True)


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")


async def serve(arguments: argparse.Namespace) -> list[bool]:
    """Whether each answer was right, in the order of serving."""
    client = AsyncOpenAI(base_url=arguments.url, api_key="none", max_retries=10, timeout=120.0)
    export = Export(arguments.export) if arguments.export else None
    application = Application(client, arguments.minute_s, export)
    seeds = iter(range(arguments.sessions))

    async def user() -> None:
        for seed in seeds:
            try:
                await application.session(random.Random(f"{arguments.seed}/{seed}"))
            except APIError as error:
                print(f"a session failed: {error}", flush=True)

    await asyncio.gather(*(user() for _ in range(arguments.users)))
    await application.drain(arguments.drain_s)
    await client.close()
    return application.served


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8100/v1", help="the gateway's")
    parser.add_argument("--sessions", type=int, default=8000)
    parser.add_argument("--users", type=int, default=16, help="at the same time")
    parser.add_argument("--minute-s", type=float, default=0.05, help="seconds of a minute")
    parser.add_argument("--drain-s", type=float, default=10.0, help="for late thumbs at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", type=Path, help="a folder for the application's own log")
    served = asyncio.run(serve(parser.parse_args()))
    tenth = max(1, len(served) // 10)
    first, last = sum(served[:tenth]) / tenth, sum(served[-tenth:]) / tenth
    print(f"{len(served)} answers: {first:.2f} of the first tenth right, {last:.2f} of the last")


if __name__ == "__main__":
    main()
