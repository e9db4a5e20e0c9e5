"""Packing: rows enter, micro-batches of real tokens only leave, none padded.

    Rows --assign--> row indices of each micro-batch, its rank --pack--> tensors of one forward pass

A micro-batch holds as many rows as its token budget takes, one after another. Rows of one group
mostly begin with the same prompt: within a micro-batch what they share stands once, where that
spares an eighth of a row or more. Each row attends to its own tokens alone.

Legend: P computed tokens, E tokens of all rows, R rows, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, groupby
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.ages import UNKNOWN
from trainer.batches import Rows, minibatch_of

SHARED_LEAST: Final = 8
"""One part in so many of a row must be shared, or its prefix is computed again: sharing costs a
copy of the attention's inputs."""
SHARED_PRICE: Final = 4
"""So many shared tokens count as one computed one in a micro-batch's budget: they take memory in
attention alone, about a seventh of a computed one's on a 135M model."""
PARTS_A_RANK: Final = 4
"""Rows are spread over several ranks in parts of at most one in so many of a rank's tokens."""


class BudgetTooSmall(ValueError):
    """A row is longer than a micro-batch may be."""


# ------------------------------------------------------------------------------------ assignment
@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """micro_batches  row indices of each, for the manifest: mini-batch by mini-batch, within those
                   rank by rank, within those the one with most tokens first
    ranks          of each micro-batch, which data-parallel rank runs it"""

    micro_batches: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


def assign(rows: Rows, max_tokens: int, num_minibatches: int = 1, num_ranks: int = 1) -> Assignment:
    """Cuts the rows with a trained token into micro-batches of at most `max_tokens` computed
    tokens (of shared ones, `SHARED_PRICE` count as one). Parts of a group go together; ranks get
    about equal numbers of tokens (longest part first, to the rank that has least), and a part goes
    where it leaves the least room (best fit decreasing). A pure function: equal rows give equal
    micro-batches. BudgetTooSmall for a row longer than `max_tokens`."""
    left_out, part_N = set(rows.untrained), minibatch_of(rows, num_minibatches)
    trained = [i for i in range(len(rows)) if i not in left_out]
    longest = max(trained, key=lambda i: len(rows.tokens[i]), default=None)
    if longest is not None and len(rows.tokens[longest]) > max_tokens:
        raise BudgetTooSmall(
            f"{rows.ids[longest]} has {len(rows.tokens[longest])} tokens, a micro-batch takes "
            f"{max_tokens} (trainer.max_tokens_per_microbatch)"
        )
    micro_batches: list[tuple[int, ...]] = []
    ranks: list[int] = []
    for _, of_part in groupby(trained, key=lambda i: int(part_N[i])):
        groups = [list(found) for _, found in groupby(of_part, key=lambda i: int(rows.groups[i]))]
        for rank, parts in enumerate(_spread(rows, groups, max_tokens, num_ranks)):
            bins = _best_fit(parts, max_tokens)
            micro_batches += bins
            ranks += [rank] * len(bins)
    return Assignment(micro_batches=tuple(micro_batches), ranks=tuple(ranks))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one group, and what they take of a micro-batch's budget at most."""

    rows: tuple[int, ...]
    num_tokens: int


