"""What a step costs on packed rows, beside padded ones and the ideal.

    python -P -m benchmarks.packing [--rounds N] [--json FILE]

Forward and backward together, float32, one thread, processor time; all tokens are trained but the
first of a row or, where rows share a prompt, those of the prompt. In turns, on the quickstart's
model and on a random one of SmolLM2-135M's shape.

ideal    the sum over rows of each row alone: real tokens only
packed   all rows in one pack, the trainer's way; a prompt they share stands once
padded   all rows as long as the longest, as [B, T] through torch's own attention
unshared where a prompt is shared: packed as if each row had its own

A ratio is the median of the ratios of each round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.publish import build_model
from benchmarks.table import main, ratio, table
from trainer.batches import Rows
from trainer.logprobs import chosen_logprobs
from trainer.packing import Pack, pack
from trainer.policy import PolicyModel, load_policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    shared: int = 0
    """Tokens that all rows begin with."""


FOUR = Case(name="80, 500, 120, 1200", lengths=(80, 500, 120, 1200))
# Quantiles of a log-normal distribution: many short rows, one long.
TAIL = Case(
    name="long tail of 16",
    lengths=(16, 22, 28, 34, 41, 49, 58, 68, 80, 95, 114, 140, 176, 233, 344, 902),
)
PROMPT = Case(
    name="8 of a prompt of 256",
    lengths=(276, 288, 301, 317, 336, 360, 395, 470),
    shared=256,
)
SHORT_TAIL = replace(TAIL, name="long tail of 8", lengths=TAIL.lengths[1::2])
SHORT_PROMPT = replace(PROMPT, name="4 of a prompt of 256", lengths=PROMPT.lengths[1::2])


def rows_of(case: Case, num_ids: int, *, apart: bool = False) -> Rows:
    """Of one group; `apart`: as many groups as rows, so that nothing is shared."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, num_ids, length).astype(np.int32) for length in case.lengths]
    for row in tokens:
        row[: case.shared] = tokens[0][: case.shared]
    return Rows(
        ids=tuple(str(i) for i in range(len(tokens))),
        tokens=tuple(tokens),
        masks=tuple(np.arange(len(row)) >= max(1, case.shared) for row in tokens),
        logprobs=tuple(np.zeros(len(row), np.float32) for row in tokens),
        rewards=np.zeros(len(tokens)),
        groups=np.arange(len(tokens)) if apart else np.zeros(len(tokens), np.int64),
    )


# -------------------------------------------------------------------------------------- the ways
def step_packed(policy: PolicyModel, packs: Sequence[Pack]) -> float:
    """The sum of the log-probs of all trained tokens."""
    total = 0.0
    for rows in packs:
        loss = policy(rows)[0].sum()
        loss.backward()
        total += loss.item()
    return total


def step_padded(policy: PolicyModel, rows: Rows) -> float:
    model, longest = policy.model, max(map(len, rows.tokens))
    tokens_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask_BT = torch.zeros(len(rows), longest, dtype=torch.bool)
    for row, (tokens, mask) in enumerate(zip(rows.tokens, rows.masks, strict=True)):
        tokens_BT[row, : len(tokens)] = torch.from_numpy(tokens)
        mask_BT[row, : len(tokens)] = torch.from_numpy(mask)
    # Padding stands on the right, where causal attention keeps it from every real token.
    hidden_BTH = model.base_model(input_ids=tokens_BT, use_cache=False).last_hidden_state
    chosen_BT = mask_BT[:, 1:]
    logprobs_N, _ = chosen_logprobs(
        hidden_BTH[:, :-1][chosen_BT],
        model.get_output_embeddings().weight,
        tokens_BT[:, 1:][chosen_BT],
    )
    loss = logprobs_N.sum()
    loss.backward()
    return float(loss.item())


