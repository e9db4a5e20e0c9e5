"""The loss over the trained tokens one after another is that over padded rows and their mask."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.loss_reference import sample
from trainer.corrections import CORRECTIONS, LEVELS, REJECTIONS, k3, proximal
from trainer.losses import policy_loss
from trainer.regularisers import KLS
from trainer.surrogates import LOSSES
from trainer.trained import Trained

NAN = float("nan")
Arrays = dict[str, Any]


def flat(found: Arrays, *, holes: bool = False) -> Arrays:
    """`found` [B, T] as rows of tokens: the trained ones, or with `holes` all and a mask."""
    mask = found["mask"] != 0
    taken = np.ones_like(mask) if holes else mask
    arrays = {name: array[taken] for name, array in found.items() if name != "mask"}
    return arrays | {"rows": np.nonzero(taken)[0], "mask": mask[taken] if holes else None}


def as_torch(found: Arrays, dtype: torch.dtype = torch.float64) -> Arrays:
    """As a run has them: tensors, and a gradient of the current log-probs alone."""
    made = {
        name: torch.tensor(array, dtype=dtype) if array.dtype == np.float64 else torch.tensor(array)
        for name, array in found.items()
        if array is not None
    }
    made["logprobs"].requires_grad_()
    return {"mask": None} | made


def random_step(seed: int, num_tokens: list[int]) -> tuple[Arrays, NDArray[np.float64]]:
    """([B, T] arrays of rows of so many trained tokens, with a reference and entropies; weights of
    the rows)."""
    rng = np.random.default_rng(seed)
    found = sample(seed, (len(num_tokens), 6))
    for row, number in zip(found["mask"], num_tokens, strict=True):
        row[:] = rng.permutation(6) < number
    found["reference_logprobs"] = found["prox_logprobs"] + rng.normal(size=found["mask"].shape)
    found["entropy"] = rng.random(found["mask"].shape)
    return found, rng.random(len(num_tokens))


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_tokens=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    holes=st.booleans(),
    name=st.sampled_from(sorted(LOSSES)),
    correction=st.sampled_from(CORRECTIONS),
    correction_level=st.sampled_from(sorted(LEVELS)),
    rejection=st.sampled_from(REJECTIONS),
    rejection_level=st.sampled_from(sorted(LEVELS)),
    rejection_high=st.sampled_from([0.1, 0.5, 2.0]),
    kl=st.sampled_from(sorted(KLS)),
    coefficient=st.sampled_from([0.0, 0.3]),
)
def test_flat_and_padded_are_one_loss_with_one_gradient_and_one_set_of_metrics(
    seed: int, num_tokens: list[int], holes: bool, name: str, coefficient: float, **options: Any
) -> None:
    if name == "imitation":
        options |= {"correction": "none", "rejection": "none"}
    options |= {"kl_coefficient": coefficient, "entropy_coefficient": coefficient}
    found, weights = random_step(seed, num_tokens)
    padded, cut = as_torch(found), as_torch(flat(found, holes=holes))
    options |= {"row_weights": weights, "rejection_low": 0.05}
    expected, metrics = policy_loss(name, **padded, **options)
    loss, same = policy_loss(name, **cut, **options)
    expected.backward()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert same == pytest.approx(metrics)
    taken = torch.ones_like(padded["mask"]) if holes else padded["mask"]
    torch.testing.assert_close(cut["logprobs"].grad, padded["logprobs"].grad[taken != 0])
    # numpy in, numpy out.
    in_numpy, again = policy_loss(name, **flat(found, holes=holes), **options)
    assert isinstance(in_numpy, np.float64)
    assert in_numpy == pytest.approx(loss.item(), rel=1e-12)
    assert again == pytest.approx(same)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"imitation"}))
@pytest.mark.parametrize("correction_level", sorted(LEVELS))
@pytest.mark.parametrize("rejection_level", sorted(LEVELS))
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_it_does_not_matter_how_the_step_is_cut_into_packs(
    name: str, correction_level: str, rejection_level: str, correction: str
) -> None:
    """Each row alone, then rows 0 to 2 with the row without a token and rows 3 and 4: sums."""
    found, weights = random_step(0, [3, 0, 6, 1, 5])
    options: Arrays = {
        "correction": correction, "correction_level": correction_level,
        "rejection": "k3", "rejection_level": rejection_level, "rejection_high": 0.11,
    }  # fmt: skip
    whole, metrics = policy_loss(name, **found, row_weights=weights, **options)
    assert 0 < metrics["num_rejected"] < metrics["num_tokens"] == 15
    for cuts in ([0, 1, 2, 3, 4, 5], [0, 3, 5]):
        parts = [
            policy_loss(
                name,
                **flat({key: array[first:last] for key, array in found.items()}),
                row_weights=weights[first:last],
                **options,
            )
            for first, last in pairwise(cuts)
        ]
        assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-12)
        sums = {key: sum(of_part[key] for _, of_part in parts) for key in metrics}
        assert sums == pytest.approx(metrics)


def test_a_hidden_nan_reaches_neither_loss_nor_gradient() -> None:
    found, weights = random_step(2, [2, 0, 5])
    hidden = {
        key: array if key == "mask" else np.where(found["mask"], array, NAN)
        for key, array in found.items()
    }
    expected, _ = policy_loss("gspo", **found, row_weights=weights, kl_coefficient=0.1)
    cut = as_torch(flat(hidden, holes=True))
    loss, _ = policy_loss("gspo", **cut, row_weights=weights, kl_coefficient=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert (cut["logprobs"].grad[~cut["mask"]] == 0).all()
    assert torch.isfinite(cut["logprobs"].grad).all()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_pack_without_a_trained_token_adds_a_zero_with_a_gradient(name: str) -> None:
    empty = as_torch(flat(sample(0) | {"mask": np.zeros((5, 9))}))
    loss, metrics = policy_loss(name, **empty, row_weights=np.ones(5), correction="none")
    loss.backward()
    assert (loss.item(), metrics["num_tokens"], empty["logprobs"].grad.shape) == (0.0, 0.0, (0,))


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_log_ratios_of_any_size_stay_finite(name: str) -> None:
    sizes = torch.tensor([-1e4, -500, -21, -19, 0, 19, 21, 500, 1e4])
    options: Arrays = {"correction_level": "sequence", "rejection_level": "geometric"}
    options |= {"correction": "none"} if name == "imitation" else {"rejection": "k2"}
    current = torch.full_like(sizes, -1.0).requires_grad_()
    loss, metrics = policy_loss(
        name, current, -1.0 + sizes, -1.0 - sizes, torch.ones(9), None,
        rows=torch.tensor([0, 0, 0, 1, 1, 3, 3, 3, 3]), row_weights=torch.ones(4), **options,
    )  # fmt: skip
    loss.backward()
    assert current.grad is not None
    assert torch.isfinite(torch.stack([loss, *current.grad])).all()
    assert np.isfinite(list(metrics.values())).all()


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The number of elements of the largest tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, list | tuple) else [found]:
            if isinstance(one, torch.Tensor):
                self.num_elements = max(self.num_elements, one.untyped_storage().nbytes() // 4)
        return found


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_one_long_row_among_short_ones_makes_nothing_wider_than_its_tokens(name: str) -> None:
    """Padded it would be 1001 rows of 16384: 8000 times as much."""
    rows = torch.cat([torch.zeros(16_384, dtype=torch.int64), torch.arange(1, 1001)])
    logprobs = torch.full((len(rows),), -1.0, requires_grad=True)
    others = torch.full((len(rows),), -1.1)
    with Largest() as largest:
        loss, _ = policy_loss(
            name, logprobs, others, others, torch.ones(len(rows)), None,
            rows=rows, row_weights=torch.ones(1001), entropy=others, reference_logprobs=others,
            kl_coefficient=0.1, correction="mis", correction_level="geometric", rejection="k1",
        )  # fmt: skip
        loss.backward()
    assert len(rows) <= largest.num_elements <= 2 * len(rows)  # float64 counts twice


def test_a_rows_sum_is_taken_wider_than_its_tokens() -> None:
    # In float32, 2^24 and then ones is 2^24 for ever.
    values = torch.tensor([2.0**24, 1.0, 1.0, 5.0], dtype=torch.float32)
    trained = Trained.of_rows(torch.tensor([1, 1, 1, 3]), 5)
    assert trained.over_row(values, mean=False).tolist() == [2.0**24 + 2] * 3 + [5.0]
    assert trained.over_row(values, mean=True).dtype == torch.float32
    assert trained.over_row(torch.tensor([1.0, 2.0, 6.0, 5.0]), mean=True).tolist() == [3, 3, 3, 5]


def test_the_proximal_policy_and_k3_of_a_list_of_tokens() -> None:
    current, behaviour = torch.tensor([-1.5, -2.2]), torch.tensor([-1.0, -2.0])
    found = proximal("loglinear", current, behaviour, ages=torch.tensor([3, 1]))
    torch.testing.assert_close(found, torch.tensor([-1.375, -2.1]))
    torch.testing.assert_close(
        k3(found - behaviour), torch.expm1(found - behaviour) - found + behaviour
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"row_weights": None}, "rows: the weights of the rows are missing"),
        ({"rows": None}, "the mask is missing, or the rows of the tokens"),
        ({"rows": np.array([0, 0, 2])}, r"expected an array of \[3\], got \[4\]"),
        ({"advantages": np.ones((4, 1))}, r"expected an array of \[4\], got \[4, 1\]"),
        ({"advantages": np.array([1, 1, NAN, 1])}, "advantage of trained token 2 of row 2 is nan"),
        (
            {"advantages": np.array([1, 1, 1, NAN]), "mask": np.array([0, 0, 0, 1])},
            "advantage of trained token 3 of row 2 is nan",
        ),
        (
            {"behaviour_logprobs": None},
            "behaviour log-prob of trained token 0 of row 0 is nan",
        ),
    ],
)
def test_what_is_missing_or_not_finite_is_named_by_token_and_row(
    changed: Arrays, message: str
) -> None:
    found: Arrays = dict.fromkeys(
        ("logprobs", "prox_logprobs", "behaviour_logprobs", "advantages"), -np.ones(4)
    )
    found |= {"mask": None, "rows": np.array([0, 0, 2, 2]), "row_weights": np.ones(3)}
    with pytest.raises(ValueError, match=message):
        policy_loss("ppo", **found | changed)


def test_padded_rows_need_as_many_weights() -> None:
    with pytest.raises(ValueError, match="5 rows, and weights of 4"):
        policy_loss("ppo", **sample(0), row_weights=np.ones(4))
