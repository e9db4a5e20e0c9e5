"""What each rank trains of a step, and how rank 0 tells the others.

    rows, micro-batches, advantages ──split──▶ a Share a rank ──▶ the rank's forward passes
                                                  │
                            rank 0 ── order_of ──▶ Order ── read ──▶ the same Share elsewhere

An order names records by their coordinates: a rank reads the groups of its own share from the log,
and what it cannot read there, the advantages and row weights of the whole step, travels with the
order. Its share's digest does too: a rank that reads other rows than rank 0 did says so before it
trains anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.config import Trainer
from connectors.records import Coordinate, Group
from trainer import aggregation, batches, overdue
from trainer.ages import Ages, recorded, recorded_ages
from trainer.batches import Rows, minibatch_of
from trainer.overdue import Weights
from trainer.packing import minibatches

Floats = NDArray[np.float32]


class SharesDiffer(RuntimeError):
    """Ranks disagree on what a step's manifest names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Of one rank.

    rows         those it trains, in the step's order; groups and samples as numbered there
    minibatches  by mini-batch of the step that any rank has rows of, its micro-batches as places
                 in `rows`; padded with empty ones, so that all ranks have equally many
    advantages   float32 [T_i] a row
    weights_N    float64 [N], of each row in the loss of its mini-batch
    """

    rows: Rows
    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    advantages: tuple[Floats, ...]
    weights_N: NDArray[np.float64]

    def digest(self) -> str:
        """8 hex digits of which tokens are trained as whose, and from which log-probs."""
        crc = google_crc32c.Checksum()
        rows = self.rows
        for name, *arrays in zip(rows.ids, rows.tokens, rows.masks, rows.logprobs, strict=True):
            crc.update(name.encode())
            for array in arrays:
                crc.update(np.ascontiguousarray(array).tobytes())
        return str(crc.digest().hex())


def split(
    rows: Rows,
    micro_batches: Sequence[Sequence[int]],
    ranks: Sequence[int],
    advantages: Sequence[NDArray[np.floating[Any]]],
    settings: Trainer,
    num_ranks: int,
) -> list[Share]:
    """The share of each data-parallel rank. `ranks`: of each micro-batch; empty: all are rank
    0's. ValueError for a rank that is not there, or ranks of other micro-batches."""
    ranks = ranks or [0] * len(micro_batches)
    if len(ranks) != len(micro_batches) or not all(0 <= rank < num_ranks for rank in ranks):
        raise ValueError(
            f"{len(micro_batches)} micro-batches on ranks {sorted(set(ranks))} of {num_ranks}"
        )
    weights_N = row_weights(rows, settings)
    cut = minibatches(rows, micro_batches, settings.num_minibatches)
    found = []
    for rank in range(num_ranks):
        of_rank = [[micro_batches[m] for m in part if ranks[m] == rank] for part in cut]
        chosen = sorted(i for part in of_rank for batch in part for i in batch)
        place = {i: k for k, i in enumerate(chosen)}
        padded = []
        for part, batches_of_rank in zip(cut, of_rank, strict=True):
            most = max(sum(ranks[m] == r for m in part) for r in range(num_ranks))
            renamed = [tuple(place[i] for i in batch) for batch in batches_of_rank]
            padded.append(tuple(renamed + [()] * (most - len(renamed))))
        found.append(
            Share(
                rows=rows.chosen(chosen),
                minibatches=tuple(padded),
                advantages=tuple(np.asarray(advantages[i], np.float32) for i in chosen),
                weights_N=weights_N[chosen],
            )
        )
    return found


def row_weights(rows: Rows, settings: Trainer) -> NDArray[np.float64]:
    """[N], of each row in the loss of its own mini-batch; 0 for rows that no loss takes."""
    parts_N = minibatch_of(rows, settings.num_minibatches)
    found = np.zeros(len(rows))
    for part in np.unique(parts_N):
        at = np.flatnonzero(parts_N == part)
        masks = [rows.masks[i] for i in at]
        if any(mask.any() for mask in masks):
            found[at] = aggregation.row_weights(
                masks,
                settings.aggregation,
                groups=rows.groups[at],
                samples=None if rows.samples is None else rows.samples[at],
                constant=settings.aggregation_constant,
            )
    return found


