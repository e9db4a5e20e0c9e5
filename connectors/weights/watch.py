"""Which engines are there, and what each says that it holds: asked again and again, each engine on
a thread of its own, so that a stopped one delays the news of no other."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from connectors.engines.types import EngineState
from connectors.weights.calls import ask
from connectors.weights.wire import WeightsError

log = logging.getLogger(__name__)

UNREACHED_S = 30.0  # an engine that did not answer once for so long is told of, once
PROBE_S = 2.0  # an engine that does not tell its state within this counts as stopped


@dataclass(frozen=True, slots=True)
class Seen:
    """`state` None: not reachable. What the engine did after the monotonic `asked_at` may or may
    not be in it."""

    state: EngineState | None
    asked_at: float


class EngineWatch:
    """`news` is called, from the asking threads, when an engine's answer differs from its last."""

    def __init__(self, news: Callable[[], None], poll_s: float) -> None:
        self._news = news
        self._poll_s = poll_s
        self._lock = threading.Lock()
        self._seen: dict[str, Seen] = {}
        self._followed: dict[str, threading.Event] = {}  # by URL, set to end its thread

    def follow(self, urls: Iterable[str]) -> None:
        """From now on exactly these are asked, newcomers at once."""
        wanted = set(urls)
        with self._lock:
            for url in self._followed.keys() - wanted:
                self._followed.pop(url).set()
                self._seen.pop(url, None)
            for url in wanted - self._followed.keys():
                end = self._followed[url] = threading.Event()
                threading.Thread(
                    target=self._watch, args=(url, end), daemon=True, name=f"watch {url}"
                ).start()

    def seen(self) -> dict[str, Seen]:
        """The last answer of each engine that was asked at least once."""
        with self._lock:
            return dict(self._seen)

    def _watch(self, url: str, end: threading.Event) -> None:
        last: object = self
        fault, reached = "", False
        began = time.monotonic()
        while not end.is_set():
            asked_at = time.monotonic()
            state, why = None, ""
            try:
                state = ask(url, "GET", "/state", None, EngineState, PROBE_S)
                reached = True
            except WeightsError as error:
                why = str(error)
            except Exception as error:  # the thread's edge: it goes on asking
                if repr(error) != fault:
                    fault = repr(error)
                    log.exception("asking %s for its state failed", url)
            with self._lock:
                if end.is_set():
                    return
                self._seen[url] = Seen(state, asked_at)
            if not reached and time.monotonic() - began >= UNREACHED_S:
                log.warning("no engine was reached for %g s: %s", UNREACHED_S, why)
                reached = True
            holds = state and (state.version, state.digest, state.epoch)
            if holds != last:
                last = holds
                self._news()
            end.wait(self._poll_s)

    def close(self) -> None:
        self.follow(())
