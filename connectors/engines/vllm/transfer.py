"""The worker's side of a vLLM engine's weights: vLLM's weight-transfer interface, as the backend
`headwater`, over our own group or the trainer's memory.

    vLLM's call                   on the thread that decodes       beside it
    init_weight_transfer_engine   starts the other                 joins a group, or awaits an
                                                                   update's first byte; reports
    start_weight_update           layers back to the checkpoint's
                                  form, their loaders wrapped
    update_weights                bucket by bucket: receives or
                                  maps, digests, loads; adapters,
                                  once they are all in, with the
                                  model folder's weights
    finish_weight_update          the layers' kernels as loaded,
                                  or the last ones; reports

vLLM's NCCL backend cannot stand in for it: a trainer that stops leaves its workers in a collective
for good, it does not tell a whole update from half a one, and it knows no CPU. Here a turn can be
called off at any time and a digest says what came. Nothing is raised to vLLM: see `board`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

from connectors.engines.vllm.board import Order, Report, Turn
from connectors.weights.base import ModelFolder
from connectors.weights.group import Group, GroupBroken
from connectors.weights.layout import Digester, Plan
from connectors.weights.member import await_start, enter
from connectors.weights.memory import reading
from connectors.weights.wire import (
    DigestMismatch,
    JoinRequest,
    LoadRequest,
    UpdateAborted,
    UpdateInterrupted,
    UpdateRequest,
)

T = TypeVar("T")


class BesideOrder(Order, WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not checked
    """Of a JoinRequest or an UpdateRequest."""


class TakeOrder(Order, WeightTransferUpdateInfo):  # type: ignore[misc]
    """Of an UpdateRequest or a LoadRequest."""


class HeadwaterTransfer(WeightTransferEngine[BesideOrder, TakeOrder]):  # type: ignore[misc]
    """One worker's."""

    init_info_cls = BesideOrder
    update_info_cls = TakeOrder
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        parallel = self.parallel_config
        self._rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group: Group | None = None
        self._plan: Plan | None = None  # of what the group sends
        self._deadline = 0.0  # of the update whose first byte came
        self._open = False  # vLLM's layers are in the midst of a reload
        self._tied: list[Any] = []
        self._failure: Report | None = None  # the first one since the start
        self._turn: Turn | None = None  # of what was taken since the start
        self._seconds: dict[str, float] = {}

    # ------------------------------------------------------------------- beside the generation
    def init_transfer_engine(self, init_info: BesideOrder) -> None:
        threading.Thread(
            target=self._beside, args=(init_info,), daemon=True, name="headwater-transfer"
        ).start()

    def _beside(self, order: BesideOrder) -> None:
        turn, request = Turn(order, self._rank), order.request()
        report = Report()
        try:
            if isinstance(request, JoinRequest):
                self._join(request, turn)
            elif isinstance(request, UpdateRequest):
                self._await_start(request, turn)
        except Exception as error:  # whatever it is, the engine's process must hear of it
            report = Report.of(error)
        turn.report("beside", report)

    def _join(self, request: JoinRequest, turn: Turn) -> None:
        self._leave()
        deadline = time.monotonic() + request.timeout_s
        rank = request.rank + self._rank
        try:
            group = enter(request, rank, deadline, turn.over, self.device)
        except GroupBroken as error:
            raise UpdateAborted(f"group {request.group} did not form: {error}") from error
        if turn.over():
            group.close()
        else:
            self._group, self._plan = group, request.plan

    def _await_start(self, request: UpdateRequest, turn: Turn) -> None:
        group = self._group
        if group is None or group.name != request.group:
            raise UpdateAborted(f"the worker is not in group {request.group} any more")
        self._deadline = time.monotonic() + group.timeout_s
        try:
            await_start(group, request.serial, self._deadline, turn.over)
        except GroupBroken as error:
            raise UpdateAborted(f"{request.version} was called off: {error}") from error

    # ------------------------------------------------------------------------------- an update
    def start_weight_update(self) -> None:
        self._failure, self._turn, self._seconds = None, None, {"receive": 0.0, "load": 0.0}
        with self._noting():
            if self._open:
                self._restore()
            self._tied = _tied(self.model)
            self._open = True
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own synchronises the accelerator, which raises where there is none. Not needed:
        # the next step follows on the same stream.
        with self._noting():
            self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TakeOrder) -> None:
        self._turn = Turn(update_info, self._rank)
        request = update_info.request()
        if self._failure is None and isinstance(request, UpdateRequest):
            self._receive(request, self._turn)
        elif self._failure is None and isinstance(request, LoadRequest):
            self._read(request, self._turn)

    def finish_weight_update(self) -> None:
        with self._noting():
            if self._failure is None and self._turn is not None:
                _finalize(self.model, self.model_config, self._tied)
                self._open = False
        if self._open:
            self._leave()
            self._restore()
        if self._turn is not None:
            self._turn.report("taken", self._failure or Report(seconds=self._seconds))

    def _restore(self) -> None:
        with self._noting():
            _put_back(self.model, self.model_config)
            self._open = False

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever it is, vLLM's other workers must not notice
            self._failure = self._failure or Report.of(error)

    # ------------------------------------------------------------------------------ two media
    def _receive(self, request: UpdateRequest, turn: Turn) -> None:
        group, plan = self._group, self._plan
        if group is None or plan is None or group.name != request.group:
            raise UpdateInterrupted(f"the worker is not in group {request.group} any more")
        # Fresh ones: a layer keeps views of its buckets until all of its parameters are there.
        fresh = (
            torch.empty(size, dtype=plan.torch_dtype, device=group.device) for size in plan.sizes
        )
        fold = Digester(plan.torch_dtype, group.device)

        def received() -> Iterator[Tensor]:
            for bucket in group.stream(fresh, self._deadline, turn.over):
                fold.update(bucket)
                yield bucket
            if (got := fold.hex()) != request.digest:
                raise DigestMismatch(f"received {got}, announced as {request.digest}")

        try:
            self._load(plan, received(), turn)
        except GroupBroken as error:
            raise UpdateInterrupted(f"the update to {request.version} broke: {error}") from error

    def _read(self, request: LoadRequest, turn: Turn) -> None:
        """The engine's process has compared the digest, and keeps the owner from writing until the
        update is finished."""
        with reading(request) as buckets:
            self._load(request.plan, iter(buckets), turn)

    def _load(self, plan: Plan, buckets: Iterator[Tensor], turn: Turn) -> None:
        """Parameters bucket by bucket, as they come. Adapters once all are in: then everything that
        the model's files hold, since vLLM loads no part of a layer, and nobody knows what whole
        weights came before."""
        arriving = (
            [
                (slot.name, bucket[slot.offset : slot.offset + slot.numel].view(slot.shape))
                for slot in slots
            ]
            for slots, bucket in zip(plan.buckets, self._timed(buckets, turn), strict=True)
        )
        if plan.adapters is None:
            for named in arriving:
                self.model.load_weights(iter(named))
            return
        adapters = [pair for named in arriving for pair in named]
        started = time.perf_counter()
        whole = self._base.with_adapters(
            plan.adapters, adapters, self.model_config.dtype, self.device
        )
        self.model.load_weights(_unless_over(turn, whole))
        self._seconds["load"] += time.perf_counter() - started

    @cached_property
    def _base(self) -> ModelFolder:
        return ModelFolder(Path(self.model_config.model))

    def _timed(self, buckets: Iterator[Tensor], turn: Turn) -> Iterator[Tensor]:
        """Adds the time until a bucket is there to `receive`, the time until the next one is asked
        for to `load`."""
        at = time.perf_counter()
        for bucket in _unless_over(turn, buckets):
            there = time.perf_counter()
            self._seconds["receive"] += there - at
            yield bucket
            at = time.perf_counter()
            self._seconds["load"] += at - there

    # ------------------------------------------------------------------------------------- end
    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def shutdown(self) -> None:
        self._leave()


