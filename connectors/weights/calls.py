"""The engines as the sender knows them, and HTTP calls to them, each on a daemon thread: a stopped
one holds up no other and no exit."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from connectors.engines.wire import MAX_ANSWER_BYTES, ErrorBody, decoded
from connectors.records import Version
from connectors.weights.wire import KINDS, Ack, Unreachable, WeightsError

T = TypeVar("T")
Answers = dict[str, Ack | WeightsError]
"""What became of an engine's weights, by its URL."""


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine as it describes itself: `host` as connectors.engines.host, `device` torch's name of
    its kind, `num_ranks` the processes that each take the weights."""

    url: str
    host: str = ""
    device: str = "cpu"
    num_ranks: int = 1


def ask(url: str, method: str, path: str, body: Any, kind: type[T], timeout_s: float) -> T:
    """One request: the answer decoded as `kind` (`dict` for anything). `body` None sends none; each
    read and write has timeout_s. WeightsError for whatever is not such an answer."""
    try:
        status, data = _exchange(url, method, path, body, timeout_s)
        if status != 200:
            raise _error(url, status, data)
        found: T = decoded(data, kind)
        return found
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{url}: {error or type(error).__name__}") from error
    except ValueError as error:
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
        answer = response.read(MAX_ANSWER_BYTES + 1)
        if len(answer) > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
        return response.status, answer
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
            except Exception as error:  # the thread's edge: whoever waits learns of it
                self.answer = WeightsError(f"{url}: {type(error).__name__}: {error}")

        threading.Thread(target=run, daemon=True, name=f"weights {url}{path}").start()


def post(url: str, what: str, body: Any, kind: type[T], timeout_s: float) -> Call[T]:
    """A weights route's call, begun."""
    return Call(url, "POST", f"/weights/{what}", body, kind, timeout_s)


def _error(url: str, status: int, data: bytes) -> WeightsError:
    try:
        body = decoded(data, ErrorBody)
    except ValueError:
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


def verified(answer: Ack | WeightsError, version: Version, digest: str) -> Ack | WeightsError:
    """An acknowledgement of anything else is none."""
    if isinstance(answer, Ack) and (answer.version, answer.digest) != (version, digest):
        return WeightsError(
            f"acknowledged {answer.version} {answer.digest}, sent {version} {digest}"
        )
    return answer
