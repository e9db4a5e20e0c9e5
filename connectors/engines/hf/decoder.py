"""A model that decodes many sequences together: transformers' continuous batching, made
reproducible and swappable.

    engine's loop ── add, remove ──▶ [decode thread] ── finished, failed ──▶ engine's loop
    weights thread ── pause, copy, restart, release ──▶ between two decode steps

transformers' manager does the scheduling, the paged KV cache and the forward pass. Three things are
ours: the sampler (`sampling.py`), the attention on CPU (`attention.py`), and the swap: its own
`pause` keeps the cached keys and values of the old weights, so every running sequence is withdrawn
and submitted again as prompt + tokens so far, and its next token comes wholly from the new weights.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.utils.logging import disable_progress_bar

from connectors.config import Section
from connectors.engines.hf import attention
from connectors.engines.hf.sampling import Sampler
from connectors.engines.sequence import Sequence
from connectors.engines.types import EngineStartError, Sampling


class DecoderOptions(Section):
    """`engine.options` of the `hf` engine."""

    num_threads: int = Field(1, ge=1)
    """CPU threads; bits of the logits depend on it."""
    page_tokens: int = Field(64, ge=4)
    """Tokens in a page of the KV cache."""
    kv_bytes: int = Field(1 << 30, ge=1 << 16)
    """Limit of the KV cache; it never gets larger than `max_running` whole contexts."""
    max_batch_tokens: int = Field(512, ge=16)
    """Tokens of one forward pass; longer prompts are prefilled in parts."""


def load_model(folder: Path, dtype: str, device: str) -> Any:
    """The causal language model in `folder`, in eval mode; EngineStartError when there is none."""
    if not (folder / "config.json").is_file():
        raise EngineStartError(f"model folder {folder}: has no config.json")
    disable_progress_bar()  # it would fill the role's log, and so would the batching
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
    except Exception as error:  # whatever a damaged or foreign folder makes the loaders raise
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineStartError(f"model folder {folder}: cannot be loaded: {first[0]}") from error
    return model.to(device).eval().requires_grad_(False)


def num_positions(model: Any) -> int:
    """The longest sequence the model was made for."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if limit is None else int(limit)


