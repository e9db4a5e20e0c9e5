"""Row weights: by hand, against counting anew, and as the gradient of one big batch however the
rows are cut into micro-batches and spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer import loss_reference as reference
from trainer.aggregation import AGGREGATIONS, row_weights
from trainer.losses import policy_loss

LAYOUT = {
    "masks": [[1, 1, 0, 1], [0, 1, 0, 0], [0, 1], [1, 1, 1], [0, 0, 0]],
    # Prompt 0: sample 0 of two branches, sample 1. Prompt 7: sample 0, and one without a token.
    "groups": [0, 0, 0, 7, 7],
    "samples": [0, 0, 1, 0, 1],
}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        # 3 + 1 + 1 + 3 = 8 tokens in 3 samples (of 4, 1 and 3) of 2 prompts (of 5 and 3).
        ("token-mean", [1 / 8, 1 / 8, 1 / 8, 1 / 8, 0]),
        ("seq-mean-token-mean", [1 / 12, 1 / 12, 1 / 3, 1 / 9, 0]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3, 1 / 3, 0]),
        ("constant-norm", [1 / 30, 1 / 30, 1 / 30, 1 / 30, 0]),
        ("prompt-mean", [1 / 10, 1 / 10, 1 / 10, 1 / 6, 0]),
    ],
)
def test_weights_by_hand(aggregation: str, expected: list[float]) -> None:
    masks = [np.array(mask) for mask in LAYOUT["masks"]]
    groups, samples = np.array(LAYOUT["groups"]), np.array(LAYOUT["samples"])
    found = row_weights(masks, aggregation, groups=groups, samples=samples, constant=10)
    assert found == pytest.approx(expected, rel=1e-15)
    as_torch = row_weights(
        [torch.tensor(mask) for mask in LAYOUT["masks"]],
        aggregation,
        groups=torch.from_numpy(groups),
        samples=torch.from_numpy(samples),
        constant=10,
    )
    assert (as_torch == found).all()


def test_without_samples_each_row_is_one() -> None:
    found = row_weights(np.array([[1, 1, 1], [1, 0, 0]]), "seq-mean-token-mean")
    assert found.tolist() == [1 / 6, 1 / 2]


rows_strategy = st.lists(
    st.tuples(
        st.lists(st.booleans(), min_size=5, max_size=5), st.integers(0, 2), st.integers(0, 2)
    ),
    min_size=1,
    max_size=8,
).filter(lambda rows: any(any(mask) for mask, _, _ in rows))


@settings(max_examples=60, deadline=None)
@given(rows=rows_strategy, aggregation=st.sampled_from(sorted(AGGREGATIONS)))
def test_weights_equal_counting_anew_and_a_mean_of_ones_is_one(rows: Any, aggregation: str) -> None:
    mask = np.array([mask for mask, _, _ in rows])
    groups, samples = (np.array([row[i] for row in rows]) for i in (1, 2))
    found = row_weights(mask, aggregation, groups=groups, samples=samples, constant=3)
    expected = [
        reference.row_weight(i, mask, aggregation, groups, samples, 3) for i in range(len(rows))
    ]
    assert found == pytest.approx(expected, rel=1e-14)
    if aggregation in ("token-mean", "seq-mean-token-mean", "prompt-mean"):
        assert (found * mask.sum(1)).sum() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"aggregation": "mean"}, "unknown aggregation 'mean'; known: constant-norm, prompt-mean"),
        ({"aggregation": "prompt-mean"}, "prompt-mean: the groups of the rows are missing"),
        ({"samples": np.zeros(2)}, "samples: the groups of the rows are missing"),
        ({"aggregation": "constant-norm"}, "constant-norm needs a constant above 0, got None"),
        ({"aggregation": "constant-norm", "constant": 0.0}, "above 0, got 0.0"),
        ({"groups": np.zeros(3)}, "differ in length: 2, 3, 2"),
        ({"masks": np.zeros((2, 3))}, "all tokens are masked"),
    ],
)
def test_what_cannot_be_weighed_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_weights(**({"masks": np.ones((2, 3))} | arguments))


# --------------------------------------------------------------- one big batch, however it is cut
HIDDEN, VOCABULARY, LENGTH, NUM_ROWS = 4, 6, 8, 11
CASES = [
    (name, aggregation, options)
    for aggregation in sorted(AGGREGATIONS)
    for name, options in (
        ("ppo", {}),
        ("gspo", {"correction": "mis", "correction_level": "geometric"}),
        ("cispo", {"rejection": "k1", "rejection_low": 0.2, "rejection_high": 5.0}),
    )
]


def step() -> dict[str, Any]:
    """A step's rows of mixed groups, branches, holes and one row without a trained token; a linear
    model's input, and the log-probs of older policies."""
    rng = np.random.default_rng(0)
    mask = rng.random((NUM_ROWS, LENGTH)) < 0.6
    mask[4] = False
    prox = -rng.exponential(size=mask.shape) - 1.2
    return {
        "hidden": torch.tensor(rng.normal(size=(NUM_ROWS, LENGTH, HIDDEN))),
        "tokens": torch.tensor(rng.integers(0, VOCABULARY, mask.shape)),
        "weight": torch.tensor(rng.normal(size=(VOCABULARY, HIDDEN)) * 0.3),
        "prox_logprobs": torch.tensor(prox),
        "behaviour_logprobs": torch.tensor(prox + rng.normal(scale=0.4, size=mask.shape)),
        "advantages": torch.tensor(rng.normal(size=(NUM_ROWS, 1)).repeat(LENGTH, 1)),
        "mask": torch.tensor(mask),
        "groups": np.array([0, 0, 0, 0, 0, 3, 3, 1, 1, 1, 9]),
        "samples": np.array([0, 0, 1, 2, 3, 0, 1, 0, 1, 1, 0]),
    }


