"""Runs user code (agents, rewards) where it cannot harm the dataflow.

                         submits            answers
    engine's loop ──▶ UserCode.run ──▶ lane (a thread with an event loop) ──▶ engine's loop
                                  └──▶ a thread of its own, for a plain function

All async user code shares one lane, so that a client object it creates once serves all its calls.
A call that holds the lane's thread without awaiting is found out when its time is up: the lane is
retired, the call fails with TookTooLong, and the calls that waited behind it start again on a new
lane, with their full time. Calls that come while a lane is held go to a new one at once. Python
cannot end a thread: a call that never returns keeps its (daemon) thread until the process ends.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any, Final

START_S: Final = 0.5
"""How long a call may wait to be started before its lane counts as held."""
HOLD_S: Final = 30.0
"""How long a call without a time limit may hold the lane's thread."""


def clean(text: str) -> str:
    """`text` as UTF-8 can hold it: user code puts anything into strings."""
    return text.encode("utf-8", "replace").decode()


def said(error: BaseException) -> str:
    """What a user's exception says, on one line, even if its own __str__ raises."""
    try:
        message = " ".join(str(error).split())
    except Exception:  # foreign code, too
        message = "its message cannot be read"
    return clean(f"{type(error).__name__}: {message}")


class TookTooLong(RuntimeError):
    """The call gave no result in its time, or held its thread beyond it."""


class UserCode:
    """Create and use it on one event loop."""

    def __init__(self, name: str, *, hold_s: float = HOLD_S) -> None:
        self._name, self._hold_s = name, hold_s
        self._lane: _Lane | None = None

    async def run(self, call: Callable[[], Any], *, timeout_s: float | None = None) -> Any:
        """What `call()` returns, awaited if it is awaitable. Its exception, or TookTooLong after
        `timeout_s`. `call` is a coroutine function's partial or a plain function's; a plain one
        runs in a thread of its own."""
        if not inspect.iscoroutinefunction(inspect.unwrap(_function(call))):
            made = await _in_thread(call, self._name, timeout_s)
            if not inspect.isawaitable(made):
                return made
            return await self._on_lane(lambda: made, timeout_s)
        return await self._on_lane(call, timeout_s)

    async def _on_lane(self, call: Callable[[], Any], timeout_s: float | None) -> Any:
        while True:
            entry = await self._started(call)
            try:
                return await self._result(entry, timeout_s)
            except _StartAgain:
                continue
            finally:
                entry.abandon()

    async def _started(self, call: Callable[[], Any]) -> _Call:
        while True:
            if self._lane is None or self._lane.retired:
                self._lane = _Lane(self._name)
            lane = self._lane
            entry = _Call(lane, call)
            lane.submit(entry)
            try:
                await asyncio.wait({entry.started}, timeout=START_S)
            except BaseException:
                entry.abandon()
                raise
            if entry.started.done():
                return entry
            entry.abandon()
            if self._lane is lane:
                self._lane = None
                lane.leave()

    async def _result(self, entry: _Call, timeout_s: float | None) -> Any:
        clock = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else clock() + timeout_s
        while True:
            left = self._hold_s if deadline is None else min(self._hold_s, deadline - clock())
            await asyncio.wait({entry.result}, timeout=max(left, 0))
            if entry.result.done():
                return entry.result.result()
            expired = deadline is not None and clock() >= deadline
            holder = await entry.lane.holder()
            if entry.result.done():
                return entry.result.result()
            if holder is entry:
                entry.lane.retire(entry)
                raise TookTooLong("it held its event loop's thread without awaiting")
            if expired and holder is not None:
                raise _StartAgain
            if expired:
                raise TookTooLong(f"no result within {timeout_s:g} s")


class _StartAgain(Exception):
    """Another call held the lane: this one had no fair chance."""