class Decoder:
    """Sequences in, tokens appended to them in place. `add`, `remove` and the callbacks belong to
    the asyncio loop `listen` was called on; `paused` and `restart` to one other thread."""

    kind: ClassVar[str] = "hf"

    def __init__(
        self, model: Any, *, max_running: int, context_tokens: int, options: DecoderOptions
    ) -> None:
        self.model = model
        self.device = model.device
        self.vocab_size = int(model.get_input_embeddings().num_embeddings)
        self.context_tokens = context_tokens
        self.kv_tokens = _kv_tokens(model, max_running, context_tokens, options)
        self._on_finished: Callable[[Sequence], None] = lambda _: None
        self._on_failed: Callable[[Sequence], None] = lambda _: None
        self._on_fatal: Callable[[str], None] = lambda _: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._submissions = itertools.count()
        self.sampler = Sampler(self._failed)
        self._manager = self._new_manager(max_running, options)

    def _new_manager(self, max_running: int, options: DecoderOptions) -> Any:
        # Stopping and sampling are decided per request, so the generation config carries nothing.
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, num_return_sequences=1)
        config = ContinuousBatchingConfig(
            page_size=options.page_tokens,
            num_blocks=self.kv_tokens // options.page_tokens,
            max_batch_tokens=max(options.max_batch_tokens, max_running),
            max_requests_per_batch=max_running,
            # Shared pages would outlive a swap with the old weights' keys and values in them.
            allow_block_sharing=False,
            # One step at a time: a swap lands between two steps, and the sampler runs in step.
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=self.device.type == "cuda",
        )
        manager = self.model.init_continuous_batching(generation, config)
        manager.logit_processor = self.sampler
        layers = set(getattr(self.model.config, "layer_types", None) or ["full_attention"])
        if self.device.type == "cpu" and layers == {"full_attention"}:
            self.model.set_attn_implementation(attention.register())
        return manager

    def listen(
        self,
        *,
        on_finished: Callable[[Sequence], None],
        on_failed: Callable[[Sequence], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """The callbacks run on the current asyncio loop: a sequence ended by itself; its logits
        were not finite; the decode thread failed (nothing will end any more)."""
        self._loop = asyncio.get_running_loop()
        self._on_finished, self._on_failed, self._on_fatal = on_finished, on_failed, on_fatal

    def start(self) -> None:
        """Allocates the KV cache and starts the decode thread. EngineStartError when the memory is
        too small."""
        try:
            self._manager.warmup()
        except (MemoryError, RuntimeError) as error:
            raise EngineStartError(
                f"no room for a KV cache of {self.kv_tokens} tokens: {error}"
            ) from error
        self._manager.start()

    @property
    def alive(self) -> bool:
        return bool(self._manager.is_running())

    def stop(self) -> None:
        """Ends the decode thread; whatever runs is dropped."""
        self._on_fatal = lambda _: None
        if self._manager.is_running():
            self._manager.stop(block=True, timeout=10, hard_stop=True)

    def refuses(self, sampling: Sampling) -> str | None:
        return None

    def add(self, sequence: Sequence) -> None:
        """Submits prompt + tokens so far, under a name of its own: what ends late is told from what
        replaced it."""
        request_id = sequence.submission = f"{next(self._submissions)}"
        self.sampler.sequences[request_id] = sequence
        self._manager.register_result_handler(request_id, self._delivered)
        self._submit(request_id, sequence)

    def _submit(self, request_id: str, sequence: Sequence) -> None:
        self._manager.add_request(
            [*sequence.prompt_ids, *sequence.token_ids],
            request_id=request_id,
            max_new_tokens=sequence.num_left,
            eos_token_id=list(sequence.sampling.stop_ids),
        )

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out; tokens drawn for it from now on are dropped."""
        sequence.closed = True
        request_id = sequence.submission
        self._forget(request_id)
        self._manager.cancel_request(request_id)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No decode step runs inside. Not on the asyncio loop's thread: it waits for the step."""
        with self._manager.pause():
            yield

    def restart(self) -> None:
        """Inside `paused`: drops the KV of every sequence that has some and submits it again."""
        scheduler = self._manager.batch_processor.scheduler
        for request_id in list(scheduler.active_requests):
            # Directly, not through the manager's queue: that is read one step too late.
            scheduler.set_request_cancellation(request_id)
            sequence = self.sampler.sequences.get(request_id)
            if sequence is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._add_again, request_id, sequence)

    def _add_again(self, request_id: str, sequence: Sequence) -> None:
        self._forget(request_id)
        if not sequence.closed:
            self.add(sequence)

    @property
    def num_tokens(self) -> int:
        return self.sampler.num_tokens

    @property
    def kv_use(self) -> float:
        held = sum(s.length for s in list(self.sampler.sequences.values()))
        return min(1.0, held / self.kv_tokens)

    def _delivered(self, output: Any) -> None:
        sequence = self.sampler.sequences.get(output.request_id)
        if output.status == RequestStatus.FAILED:
            self._on_fatal(f"the decode thread failed: {output.error}")
            return
        if sequence is None or sequence.closed:
            return
        self._forget(output.request_id)
        if output.generated_tokens != sequence.token_ids[-len(output.generated_tokens) :]:
            self._on_fatal("continuous batching returned other tokens than were drawn")
            return
        self._on_finished(sequence)

    def _failed(self, sequence: Sequence) -> None:
        """On the decode thread."""
        sequence.closed = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._remove_failed, sequence)

    def _remove_failed(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self._on_failed(sequence)

    def _forget(self, request_id: str) -> None:
        self.sampler.sequences.pop(request_id, None)
        self._manager.output_router.result_handlers.pop(request_id, None)


def _kv_tokens(model: Any, max_running: int, context_tokens: int, options: DecoderOptions) -> int:
    """Tokens the KV cache holds: a whole number of pages, at least one whole context."""
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
    page = options.page_tokens
    one_context = -(-context_tokens // page) * page
    affordable = options.kv_bytes // token_bytes // page * page
    # Above its safety margin (15%) the scheduler admits nothing new but the first sequence.
    tokens: int = max(one_context + page, min(affordable, one_context * max_running))
    return tokens