def _unless_over(turn: Turn, things: Iterator[T]) -> Iterator[T]:
    for thing in things:
        if turn.over():
            raise UpdateInterrupted("called off")
        yield thing


# ------------------------------------------------------------------------------ vLLM's reload
def _tied(model: torch.nn.Module) -> list[Any]:
    """Layers that have no parameter but an earlier one's: heads tied to the embedding."""
    tied = []
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own and own <= seen:
            tied.append(layer)
        seen |= own
    return tied


def _finalize(model: torch.nn.Module, model_config: ModelConfig, tied: list[Any]) -> None:
    """Ends a reload. UpdateInterrupted when a parameter got nothing: vLLM would go on with old or
    uninitialised memory in its place."""
    missing = [
        f"{prefix}.{name}"
        for prefix, layer in model.named_modules()
        for name in _unloaded(layer)
        if layer not in tied
    ]
    if missing:
        raise UpdateInterrupted(f"nothing was sent for vLLM's {', '.join(missing)}")
    finalize_layerwise_reload(model, model_config)
    for layer in tied:
        if hasattr(layer, "cpu_linear"):
            # It multiplies with a packed copy of its own, which vLLM's reload passes over.
            layer.quant_method.process_weights_after_loading(layer)


def _unloaded(layer: torch.nn.Module) -> list[str]:
    info = get_layerwise_info(layer)
    if not info.can_load() or is_deferred_attention_layer(layer):  # complete; or scales only
        return []
    loaded = {name for name, _ in info.loaded_weights} | SKIP_LOAD_TENSORS
    return [name for name, _ in layer.named_parameters(recurse=False) if name not in loaded]


def _put_back(model: torch.nn.Module, model_config: ModelConfig) -> None:
    """Ends a reload that did not come to its end: each layer gets the tensors it last had. One that
    is half loaded would otherwise be finished with uninitialised memory, or count what it has
    towards the next update."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = info.load_numel_total = 0
    finalize_layerwise_reload(model, model_config)
