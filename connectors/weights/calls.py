"""HTTP calls to engines, each on a daemon thread: a stopped one holds up no other and no exit."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from connectors.engines.wire import ErrorBody
from connectors.weights.wire import KINDS, Unreachable, WeightsError

T = TypeVar("T")


def ask(url: str, method: str, path: str, body: Any, kind: type[T], timeout_s: float) -> T:
    """One request: the answer decoded as `kind` (`dict` for anything). `body` None sends none; each
    read and write has timeout_s. WeightsError for whatever is not such an answer."""
    try:
        status, data = _exchange(url, method, path, body, timeout_s)
        if status != 200:
            raise _error(url, status, data)
        return msgspec.json.decode(data, type=kind)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{url} answered nonsense: {error}") from error


def _exchange(url: str, method: str, path: str, body: Any, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    connection = connect(parts.hostname or "", parts.port, timeout=timeout_s)
    data = None if body is None else msgspec.json.encode(body)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request(method, parts.path.rstrip("/") + path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Call(Generic[T]):
    """`ask` under way. `answer` is None until it ended: what it returned or raised."""

    def __init__(
        self, url: str, method: str, path: str, body: Any, kind: type[T], timeout_s: float
    ) -> None:
        self.url = url
        self.answer: T | WeightsError | None = None

        def run() -> None:
            try:
                self.answer = ask(url, method, path, body, kind, timeout_s)
            except WeightsError as error:
                self.answer = error

        threading.Thread(target=run, daemon=True, name=f"weights {url}{path}").start()


def _error(url: str, status: int, data: bytes) -> WeightsError:
    try:
        body = msgspec.json.decode(data, type=ErrorBody)
    except msgspec.MsgspecError:
        return WeightsError(f"{url}: HTTP {status} {data[:200].decode(errors='replace')}")
    return KINDS.get(body.kind, WeightsError)(f"{url}: {body.error}")


def wait_answers(
    calls: Iterable[Call[Any]], deadline: float, until: Callable[[], bool] = lambda: False
) -> None:
    """Returns when every call ended, at the monotonic deadline, or when `until()` says so."""
    waiting = list(calls)
    while waiting and time.monotonic() < deadline and not until():
        waiting = [call for call in waiting if call.answer is None]
        time.sleep(0.001)


def answers(calls: Iterable[Call[T]]) -> dict[str, T | WeightsError]:
    """What is known now; a call that has not ended counts as unreachable."""
    return {
        call.url: Unreachable(f"{call.url}: no answer in time")
        if call.answer is None
        else call.answer
        for call in calls
    }