def _spread(
    rows: Rows, groups: Sequence[Sequence[int]], max_tokens: int, num_ranks: int
) -> list[list[_Part]]:
    """The parts of each rank, in falling size."""
    most = max_tokens
    if num_ranks > 1:
        total = sum(_num_tokens(rows, group, _common(rows, group)) for group in groups)
        most = min(most, max(1, total // (num_ranks * PARTS_A_RANK)))
    parts = [part for group in groups for part in _parts(rows, group, most)]
    parts.sort(key=lambda part: (-part.num_tokens, part.rows))
    found: list[list[_Part]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for part in parts:
        rank = loads.index(min(loads))
        found[rank].append(part)
        loads[rank] += part.num_tokens
    return found


def _parts(rows: Rows, group: Sequence[int], most: int) -> Iterator[_Part]:
    """A group cut so that a part of several rows takes at most `most` tokens."""
    common, part = _common(rows, group), [group[0]]
    for i in group[1:]:
        if _num_tokens(rows, [*part, i], common) > most:
            yield _Part(tuple(part), _num_tokens(rows, part, common))
            part = []
        part.append(i)
    yield _Part(tuple(part), _num_tokens(rows, part, common))


def _best_fit(parts: Sequence[_Part], max_tokens: int) -> list[tuple[int, ...]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for part in parts:
        fitting = [b for b, left in enumerate(room) if left >= part.num_tokens]
        if fitting:
            at = min(fitting, key=lambda b: room[b])
        else:
            at = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[at] += part.rows
        room[at] -= part.num_tokens
    order = sorted(range(len(bins)), key=lambda b: (room[b], b))
    return [tuple(bins[b]) for b in order]


def _common(rows: Rows, group: Sequence[int]) -> int:
    """Tokens that all rows of a group begin with."""
    common = rows.tokens[group[0]]
    for i in group[1:]:
        common = common[: prefix(common, rows.tokens[i])]
    return len(common)


def _num_tokens(rows: Rows, part: Sequence[int], common: int) -> int:
    """At most so many of a budget these rows take, of a group whose rows have `common` tokens in
    common: any two of them share as many or more."""
    lengths = [len(rows.tokens[i]) for i in part]
    shared = sum(_pays(common, length) for length in lengths[1:])
    return sum(lengths) - shared + -(-shared // SHARED_PRICE)


def _pays(shared: int, length: int) -> int:
    """What a row of that length takes over of a prefix it shares."""
    return shared if shared * SHARED_LEAST >= length else 0


def prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Elements that both begin with."""
    num = min(len(a), len(b))
    differ = a[:num] != b[:num]
    return int(differ.argmax()) if differ.any() else num


def minibatches(
    rows: Rows, micro_batches: Sequence[Sequence[int]], num_minibatches: int
) -> list[list[int]]:
    """Places in `micro_batches` of those of each mini-batch that has any, in order."""
    part_N = minibatch_of(rows, num_minibatches)
    places = range(len(micro_batches))
    return [list(found) for _, found in groupby(places, lambda m: int(part_N[micro_batches[m][0]]))]


def check_assignment(
    rows: Rows, micro_batches: Sequence[Sequence[int]], num_minibatches: int = 1
) -> None:
    """ValueError unless every row with a trained token is in exactly one micro-batch, no other row
    in any, none is of two mini-batches and theirs follow each other: what keeps a manifest and the
    records it names from drifting apart."""
    assigned = sorted(i for batch in micro_batches for i in batch)
    left_out = set(rows.untrained)
    expected = [i for i in range(len(rows)) if i not in left_out]
    if assigned != expected:
        wrong = sorted(set(assigned) ^ set(expected)) or "a row twice"
        raise ValueError(
            f"micro_batches do not cover the {len(expected)} trained rows once: {wrong}"
        )
    part_N = minibatch_of(rows, num_minibatches)
    parts = [{int(part_N[i]) for i in batch} for batch in micro_batches]
    if any(len(found) != 1 for found in parts) or parts != sorted(parts, key=min):
        raise ValueError(
            f"micro_batches are not those of {num_minibatches} mini-batches in order: {parts}"
        )


# --------------------------------------------------------------------------------------- tensors
@dataclass(frozen=True, kw_only=True, slots=True)
class Pack:
    """One forward pass.

    indices              rows of the step, in order: row r of the pack is indices[r]
    tokens_P             int64; a prefix that a row shares with the first of its group stands once
    position_ids_P       int64, from 0 in each row; what follows a shared prefix goes on from it
    expand_E             int64: of each token of each row, rows one after another, its place in P;
                         None: nothing is shared, each is at its own
    starts               R + 1 bounds: row r is [starts[r], starts[r + 1]) of E
    predictor_N          int64, the place in P whose hidden state predicts each trained token
    targets_N            int64, the trained tokens
    row_N                int64, r of each, ascending
    behaviour_logprobs_N float32
    advantages_N         float32
    ages_N               int32
    """

    indices: tuple[int, ...]
    tokens_P: Tensor
    position_ids_P: Tensor
    expand_E: Tensor | None
    starts: tuple[int, ...]
    predictor_N: Tensor
    targets_N: Tensor
    row_N: Tensor
    behaviour_logprobs_N: Tensor
    advantages_N: Tensor
    ages_N: Tensor

    def to(self, device: torch.device | str) -> Pack:
        """The same there."""
        tensors = {
            field.name: getattr(self, field.name).to(device)
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


def pack(rows: Rows, indices: Sequence[int], advantages: Sequence[NDArray[np.floating]]) -> Pack:
    """The tensors of one micro-batch. `advantages`: one [T_i] array a row of `rows`."""
    lengths = [len(rows.tokens[i]) for i in indices]
    starts = tuple(accumulate(lengths, initial=0))
    is_computed_E = np.ones(starts[-1], np.bool_)
    shares: list[tuple[int, int, int]] = []  # begin and original in E, length
    first_of: dict[int, int] = {}  # by group, the r of its first row
    for r, i in enumerate(indices):
        first = first_of.setdefault(int(rows.groups[i]), r)
        if first == r:
            continue
        shared = _pays(prefix(rows.tokens[indices[first]], rows.tokens[i]), lengths[r])
        if shared:
            is_computed_E[starts[r] : starts[r] + shared] = False
            shares.append((starts[r], starts[first], shared))
    place_E = np.cumsum(is_computed_E) - 1  # in P
    for start, origin, num in shares:
        place_E[start : start + num] = place_E[origin : origin + num]
    tokens_E = _flat(rows.tokens, indices, np.int64)
    trained_E = _flat(rows.masks, indices, np.bool_)
    positions_E = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    at_N = np.flatnonzero(trained_E)
    row_N = np.repeat(np.arange(len(indices)), rows.num_trained_N[list(indices)])
    ages_N = np.full(len(at_N), UNKNOWN, np.int32)
    if rows.ages is not None:
        ages_N = _flat(rows.ages, indices, np.int32)[at_N]
    return Pack(
        indices=tuple(indices),
        tokens_P=torch.from_numpy(tokens_E[is_computed_E]),
        position_ids_P=torch.from_numpy(positions_E[is_computed_E]),
        expand_E=torch.from_numpy(place_E) if shares else None,
        starts=starts,
        predictor_N=torch.from_numpy(place_E[at_N - 1]),
        targets_N=torch.from_numpy(tokens_E[at_N]),
        row_N=torch.from_numpy(row_N),
        behaviour_logprobs_N=torch.from_numpy(_flat(rows.logprobs, indices, np.float32)[at_N]),
        advantages_N=torch.from_numpy(_flat(advantages, indices, np.float32)[at_N]),
        ages_N=torch.from_numpy(ages_N),
    )


def empty_pack() -> Pack:
    """Two tokens, of which the second is trained with advantage 0: what a rank without rows of its
    own runs, so that it takes part in what all ranks do together."""
    rows = Rows(
        ids=("empty",),
        tokens=(np.zeros(2, np.int32),),
        masks=(np.array([False, True]),),
        logprobs=(np.zeros(2, np.float32),),
        rewards=np.zeros(1),
        groups=np.zeros(1, np.int64),
    )
    return pack(rows, (0,), [np.zeros(2, np.float32)])


def _flat(arrays: Sequence[NDArray[Any]], indices: Sequence[int], kind: Any) -> NDArray[Any]:
    """Those of the rows, one after another, in one copy."""
    return np.concatenate([arrays[i] for i in indices], dtype=kind, casting="unsafe")
