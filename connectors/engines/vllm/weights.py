"""A vLLM engine's weights: what the trainer sends goes into vLLM's workers while its scheduler is
paused, and the label that vLLM gives every token changes with them.

    join     the workers become ranks of the trainer's group
    update   the workers wait for the first byte beside the generation, then the swap
    load     the trainer's memory is digested beside the generation, then the swap

    the swap: pause, keep the requests, drop their KV ▸ start ▸ update ▸ finish ▸ label ▸ resume

What breaks off between start and finish leaves a mixture: the engine stays paused, with its
requests, until a whole version is in. Which version is held, and whose word counts, is `Holding`'s.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import CoroutineType
from typing import Any, Protocol

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)
from vllm.v1.engine.async_llm import AsyncLLM

from connectors.engines.metrics import Durations
from connectors.engines.vllm.board import Board, Order
from connectors.engines.vllm.decoder import label_of
from connectors.records import Version
from connectors.weights.base import ModelFolder, check_base
from connectors.weights.group import GroupBroken
from connectors.weights.holding import Holding
from connectors.weights.layout import Plan, shapes_of
from connectors.weights.memory import check, reading
from connectors.weights.wire import (
    Ack,
    FenceRequest,
    GroupUnknown,
    JoinRequest,
    LoadRequest,
    PlanRefused,
    RelabelRequest,
    UpdateAborted,
    UpdateInterrupted,
    UpdateRequest,
    WeightsError,
)

Shapes = Sequence[tuple[str, tuple[int, ...]]]

CALL_S = 0.5  # how soon whoever waits for vLLM notices that the engine is closing
VERDICT_S = 2.0  # the workers' own errors, which say more than a time-out here, come this late
NOBODY = -1  # no worker's turn


class Served(Protocol):
    """vLLM, once it is started, and the loop it runs on. `stuck` says that it did not answer for
    `stall_s`; it is not `alive` from then on."""

    stall_s: float

    @property
    def alive(self) -> bool: ...

    def stuck(self, what: str) -> None: ...

    @property
    def llm(self) -> AsyncLLM: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


def trained_shapes(folder: Path) -> Shapes:
    """What a trainer of the model in `folder` publishes: its parameters as transformers names them,
    which is not as vLLM does."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return shapes_of(dict(model.named_parameters()))


