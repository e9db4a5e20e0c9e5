"""The engines' load, told to a policy that hangs on it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final

from connectors.engines.pool import EnginePool
from connectors.engines.types import EngineUnavailable
from operators.staleness.types import EngineLoad

log = logging.getLogger(__name__)

EVERY_S: Final = 5.0


class LoadPoll:
    """Asks the engines that `discover` names (base URLs) about every `every_s`, on a thread of its
    own, and `tell`s the feed. What cannot be asked is passed over: load is no fact of the run, and
    a policy goes on without."""

    def __init__(
        self,
        discover: Callable[[], Sequence[str]],
        tell: Callable[[EngineLoad], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._discover, self._tell, self._every_s = discover, tell, every_s
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what ended the thread."""
        if self._failure is not None:
            raise RuntimeError("asking for the engines' load failed") from self._failure

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        try:
            asyncio.run(self._poll())
        except BaseException as error:
            self._failure = error

    async def _poll(self) -> None:
        pool = EnginePool(self._discover)
        try:
            while not self._stop.is_set():
                try:
                    state = await pool.state()
                except EngineUnavailable as error:
                    log.debug("the engines' load is not known: %s", error)
                else:
                    self._tell(
                        EngineLoad(
                            num_running=state.num_running,
                            num_queued=state.num_queued,
                            kv_use=state.kv_use,
                        )
                    )
                await asyncio.to_thread(self._stop.wait, self._every_s)
        finally:
            await pool.close()