# --------------------------------------------------------------------------------------- orders
@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where the rows of a step are to be read: its groups' records, in order, and what says which
    of their tokens are trained."""

    records: Sequence[Coordinate]
    ages: Ages
    weights: Weights


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """The share of one rank, to be read. `picks`: rows of the flat list of `records`. `runs`:
    lengths of runs of equal advantages over all tokens of the rows, `values` theirs."""

    records: tuple[Coordinate, ...]
    picks: tuple[int, ...]
    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    settings: dict[str, float | str]
    runs: bytes
    values: bytes
    weights: bytes
    digest: str

    def share(self, read: Callable[[Sequence[Coordinate]], Sequence[Group]]) -> Share:
        """What rank 0 meant. SharesDiffer when the log holds something else here."""
        rows = batches.flatten(
            read(self.records),
            overdue.weights_of(self.settings),
            ages=recorded_ages(self.settings),
        )
        if self.picks and self.picks[-1] >= len(rows):
            raise SharesDiffer(f"row {self.picks[-1]} was asked for, the records have {len(rows)}")
        rows = rows.chosen(self.picks)
        flat = np.repeat(np.frombuffer(self.values, np.float32), np.frombuffer(self.runs, np.int64))
        ends = np.cumsum([len(tokens) for tokens in rows.tokens])
        share = Share(
            rows=rows,
            minibatches=self.minibatches,
            advantages=tuple(np.split(flat, ends[:-1])) if len(rows) else (),
            weights_N=np.frombuffer(self.weights, np.float64),
        )
        if (here := share.digest()) != self.digest:
            raise SharesDiffer(
                f"the rows that the records hold here have the checksum {here}, those of rank 0 "
                f"{self.digest}: {', '.join(rows.ids[:3])}..."
            )
        return share


def order_of(share: Share, rows: Rows, origin: Origin) -> Order:
    """`rows`: all of the step, of which the share has some."""
    place = {name: i for i, name in enumerate(rows.ids)}
    chosen = [place[name] for name in share.rows.ids]
    groups = sorted({int(rows.groups[i]) for i in chosen})
    in_records = np.flatnonzero(np.isin(rows.groups, groups))
    values = np.concatenate([np.zeros(0, np.float32), *share.advantages])
    edges = np.flatnonzero(np.diff(values.view(np.int32), prepend=~values[:1].view(np.int32)))
    return Order(
        records=tuple(origin.records[g] for g in groups),
        picks=tuple(np.searchsorted(in_records, chosen).tolist()),
        minibatches=share.minibatches,
        settings={**recorded(origin.ages), **overdue.recorded(origin.weights)},
        runs=np.diff(edges, append=len(values)).astype(np.int64).tobytes(),
        values=values[edges].tobytes(),
        weights=share.weights_N.tobytes(),
        digest=share.digest(),
    )


# ---------------------------------------------------------------------------------------- calls
class Train(msgspec.Struct, frozen=True, kw_only=True, tag="train"):
    """`order`: of the rank that is told; `trainer`: the section of this step, as JSON."""

    order: Order
    seed: int
    trainer: str
    measure_drift: bool


def trains(
    cut: Sequence[Share],
    rows: Rows,
    origin: Origin,
    *,
    num_ranks: int,
    seed: int,
    settings: Trainer,
    measure_drift: bool,
) -> dict[int, Train]:
    """What each rank but rank 0 is told of a step on `rows`. `cut`: its shares, each of which is
    that of equally many neighbours."""
    each, text = num_ranks // len(cut), settings.model_dump_json()
    calls = {
        k: Train(
            order=order_of(cut[k], rows, origin),
            seed=seed,
            trainer=text,
            measure_drift=measure_drift,
        )
        for k in {rank // each for rank in range(1, num_ranks)}
    }
    return {rank: calls[rank // each] for rank in range(1, num_ranks)}


class Take(msgspec.Struct, frozen=True, tag="snapshot"):
    """Of the weights."""


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """Of the weights."""


class Capture(msgspec.Struct, frozen=True, tag="capture"):
    """Of the state, for a checkpoint."""


class Load(msgspec.Struct, frozen=True, tag="load"):
    folder: str


class Pretrained(msgspec.Struct, frozen=True, tag="pretrained"):
    folder: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The end."""


Call = Train | Take | Digest | Capture | Load | Pretrained | Close
"""What rank 0 does and the others shall do with it."""
