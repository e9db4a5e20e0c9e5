"""Warm start: supervised fine-tuning on chat transcripts, by the same engine that a run trains by.

    file ─▶ transcripts ─▶ ids and masks ─▶ batches, shuffled each epoch ─▶ engine.step
                 └─▶ skipped, by reason                model folder ◀─ written whole ◀─┘

The loss is the mean negative log-likelihood of the assistant's tokens of a step (`imitation` with
advantage 1), which knows no sampling policy and takes no correction.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np

from connectors.config import ConfigError, Model, Trainer
from connectors.text import Text
from connectors.transcript_tokens import Ids, Mask, tokenise
from connectors.transcripts import BadTranscript, Format, read_transcripts
from trainer.batches import Rows
from trainer.engine import TrainingEngine
from trainer.export import check_target, write_model
from trainer.packing import assign
from trainer.schedule import rate

MAX_TOKENS: Final = 2048
"""Of a row, where none are given and the model has as many positions."""
MAX_PROBLEMS: Final = 5
"""Rows explained one by one; the rest is counted."""
WARM_UP: Final = 0.03
"""Share of the steps over which the learning rate rises."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """`batch_size` sequences a step. `learning_rate` is the highest, see `rate_of`."""

    epochs: int = 1
    learning_rate: float = 1e-5
    batch_size: int = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    num_threads: int = 1
    seed: int = 0

    def rate_of(self, step: int, num_steps: int) -> float:
        """Up over the first steps, then half a cosine that would reach 0 one step after the last,
        so that every step teaches."""
        rise = max(1, math.ceil(WARM_UP * num_steps))
        return rate(
            step,
            num_steps=num_steps + 1,
            peak=self.learning_rate,
            schedule="cosine",
            warmup_steps=rise,
        )


@dataclass(slots=True)
class Lessons:
    """What a file teaches: sequences of ids and which of them are learnt, each named by its row, of
    which there are `num_rows`; rows that were left out, by reason, the first ones explained."""

    num_rows: int = 0
    names: list[str] = field(default_factory=list)
    tokens: list[Ids] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def skip(self, where: str, bad: BadTranscript) -> None:
        self.skipped[bad.reason] += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{where}: {bad.reason}: {bad}")

    def rows(self, chosen: Sequence[int]) -> Rows:
        """Those, for the engine. Text has no behaviour log-probs."""
        return Rows(
            ids=tuple(self.names[i] for i in chosen),
            tokens=tuple(self.tokens[i] for i in chosen),
            masks=tuple(self.masks[i] for i in chosen),
            logprobs=tuple(np.full(len(self.tokens[i]), np.nan, np.float32) for i in chosen),
            rewards=np.ones(len(chosen)),
            groups=np.arange(len(chosen)),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """`loss` None: the gradients were not finite, and nothing changed."""

    number: int
    num_steps: int
    num_tokens: int
    loss: float | None


def read_lessons(
    file: Path,
    model: Path,
    form: Format = "auto",
    max_tokens: int | None = None,
    *,
    truncate: bool = False,
) -> Lessons:
    """The rows of `file` under the chat template of `model`. A row of more than `max_tokens` ids is
    left out, or cut there with `truncate` if that leaves something to learn. ConfigError when the
    file cannot be read, nothing in it can be learnt from, or the model has fewer positions."""
    text, limit = Text(model), _limit(model, max_tokens)
    lessons = Lessons()
    for where, found in read_transcripts(file, form):
        try:
            if isinstance(found, BadTranscript):
                raise found
            sequences = [
                _cut(tokens, mask, limit, truncate) for tokens, mask in tokenise(text, found)
            ]
        except BadTranscript as bad:
            lessons.skip(where, bad)
            continue
        lessons.num_rows += 1
        for tokens, mask in sequences:
            lessons.names.append(where)
            lessons.tokens.append(tokens)
            lessons.masks.append(mask)
    if not len(lessons):
        raise ConfigError(f"{file}: no row can be learnt from; {lessons.problems[0]}")
    return lessons


def _cut(tokens: Ids, mask: Mask, limit: int, truncate: bool) -> tuple[Ids, Mask]:
    if len(tokens) > limit and not (truncate and mask[:limit].any()):
        raise BadTranscript("too_long", f"it has {len(tokens)} tokens, over {limit}")
    return tokens[:limit], mask[:limit]


def _limit(model: Path, max_tokens: int | None) -> int:
    try:
        positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    except (OSError, ValueError, KeyError):
        positions = math.inf
    if max_tokens is not None and max_tokens > positions:
        raise ConfigError(f"--max-tokens {max_tokens}: the model has {positions} positions")
    return max_tokens or int(min(MAX_TOKENS, positions))


def fine_tune(
    model: Path, lessons: Lessons, recipe: Recipe, to: Path, on_step: Callable[[Step], None]
) -> list[Step]:
    """Trains `model` on the lessons and writes it and its tokenizer into the folder `to`, which is
    not there or empty: all or nothing. `on_step` hears of each step when it is done."""
    check_target(to)
    settings = Trainer(
        loss="imitation",
        correction="none",
        learning_rate=recipe.learning_rate,
        num_threads=recipe.num_threads,
    )
    with closing(
        TrainingEngine(model, settings, Model(path=str(model), dtype=recipe.dtype), 1.0)
    ) as engine:
        if (largest := max(int(t.max()) for t in lessons.tokens)) >= engine.vocabulary_size:
            raise ConfigError(
                f"{model}: its tokenizer writes id {largest}, and the model has "
                f"{engine.vocabulary_size}"
            )
        batches = list(_batches(len(lessons), recipe))
        budget = max(engine.max_tokens, *map(len, lessons.tokens))
        steps: list[Step] = []
        for number, chosen in enumerate(batches, 1):
            rows = lessons.rows(chosen)
            result = engine.step(
                rows,
                assign(rows, budget).micro_batches,
                [mask.astype(np.float64) for mask in rows.masks],
                recipe.seed + number,
                settings.model_copy(update={"learning_rate": recipe.rate_of(number, len(batches))}),
            )
            loss = None if result.skipped else result.metrics["loss"]
            done = Step(number, len(batches), rows.num_trained, loss)
            steps.append(done)
            on_step(done)
        write_model(engine, to)
    return steps


def _batches(num_sequences: int, recipe: Recipe) -> Iterator[list[int]]:
    """Every sequence once an epoch, each epoch in an order of its own."""
    for epoch in range(recipe.epochs):
        order = np.random.default_rng((recipe.seed, epoch)).permutation(num_sequences).tolist()
        for start in range(0, num_sequences, recipe.batch_size):
            yield order[start : start + recipe.batch_size]
