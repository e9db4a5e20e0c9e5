"""A model that vLLM decodes: each sequence is one request of its asynchronous engine, which runs in
a process of its own, as do its workers.

    engine's loop ── add, remove ──▶ [vLLM: schedule ▸ decode ▸ sample] ── tokens ──▶ engine's loop

vLLM labels every output with the version of the weights that made it, so a token's version is what
vLLM says, never what this process believes. Weights, pausing and the labels are `weights.py`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from vllm.config import VllmConfig
from vllm.exceptions import VLLMClientError
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from connectors.engines.sequence import Sequence
from connectors.engines.types import EngineStartError, Sampling
from connectors.records import Version

MIN_TEMPERATURE: Final = 0.01  # what vLLM silently raises a lower one to
MAX_TEMPERATURE: Final = 2.0  # what it refuses to exceed
STOP_S: Final = 2.0  # for vLLM to leave its device; its interpreter takes longer to end
WATCH_S: Final = 1.0
ANSWER_S: Final = 60.0  # for a silent vLLM to say that it is paused; it may be taking weights
SEED_BITS: Final = 63  # vLLM's seeds are signed, and -1 means none


class Load(StatLoggerBase):  # type: ignore[misc]  # vLLM is not checked
    """What vLLM's scheduler says of itself after each step."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.kv_use = 0.0
        self.prefix_queries = 0  # prompt tokens
        self.prefix_hits = 0  # of them, found in the KV cache

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is not None:
            self.kv_use = scheduler_stats.kv_cache_usage
            self.prefix_queries += scheduler_stats.prefix_cache_stats.queries
            self.prefix_hits += scheduler_stats.prefix_cache_stats.hits

    def log_engine_initialized(self) -> None: ...


class Decoding:
    """One sequence in vLLM. `request_id` is vLLM's own name for it, None until it has one."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.request_id: str | None = None
        self.starts: list[tuple[str, int]] = []
        """vLLM's labels so far, each with its first token; vLLM goes on writing it."""
        self.num_taken = 0

    def take(self, output: CompletionOutput) -> int:
        """Appends an output's tokens to the sequence: how many. ValueError when they cannot be
        trusted."""
        ids, scores = list(output.token_ids), output.logprobs
        if not ids:
            return 0
        if scores is None or list(scores.token_ids) != ids:
            raise ValueError("vLLM's log-probs are not of its tokens")
        if not all(map(math.isfinite, scores.logprobs)):
            raise ValueError("a log-prob is not finite")
        if output.weight_versions is not None:  # it ended, and vLLM forgot it
            self.starts = [(span.version, span.start) for span in output.weight_versions]
        versions = [self._version(self.num_taken + i) for i in range(len(ids))]
        self.num_taken += len(ids)
        return sum(map(self.sequence.append, ids, scores.logprobs, versions))

    def _version(self, index: int) -> Version:
        label = next((label for label, start in reversed(self.starts) if start <= index), "none")
        return version_of(label)


