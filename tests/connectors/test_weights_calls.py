"""What is no answer of an engine's weights routes, and what does not end the watching of one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from connectors.engines.types import EngineState
from connectors.records import Version
from connectors.weights import EngineWatch, calls, watch
from connectors.weights.calls import ask, post
from connectors.weights.wire import WeightsError

DEEP = b'{"info":' + b"[" * 100_000
WELL = EngineState(
    version=Version(0, 3), digest="d", epoch=1, num_running=0, num_queued=0, kv_use=0.0
)


@contextmanager
def serving(answers: list[tuple[int, bytes]]) -> Iterator[str]:
    """Gives one answer after another, the last one for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.005)
    return found


@contextmanager
def watching(url: str) -> Iterator[EngineWatch]:
    watched = EngineWatch(lambda: None, poll_s=0.01)
    watched.follow([url])
    try:
        yield watched
    finally:
        watched.close()


def state_of(watched: EngineWatch, url: str) -> EngineState | None:
    seen = watched.seen().get(url)
    return None if seen is None else seen.state


@pytest.mark.parametrize("status", [200, 500])
def test_an_answer_nested_without_end_is_a_weights_error(status: int) -> None:
    with serving([(status, DEEP)]) as url, pytest.raises(WeightsError):
        ask(url, "GET", "/state", None, EngineState, 5.0)


def test_an_answer_of_an_impossible_version_is_a_weights_error() -> None:
    body = msgspec.json.encode(msgspec.structs.replace(WELL, version=Version(0, -1)))
    with serving([(200, body)]) as url, pytest.raises(WeightsError, match="nonsense"):
        ask(url, "GET", "/state", None, EngineState, 5.0)


def test_an_answer_without_end_is_a_weights_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 1000)
    with serving([(200, b" " * 1001)]) as url, pytest.raises(WeightsError, match="more than 1000"):
        ask(url, "GET", "/state", None, EngineState, 5.0)


def test_a_call_that_ends_in_a_fault_of_ours_has_an_answer() -> None:
    call = post("http://127.0.0.1:1", "fence", object(), dict, 5.0)  # no JSON can be made of it
    answer = until(lambda: call.answer)
    assert isinstance(answer, WeightsError)


def test_an_engine_that_answered_nonsense_once_is_watched_on() -> None:
    answers = [(200, DEEP), (200, b"{}"), (200, msgspec.json.encode(WELL))]
    with serving(answers) as url, watching(url) as watched:
        assert until(lambda: state_of(watched, url)) == WELL


def test_a_fault_of_ours_is_told_and_does_not_end_the_watching(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [MemoryError("none left"), MemoryError("none left"), None]

    def failing(*_: Any) -> EngineState:
        if (fault := faults.pop(0) if len(faults) > 1 else None) is not None:
            raise fault
        return WELL

    monkeypatch.setattr(watch, "ask", failing)
    with watching("http://127.0.0.1:1") as watched:
        assert until(lambda: state_of(watched, "http://127.0.0.1:1")) == WELL
    told = [r for r in caplog.records if r.name == watch.__name__]
    assert [r.levelno for r in told] == [logging.ERROR]


def test_an_engine_that_was_never_reached_is_told_of_once_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def unreachable(url: str, *_: Any) -> EngineState:
        asked.append(url)
        raise WeightsError(f"{url}: refused")

    monkeypatch.setattr(watch, "ask", unreachable)
    monkeypatch.setattr(watch, "UNREACHED_S", 0.05)
    with watching("http://127.0.0.1:1"):
        until(lambda: caplog.records)
        count = len(asked)
        until(lambda: len(asked) > count + 20)
    (told,) = [r for r in caplog.records if r.name == watch.__name__]
    assert told.levelno == logging.WARNING
    assert "http://127.0.0.1:1" in told.getMessage()


def test_an_engine_that_was_reached_before_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_asked = 0

    def once(*_: Any) -> EngineState:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            return WELL
        raise WeightsError("refused")

    monkeypatch.setattr(watch, "ask", once)
    monkeypatch.setattr(watch, "UNREACHED_S", 0.0)
    with watching("http://127.0.0.1:1"):
        until(lambda: num_asked > 20)
    assert not [r for r in caplog.records if r.name == watch.__name__]
