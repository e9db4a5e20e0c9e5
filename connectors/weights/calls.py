"""HTTP calls to engines, each on a daemon thread: a stopped one holds up no other and no exit."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from connectors.weights.wire import KINDS, ErrorBody, Unreachable, WeightsError

T = TypeVar("T")


class Call(Generic[T]):
    """A request under way. `answer` is None until it ended: the decoded body, or a WeightsError."""

    def __init__(
        self, url: str, method: str, path: str, body: Any, kind: type[T], timeout_s: float
    ) -> None:
        """`body` None sends none; the answer is decoded as `kind` (`dict` for "anything")."""
        self.url = url
        self.answer: T | WeightsError | None = None
        self._request = (method, path, None if body is None else msgspec.json.encode(body))
        self._kind = kind
        self._timeout_s = timeout_s
        threading.Thread(target=self._run, daemon=True, name=f"weights {url}{path}").start()

    def _run(self) -> None:
        try:
            self.answer = self._ask()
        except WeightsError as error:
            self.answer = error
        except (OSError, http.client.HTTPException) as error:
            self.answer = Unreachable(f"{self.url}: {error or type(error).__name__}")
        except (ValueError, msgspec.MsgspecError) as error:
            self.answer = WeightsError(f"{self.url} answered nonsense: {error}")

    def _ask(self) -> T:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connect(parts.hostname or "", parts.port, timeout=self._timeout_s)
        method, path, body = self._request
        try:
            connection.request(
                method, parts.path.rstrip("/") + path, body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise _error(self.url, response.status, data)
        return msgspec.json.decode(data, type=self._kind)

    def failed(self) -> bool:
        return isinstance(self.answer, WeightsError)


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