class VllmDecoder:
    """Implements parts.Decoder. `cause` is the file in which vLLM's processes say why they die."""

    kind: ClassVar[str] = "vllm"

    def __init__(self, vllm_config: VllmConfig, *, stall_s: float, cause: Path) -> None:
        self._vllm_config = vllm_config
        self.stall_s = stall_s
        self._cause = cause
        self.vocab_size = int(vllm_config.model_config.get_vocab_size())
        self.context_tokens = int(vllm_config.model_config.max_model_len)
        self.device = torch.device(current_platform.device_type)
        self.num_tokens = 0
        self.load = Load(vllm_config)
        self.loop: asyncio.AbstractEventLoop
        self.llm: AsyncLLM
        self._started = False
        self._dead = False
        self._running: dict[Sequence, Decoding] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._names = itertools.count()
        self._spoke_at = 0.0  # when the last output came, or nothing was to be expected
        self._on_finished: Callable[[Sequence], None] = lambda _: None
        self._on_failed: Callable[[Sequence], None] = lambda _: None
        self._on_fatal: Callable[[str], None] = lambda _: None

    def listen(
        self,
        *,
        on_finished: Callable[[Sequence], None],
        on_failed: Callable[[Sequence], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """A sequence ended by itself; what vLLM said of it cannot be used; vLLM died or hangs."""
        self._on_finished, self._on_failed, self._on_fatal = on_finished, on_failed, on_fatal

    def start(self) -> None:
        """Starts vLLM's processes, and waits until the model is in. EngineStartError when they end
        instead. On the running loop's thread: everything else belongs to that loop."""
        self.loop = asyncio.get_running_loop()
        failure: Exception | None = None
        try:
            self.llm = AsyncLLM.from_vllm_config(
                self._vllm_config,
                usage_context=UsageContext.ENGINE_CONTEXT,
                stat_loggers=[lambda *_: self.load],
                disable_log_stats=True,
            )
        except Exception as error:  # vLLM raises what it happens to meet
            failure = error.with_traceback(None)
        if failure is not None:  # here, so that the half-made engine is gone when this is reported
            raise EngineStartError(self._start_failure(failure))
        self._started = True
        self._spawn(self._watch())

    @property
    def alive(self) -> bool:
        return self._started and not self._dead  # `on_fatal` was told why

    @property
    def kv_use(self) -> float:
        # The scheduler says nothing while it has nothing to do.
        return self.load.kv_use if self._running else 0.0

    def stop(self) -> None:
        """vLLM's processes are gone afterwards."""
        self._on_fatal = lambda _: None
        for task in self._tasks:
            task.cancel()
        if self._started:
            self._started = False
            processes = self.llm.engine_core.resources.engine_manager.processes
            self.llm.shutdown(timeout=STOP_S)
            for process in processes:
                process.join(STOP_S)

    # ---------------------------------------------------------------------------------- sequences
    def refuses(self, sampling: Sampling) -> str | None:
        temperature = sampling.temperature
        if 0 < temperature < MIN_TEMPERATURE:
            return f"temperature must be 0 or at least {MIN_TEMPERATURE} here, got {temperature}"
        if temperature > MAX_TEMPERATURE:
            return f"temperature must be at most {MAX_TEMPERATURE} here, got {temperature}"
        return None

    def add(self, sequence: Sequence) -> None:
        if not self._running:
            self._spoke_at = time.monotonic()
        decoding = self._running[sequence] = Decoding(sequence)
        self._spawn(self._decode(decoding))

    def remove(self, sequence: Sequence) -> None:
        """Tokens that are drawn for it from now on are dropped."""
        sequence.closed = True
        decoding = self._running.pop(sequence, None)
        if decoding is not None and decoding.request_id is not None:
            self._spawn(self._abort(decoding.request_id))

    async def _decode(self, decoding: Decoding) -> None:
        sequence = decoding.sequence
        try:
            finished = await self._follow(decoding)
        except EngineDeadError:
            self._died()
        except (ValueError, VLLMClientError) as error:
            print(f"a sample failed: {error}", flush=True)
            if decoding.request_id is not None:
                await self._abort(decoding.request_id)
            self._end(sequence, self._on_failed)
        else:
            self._end(sequence, self._on_finished if finished else self._on_failed)

    async def _follow(self, decoding: Decoding) -> bool:
        """True when the sequence came to its end. ValueError when its tokens cannot be trusted."""
        sequence = decoding.sequence
        prompt = {"type": "token", "prompt_token_ids": [*sequence.prompt_ids, *sequence.token_ids]}
        parameters = _parameters(sequence, self.vocab_size)
        queue = await self.llm.add_request(f"{next(self._names)}", prompt, parameters)
        decoding.request_id = queue.request_id
        state = self.llm.output_processor.request_states.get(queue.request_id)
        if state is not None:
            decoding.starts = state.weight_version_starts
        if sequence.closed:  # while it was handed over
            await self._abort(queue.request_id)
        while True:
            output = queue.get_nowait() or await queue.get()
            self._spoke_at = time.monotonic()
            completion = output.outputs[0]
            if not sequence.closed:
                self.num_tokens += decoding.take(completion)
            if output.finished:
                return completion.finish_reason in ("stop", "length")

    async def _abort(self, request_id: str) -> None:
        with contextlib.suppress(EngineDeadError):  # which the others report
            await self.llm.abort(request_id, internal=True)

    def _end(self, sequence: Sequence, tell: Callable[[Sequence], None]) -> None:
        if self._running.pop(sequence, None) is not None:
            tell(sequence)

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(f"following vLLM failed: {type(error).__name__}: {error}")

    # ----------------------------------------------------------------------------------- its end
    def stuck(self, what: str) -> None:
        """Someone waited for vLLM in vain: this is fatal. On any thread."""
        self._dead = True  # at once, for who waits next
        self.loop.call_soon_threadsafe(self._fail, what)

    async def _watch(self) -> None:
        """Sees vLLM's death when nothing runs, and a vLLM that is there but does nothing."""
        while not self.llm.errored:
            await asyncio.sleep(WATCH_S)
            silent_s = time.monotonic() - self._spoke_at
            if self._running and silent_s > self.stall_s:
                if not await self._is_paused():
                    self._fail(
                        f"vLLM decoded nothing for {silent_s:.0f} s (engine.options.stall_s)"
                    )
                    return
                self._spoke_at = time.monotonic()
        self._died()

    async def _is_paused(self) -> bool:
        """False also when it does not answer."""
        try:
            return bool(await asyncio.wait_for(self.llm.is_paused(), min(self.stall_s, ANSWER_S)))
        except (TimeoutError, EngineDeadError):
            return False

    def _died(self) -> None:
        self._fail(_with_cause("vLLM's engine process died", self._said()))

    def _fail(self, reason: str) -> None:
        self._dead = True
        tell, self._on_fatal = self._on_fatal, lambda _: None
        tell(reason)

    def _said(self) -> str:
        try:
            return self._cause.read_text()
        except OSError:
            return ""

    def _start_failure(self, error: Exception) -> str:
        folder = self._vllm_config.model_config.model
        said = self._said()
        if "KV cache" in said:
            said = said.partition("ValueError: ")[2].partition(" Try increasing")[0] or said
            return (
                f"model.context_tokens = {self.context_tokens}: one such context does not fit the "
                f"KV cache: raise engine.options.{_memory_option(self.device)} or lower "
                f"model.context_tokens: {said}"
            )
        codes = re.search(r"Failed core proc\(s\): \{.*?(-?\d+)\}", str(error))
        code = f" (exit code {codes[1]})" if codes else ""
        if not said and not codes:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return _with_cause(f"vLLM cannot serve the model folder {folder}{code}", said)


def _with_cause(what: str, said: str) -> str:
    return f"{what}: {said}" if said else what


def _memory_option(device: torch.device) -> str:
    return "kv_cache_memory_bytes" if device.type == "cpu" else "gpu_memory_utilization"


def _parameters(sequence: Sequence, vocab_size: int) -> SamplingParams:
    sampling = sequence.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sequence.seed & ((1 << SEED_BITS) - 1),
        max_tokens=sequence.num_left,
        # vLLM refuses ids that are none, which are never sampled.
        stop_token_ids=[i for i in sampling.stop_ids if 0 <= i < vocab_size],
        ignore_eos=True,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def label_of(version: Version) -> str:
    """What vLLM is told to label tokens with."""
    return str(version)


def version_of(label: str) -> Version:
    """ValueError when it is none: what vLLM says before the first one, say."""
    parts = re.fullmatch(r"(-?\d+)\.(-?\d+)", label)
    if parts is None:
        raise ValueError(f"vLLM labels a token {label!r}, which is no version")
    return Version(int(parts[1]), int(parts[2]))