def ways(packing: PolicyModel, padding: PolicyModel, case: Case) -> dict[str, Callable[[], float]]:
    num_ids = int(packing.model.get_input_embeddings().num_embeddings)
    rows, apart = rows_of(case, num_ids), rows_of(case, num_ids, apart=True)
    zeros = [np.zeros(len(tokens), np.float32) for tokens in rows.tokens]
    whole = range(len(rows))
    found = {
        "ideal": partial(step_packed, packing, [pack(apart, [i], zeros) for i in whole]),
        "packed": partial(step_packed, packing, [pack(rows, whole, zeros)]),
        "padded": partial(step_padded, padding, rows),
    }
    if case.shared:
        found["unshared"] = partial(step_packed, packing, [pack(apart, whole, zeros)])
    return found


# ------------------------------------------------------------------------------------ measurement
def measure_case(
    packing: PolicyModel, padding: PolicyModel, case: Case, rounds: int
) -> dict[str, Any]:
    each_way = ways(packing, padding, case)
    cpu_s: dict[str, list[float]] = {way: [] for way in each_way}
    totals: dict[str, float] = {}
    for turn in range(-1, rounds):  # the first touches memory
        for way, step in each_way.items():
            started = time.process_time()
            totals[way] = step()
            if turn >= 0:
                cpu_s[way].append(time.process_time() - started)
    for way, total in totals.items():
        np.testing.assert_allclose(total, totals["ideal"], rtol=1e-4, err_msg=way)
    real, longest = sum(case.lengths), max(case.lengths)
    return {
        "lengths": case.lengths,
        "shared": case.shared,
        "padded_tokens": len(case.lengths) * longest / real,
        "cpu_s": {way: statistics.median(values) for way, values in cpu_s.items()},
        "of_ideal": {way: ratio(values, cpu_s["ideal"]) for way, values in cpu_s.items()},
        "each_cpu_s": cpu_s,
    }


def policies(folder: Path) -> tuple[PolicyModel, PolicyModel]:
    """The same weights with attention of packed rows, and with torch's own."""
    packing, padding = (load_policy(folder, torch.float32, 1.0).train() for _ in range(2))
    padding.model.set_attn_implementation("sdpa")
    for (_, ours), (_, theirs) in zip(
        packing.named_parameters(), padding.named_parameters(), strict=True
    ):
        theirs.data, ours.grad = ours.data, torch.zeros_like(ours)
        theirs.grad = ours.grad
    return packing, padding


def measure(rounds: int) -> tuple[dict[str, Any], str]:
    from examples.quickstart.model import build

    found: dict[str, Any] = {}
    shown: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        for model, make, cases, times in (
            ("quickstart", build, (FOUR, TAIL, PROMPT), 5),  # its steps are short
            ("135M", build_model, (FOUR, SHORT_TAIL, SHORT_PROMPT), 1),
        ):
            folder = Path(name) / model
            folder.mkdir()
            make(folder)
            packing, padding = policies(folder)
            found[model] = {}
            for case in cases:
                of = measure_case(packing, padding, case, rounds * times)
                found[model][case.name] = of
                shown.append(line(model, case, of))
    setting = f"a step's forward and backward, float32, medians of {rounds} (quickstart: x5)"
    return {"packing": {"setting": setting, "of": found}}, f"{setting}\n{table(HEAD, shown)}"


HEAD: Final = ("", "ideal s", "packed", "unshared", "padded", "tokens padded")


def line(model: str, case: Case, of: dict[str, Any]) -> tuple[str, ...]:
    """Times as multiples of the ideal."""

    def times(way: str) -> str:
        return f"{of['of_ideal'][way]:.2f} x" if way in of["of_ideal"] else ""

    return (
        f"{model}, {case.name}",
        f"{of['cpu_s']['ideal']:.2f}",
        times("packed"),
        times("unshared"),
        times("padded"),
        f"{of['padded_tokens']:.2f} x",
    )


if __name__ == "__main__":
    main(str(__doc__), [measure])
