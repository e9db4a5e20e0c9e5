"""An engine that answers from a script, and tokenizers small enough to reason about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from connectors.engines.types import Completion, EngineState, GenerateRequest
from connectors.records import Segment, Version
from connectors.text import Text
from tests.models import CHATML, SPECIAL_TOKENS

Answer = Callable[[GenerateRequest], Sequence[int] | None]
START, END = 2, 3  # <|im_start|>, <|im_end|>
FIRST = Version(0, 0)


class FakeEngine:
    """`answer(request)` gives the sampled ids, raises, or gives None for a request that hangs. A
    last id among the stop ids means `stop`. Token i of a request gets log-prob -(i + 1) / 100."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.version = FIRST
        self.requests: list[GenerateRequest] = []  # sample by sample
        self.sent: list[str] = []  # ids as they came, of several samples or one
        self.held: dict[str, tuple[Completion, ...]] = {}
        self.cancelled: list[str] = []
        self.attached: list[str] = []
        self.away = False  # an outage: it holds up every request

    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        self.sent.append(request.request_id)
        return tuple(await asyncio.gather(*map(self._sample, samples(request))))

    async def _sample(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        ids = self._answer(request)
        if ids is None:
            await asyncio.Event().wait()
        assert ids is not None
        return completion(ids, self.version, request.sampling.stop_ids)

    async def attach(self, request_id: str) -> tuple[Completion, ...] | None:
        self.attached.append(request_id)
        return self.held.get(request_id)

    async def cancel(self, request_id: str) -> tuple[Completion, ...]:
        self.cancelled.append(request_id)
        return ()

    def held_up(self, request_id: str) -> bool:
        return self.away

    async def state(self) -> EngineState:
        return EngineState(
            version=self.version, digest="0" * 16, epoch=0, num_running=0, num_queued=0, kv_use=0.0
        )


def samples(request: GenerateRequest) -> list[GenerateRequest]:
    """What a request for several samples asks for, one by one: GROUP/8x... becomes GROUP/0... to
    GROUP/7..., as if each session had asked for itself."""
    num = request.num_samples
    if num == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=request.request_id.replace(f"/{num}x", f"/{k}"),
            num_samples=1,
            sampling=msgspec.structs.replace(
                request.sampling, seed=(request.sampling.seed or 0) + k
            ),
        )
        for k in range(num)
    ]


def completion(
    ids: Sequence[int], version: Version = FIRST, stop_ids: Sequence[int] = (END,)
) -> Completion:
    return Completion(
        token_ids=tuple(ids),
        logprobs=tuple(-(i + 1) / 100 for i in range(len(ids))),
        segments=(Segment(0, len(ids), version.incarnation, version.number),) if ids else (),
        finish_reason="stop" if ids and ids[-1] in stop_ids else "length",
    )


def in_turn(*answers: Sequence[int] | Exception) -> Answer:
    """The answers one after another."""
    left = list(answers)

    def answer(request: GenerateRequest) -> Sequence[int]:
        following = left.pop(0)
        if isinstance(following, Exception):
            raise following
        return following

    return answer


def tokenizer(
    folder: Path,
    *,
    template: str | None = CHATML,
    merges: Sequence[tuple[str, str]] = (),
    more: Sequence[str] = (),
) -> Text:
    """A byte-level tokenizer; `merges` as BPE applies them, `more` are tokens no merge leads to."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [a + b for a, b in merges]
    vocab = {t: i for i, t in enumerate((*SPECIAL_TOKENS, *alphabet, *merged, *more))}
    made = Qwen2Tokenizer(
        vocab=vocab,
        merges=list(merges),
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
    made.save_pretrained(folder)
    return Text(folder)