class VllmWeights:
    """Implements parts.Weights. `shapes`: see `trained_shapes`."""

    def __init__(self, served: Served, shapes: Shapes) -> None:
        self._served = served
        self._shapes = list(shapes)
        self._board = Board()
        self._holding = Holding(void=self._leave)
        self._joined: JoinRequest | None = None
        self._swapping = threading.Lock()  # held while vLLM's model or label changes
        self._closed = False
        self.on_version: Callable[[], None] = lambda: None
        self.update_durations = Durations()
        self.pause_durations = Durations()
        self.update_seconds: dict[str, float] = {}

    @property
    def num_ranks(self) -> int:
        parallel = self._served.llm.vllm_config.parallel_config
        return int(parallel.world_size * parallel.data_parallel_size)

    @property
    def version(self) -> Version | None:
        return self._holding.version

    @property
    def digest(self) -> str:
        return self._holding.digest

    @property
    def epoch(self) -> int:
        return self._holding.epoch

    # ------------------------------------------------------------------------------- the group
    def join(self, request: JoinRequest) -> None:
        """EpochRefused, PlanRefused, WeightsError for another number of ranks; UpdateAborted when
        the group did not come about."""
        self._check(request.plan)
        if request.num_ranks != self.num_ranks:
            raise WeightsError(f"has {self.num_ranks} ranks, the group {request.num_ranks} for it")
        with self._telling():
            turn = self._begin(request.epoch)
            self._beside(request, turn, time.monotonic() + request.timeout_s)
            with self._holding.lock:
                if not self._holding.is_current(turn):
                    raise UpdateAborted(f"group {request.group} was given up")
                self._joined = request

    def update(self, request: UpdateRequest) -> Ack:
        """EpochRefused, GroupUnknown; UpdateAborted before the first byte; UpdateInterrupted and
        DigestMismatch, which leave no version. Bounded by the group's timeout_s."""
        started = time.monotonic()
        with self._telling():
            with self._holding.lock:
                self._holding.admit(request.epoch)
                joined = self._joined
                if joined is None or joined.group != request.group:
                    raise GroupUnknown(f"not in group {request.group}")
                turn = self._begin(request.epoch, keep_group=True)
            self._beside(request, turn, started + joined.timeout_s)
            return self._swap(request, joined, turn, started)

    # ------------------------------------------------------------------------------ the memory
    def load(self, request: LoadRequest) -> Ack:
        """EpochRefused, PlanRefused, MemoryUnreadable, DigestMismatch, UpdateAborted: it holds what
        it held; UpdateInterrupted leaves no version."""
        started = time.monotonic()
        self._check(request.plan)
        with self._telling():
            turn = self._begin(request.epoch, keep_group=True)
            with reading(request) as buckets:
                check(buckets, request, lambda: not self._holding.is_current(turn))
                return self._swap(request, request, turn, started)

    # -------------------------------------------------------------------------------- the swap
    def _swap(
        self,
        request: UpdateRequest | LoadRequest,
        terms: JoinRequest | LoadRequest,
        turn: int,
        started: float,
    ) -> Ack:
        """`terms` say what comes, and how long it may take."""
        llm = self._served.llm
        with self._swapping:
            paused = time.monotonic()
            try:
                self._call(llm.pause_generation(mode="keep", clear_cache=True))
                self._holding.touched(turn)
                seconds, ack = self._exchange(request, terms, turn)
            except WeightsError:
                self._holding.lose(turn)
                raise
            finally:
                if self._holding.version is not None:
                    self._call(llm.resume_generation())
            ended = time.monotonic()
        self.update_seconds = {"wait": paused - started, "pause": ended - paused, **seconds}
        self.pause_durations.add(ended - paused)
        self.update_durations.add(ended - started)
        return ack

    def _exchange(
        self,
        request: UpdateRequest | LoadRequest,
        terms: JoinRequest | LoadRequest,
        turn: int,
    ) -> tuple[dict[str, float], Ack]:
        """The bytes and then the label; nothing is generated in between. Where the time went."""
        llm = self._served.llm
        order = Order.of(request, self._board.port, turn)
        self._call(llm.start_weight_update())
        self._call(llm.update_weights(WeightTransferUpdateRequest(asdict(order))), terms.timeout_s)
        finishing = time.monotonic()
        self._call(llm.finish_weight_update())
        finalize = time.monotonic() - finishing
        try:
            deadline = time.monotonic() + VERDICT_S
            seconds = self._board.gather(turn, "taken", self.num_ranks, deadline, lambda: False)
            self._call(llm.update_weight_version(label_of(request.version)))
            added = terms.plan.adapters is not None
            ack = self._holding.hold(turn, request.version, request.digest, added=added)
        except (GroupBroken, UpdateAborted) as error:
            raise UpdateInterrupted(f"the update to {request.version} broke: {error}") from error
        return {**seconds, "finalize": finalize}, ack

    # -------------------------------------------------------------------------------- at once
    def relabel(self, request: RelabelRequest) -> Ack:
        """EpochRefused; DigestMismatch when the model's bytes are others."""
        with self._telling():
            self._holding.admit(request.epoch)
            # The label first: what is admitted at a version gets no token of an older one.
            with self._swapping, self._holding.lock:
                self._holding.admit(request.epoch)
                if request.digest == self._holding.digest:
                    self._call(self._served.llm.update_weight_version(label_of(request.version)))
                return self._holding.relabel(request)

    def fence(self, request: FenceRequest) -> None:
        """EpochRefused. Interrupts what an older trainer is sending."""
        with self._telling():
            self._holding.fence(request)

    def close(self) -> None:
        """Whoever waits here gets an error. On any thread."""
        self._closed = True
        self._holding.begin_turn()

    # ---------------------------------------------------------------------------------- turns
    def _check(self, plan: Plan) -> None:
        if (why := plan.problem(self._shapes)) is not None:
            raise PlanRefused(why)
        if plan.adapters is not None:
            check_base(plan.adapters, self._base_digest)

    @cached_property
    def _base_digest(self) -> str:
        """Of what the workers will add adapters to."""
        served = self._served.llm.vllm_config.model_config
        names = [name for name, _ in self._shapes]
        return ModelFolder(Path(served.model)).digest(names, served.dtype)

    def _begin(self, epoch: int, *, keep_group: bool = False) -> int:
        with self._holding.lock:
            self._holding.admit(epoch)
            turn = self._holding.begin_turn(keep_group=keep_group)
            self._board.set_turn(turn)
            return turn

    def _leave(self) -> None:
        self._joined = None
        self._board.set_turn(NOBODY)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Whatever the trainer sends may cost the version."""
        try:
            yield
        finally:
            self.on_version()

    def _beside(self, request: JoinRequest | UpdateRequest, turn: int, deadline: float) -> None:
        """Lets the workers do what waits for the trainer; UpdateAborted when it did not come."""
        order = WeightTransferInitRequest(asdict(Order.of(request, self._board.port, turn)))

        def called_off() -> bool:
            return not self._holding.is_current(turn)

        try:
            self._call(self._served.llm.init_weight_transfer_engine(order))
            deadline += VERDICT_S
            self._board.gather(turn, "beside", self.num_ranks, deadline, called_off)
        except GroupBroken as error:
            self._holding.lose(turn)
            raise UpdateAborted(f"the workers did not get to it: {error}") from error
        except WeightsError:
            self._holding.lose(turn)
            raise

    def _call(self, call: CoroutineType[Any, Any, None], timeout_s: float = 0.0) -> None:
        """WeightsError when vLLM fails, or the engine closes. A vLLM that does not answer, for
        `stall_s` more than it may take by itself, ends the engine: whoever comes next would wait
        for it too."""
        done = asyncio.run_coroutine_threadsafe(call, self._served.loop)
        limit_s = timeout_s + self._served.stall_s
        deadline = time.monotonic() + limit_s
        while not done.done() and not self._closed and self._served.alive:
            wait([done], timeout=CALL_S)
            if not done.done() and time.monotonic() > deadline:
                what = f"vLLM did not answer {call.__name__} for {limit_s:g} s"
                self._served.stuck(f"{what} (engine.options.stall_s)")
        if not done.done():
            done.cancel()
            raise WeightsError("the engine is stopping")
        error = done.exception()
        if error is not None:
            raise WeightsError(f"vLLM failed: {error}") from error