class _Call:
    """One call on a lane. `started` and `result` belong to the loop that asked."""

    def __init__(self, lane: _Lane, call: Callable[[], Any]) -> None:
        self.lane, self._call = lane, call
        self._home = asyncio.get_running_loop()
        self.started: asyncio.Future[None] = self._home.create_future()
        self.result: asyncio.Future[Any] = self._home.create_future()
        self.task: asyncio.Task[None] | None = None
        self._abandoned = False

    async def execute(self) -> None:
        """Runs on the lane."""
        if self._abandoned:
            return
        self._post(self.started, None)
        try:
            made = self._call()
            value = await made if inspect.isawaitable(made) else made
        except asyncio.CancelledError:
            self._post(self.result, RuntimeError("it cancelled itself"))
            raise
        except BaseException as error:  # SystemExit too: user code must not end the lane
            self._post(self.result, _failure(error))
        else:
            self._post(self.result, value)

    def abandon(self) -> None:
        """Nobody waits any more: ends it if it still runs."""
        self._abandoned = True
        self.result.cancel()
        self.started.cancel()
        self.lane.drop(self)

    def start_again(self) -> None:
        if not self.result.done():
            self.result.set_exception(_StartAgain())

    def _post(self, future: asyncio.Future[Any], value: Any) -> None:
        def settle() -> None:
            if future.done():
                return
            if isinstance(value, Exception):
                future.set_exception(value)
            else:
                future.set_result(value)

        _call_in(self._home, settle)


class _Lane:
    """A daemon thread with an event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._calls: set[_Call] = set()
        self.retired = False
        self._left = False
        threading.Thread(target=self._loop.run_forever, daemon=True, name=name).start()

    def submit(self, call: _Call) -> None:
        self._calls.add(call)

        def start() -> None:
            call.task = self._loop.create_task(call.execute())

        _call_in(self._loop, start)

    async def holder(self) -> _Call | None:
        """The call that holds the thread; None while the loop answers."""
        home = asyncio.get_running_loop()
        answered: asyncio.Future[None] = home.create_future()

        def settle() -> None:
            if not answered.done():
                answered.set_result(None)

        _call_in(self._loop, lambda: _call_in(home, settle))
        await asyncio.wait({answered}, timeout=START_S)
        if answered.done():
            return None
        running = asyncio.current_task(self._loop)
        return next((c for c in self._calls if c.task is running), None) if running else None

    def retire(self, holder: _Call) -> None:
        """Takes no more calls; all but the holder's start again elsewhere."""
        self.retired = True
        self.leave()
        for call in self._calls - {holder}:
            call.start_again()

    def leave(self) -> None:
        """Ends the thread once the last call is gone and the loop answers."""
        self._left = True
        if not self._calls:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)

    def drop(self, call: _Call) -> None:
        if call not in self._calls:
            return
        self._calls.discard(call)
        if (task := call.task) is not None:
            _call_in(self._loop, task.cancel)
        if self._left:
            self.leave()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=START_S)
        self._loop.stop()


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    if not loop.is_closed():  # closed: the process is ending
        loop.call_soon_threadsafe(function)


def _function(call: Callable[[], Any]) -> Any:
    """The function a partial wraps; a callable object's `__call__`."""
    function: Any = getattr(call, "func", call)
    return function if inspect.isroutine(function) else type(function).__call__


def _failure(error: BaseException) -> Exception:
    """What a future can carry: SystemExit and the like, and StopIteration, are wrapped."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"it raised {said(error)}")


async def _in_thread(call: Callable[[], Any], name: str, timeout_s: float | None) -> Any:
    """The result of a plain function run in a daemon thread of its own: however many hang, there
    is always another one."""
    home = asyncio.get_running_loop()
    result: asyncio.Future[Any] = home.create_future()

    def settle(value: Any, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)

    def execute() -> None:
        value, error = None, None
        try:
            value = call()
        except BaseException as caught:  # a thread has no caller to raise to
            error = _failure(caught)
        _call_in(home, lambda: settle(value, error))

    threading.Thread(target=execute, daemon=True, name=name).start()
    done, _ = await asyncio.wait({result}, timeout=timeout_s)
    if not done:
        result.cancel()
        raise TookTooLong(f"no result within {timeout_s:g} s")
    return result.result()