def gradient_over(
    rows: Any, num_micro_batches: int, case: tuple[str, str, dict[str, Any]]
) -> tuple[torch.Tensor, float, dict[str, float]]:
    """(Gradient, loss, metrics) of these rows' part of the step, summed over micro-batches."""
    name, aggregation, options = case
    given, total, sums = step(), 0.0, dict[str, float]()
    weight = given["weight"].requires_grad_()
    shares = row_weights(
        given["mask"], aggregation, groups=given["groups"], samples=given["samples"], constant=5.0
    )
    for part in np.array_split(np.asarray(rows), num_micro_batches):
        scores = torch.log_softmax(given["hidden"][part] @ weight.t(), -1)
        current = scores.gather(2, given["tokens"][part][..., None])[..., 0]
        arrays = ("prox_logprobs", "behaviour_logprobs", "advantages", "mask")
        loss, metrics = policy_loss(
            name, current, *(given[key][part] for key in arrays),
            row_weights=shares[part], **options,
        )  # fmt: skip
        loss.backward()
        total += loss.item()
        sums = {key: sums.get(key, 0.0) + value for key, value in metrics.items()}
    assert weight.grad is not None
    return weight.grad, total, sums


def one_big_batch(case: tuple[str, str, dict[str, Any]]) -> tuple[torch.Tensor, float]:
    """Weighed by the loss itself, of its own mask."""
    name, aggregation, options = case
    given = step()
    weight = given["weight"].requires_grad_()
    scores = torch.log_softmax(given["hidden"] @ weight.t(), -1)
    given["logprobs"] = scores.gather(2, given["tokens"][..., None])[..., 0]
    arrays = ("logprobs", "prox_logprobs", "behaviour_logprobs", "advantages", "mask")
    of_rows = {"groups": given["groups"], "samples": given["samples"], "constant": 5.0}
    loss, _ = policy_loss(name, *(given[key] for key in arrays), aggregation, **of_rows, **options)
    expected = reference.policy_loss(
        name, {key: given[key].detach().numpy() for key in arrays}, aggregation, **of_rows,
        **options, **({"clip_low": 3e-4, "clip_high": 4e-4} if name == "gspo" else {}),
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected, rel=1e-11)
    loss.backward()
    assert weight.grad is not None
    return weight.grad, loss.item()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_micro_batches_give_the_gradient_of_one_big_batch(
    case: tuple[str, str, dict[str, Any]],
) -> None:
    expected, loss = one_big_batch(case)
    order = np.random.default_rng(1).permutation(NUM_ROWS)
    _, _, metrics = gradient_over(range(NUM_ROWS), 1, case)
    for num_micro_batches in (1, 3, 7):
        found, total, sums = gradient_over(order, num_micro_batches, case)
        assert (found - expected).norm() <= 1e-6 * expected.norm()
        assert total == pytest.approx(loss, rel=1e-6)
        assert sums == pytest.approx(metrics)


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    """Trains every case on each `num_ranks`-th row and adds up the gradients of all ranks."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/{num_ranks}", rank=rank, world_size=num_ranks
    )
    found = []
    for case in CASES:
        for num_micro_batches in (1, 3):
            rows = range(rank, NUM_ROWS, num_ranks)
            gradient, _, _ = gradient_over(rows, num_micro_batches, case)
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
            found.append(gradient)
    if rank == 0:
        torch.save(found, f"{folder}/gradients_{num_ranks}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_give_the_gradient_of_one_big_batch(num_ranks: int, tmp_path: Path) -> None:
    if num_ranks == 1:
        _rank(0, 1, str(tmp_path))
    else:
        torch.multiprocessing.spawn(_rank, (num_ranks, str(tmp_path)), nprocs=num_ranks)
    found = iter(torch.load(tmp_path / f"gradients_{num_ranks}.pt"))
    for case in CASES:
        expected, _ = one_big_batch(case)
        for _ in (1, 3):
            assert (next(found) - expected).norm() <= 1e-6 * expected.norm(), case
