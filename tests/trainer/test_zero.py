"""Any ZeRO stage, any number of ranks: the same training, and the same bits after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.config import Trainer
from tests.models import tiny_model
from tests.trainer import ranks
from tests.trainer.ranks import distance, weights_in
from trainer.process_group import ALONE

# Each test keeps both cores busy, so they do not run beside each other.
pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.timeout(600)]

STAGES = (0, 1, 2, 3)
NUM_STEPS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def job(model: Path, folder: Path, **more: Any) -> ranks.Job:
    settings = more.pop("settings", {})
    return {"model": str(model), "folder": str(folder), "settings": settings, **more}


@pytest.fixture(scope="module")
def ten_steps(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """(stage, ranks) -> (weights after ten steps, what rank 0 says)."""
    folder, found = tmp_path_factory.mktemp("ten"), {}
    jobs = {
        (stage, num): job(
            model, folder / f"{stage}-{num}", settings={"zero_stage": stage}, last=NUM_STEPS
        )
        for stage in STAGES
        for num in (1, 2)
    }
    said = {key: [ranks.do(one, ALONE)] for key, one in jobs.items() if key[1] == 1}
    together = [key for key in jobs if key[1] == 2]
    said |= dict(zip(together, ranks.run(2, [jobs[key] for key in together]), strict=True))
    for key, answers in said.items():
        assert len({answer["digest"] for answer in answers}) == 1, key
        found[key] = weights_in(Path(jobs[key]["folder"]) / "model"), answers[0]
    return found


def test_every_stage_on_one_and_two_ranks_comes_to_the_same_weights(
    model: Path, ten_steps: dict[Any, Any]
) -> None:
    expected, said = ten_steps[1, 1]
    moved = distance(weights_in(model), expected)
    for key, (weights, answer) in ten_steps.items():
        assert distance(expected, weights) < 1e-4 < moved, key
        for step, (ours, theirs) in enumerate(zip(answer["steps"], said["steps"], strict=True), 1):
            where = (key, step)
            assert ours["skipped"] is None, where
            assert ours["changed"], where
            for name in ("loss", "grad_norm", "gap/mean", "loss/ratio_mean"):
                assert ours["metrics"][name] == pytest.approx(
                    theirs["metrics"][name], rel=1e-3, abs=1e-5
                ), (where, name)
            if key[1] == 1:  # of more micro-batches, the drift is measured on more tokens
                assert ours["drift"] == pytest.approx(theirs["drift"], rel=1e-2), where


def test_rows_fewer_than_ranks_train_and_ten_on_four(model: Path, tmp_path: Path) -> None:
    alone = [
        ranks.do(job(model, tmp_path / f"1-{num}", groups=groups, last=2), ALONE)
        for num, groups in ((10, [2, 5]), (2, [1, 2]))
    ]
    stage = {"zero_stage": 3}
    ten = ranks.run(4, [job(model, tmp_path / "4", groups=[2, 5], last=2, settings=stage)])
    few = ranks.run(4, [job(model, tmp_path / "2", groups=[1, 2], last=2)])
    for folder, one, several in (("4", alone[0], ten[0]), ("2", alone[1], few[0])):
        reference = weights_in(tmp_path / ("1-10" if folder == "4" else "1-2") / "model")
        assert distance(reference, weights_in(tmp_path / folder / "model")) < 1e-4
        for ours, theirs in zip(several[0]["steps"], one["steps"], strict=True):
            assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], abs=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restart_goes_on_bit_for_bit_in_every_stage(
    model: Path, tmp_path: Path, num_ranks: int
) -> None:
    jobs = []
    for stage in STAGES:
        settings = {"zero_stage": stage}
        whole, again = tmp_path / f"whole-{stage}", tmp_path / f"again-{stage}"
        jobs += [
            job(model, whole, settings=settings, last=4, save_at=2),
            job(model, again, settings=settings, first=3, last=4, load=str(whole / "state")),
        ]
    said = [[ranks.do(one, ALONE)] for one in jobs] if num_ranks == 1 else ranks.run(2, jobs)
    for stage, whole, again in zip(STAGES, said[::2], said[1::2], strict=True):
        assert again[0]["digest"] == whole[0]["digest"], stage
        assert again[0]["steps"] == whole[0]["steps"][2:], stage


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loss_or_a_gradient_that_is_not_finite_on_one_rank_is_a_step_on_none(
    model: Path, tmp_path: Path, num_ranks: int
) -> None:
    jobs = []
    kinds = [{"zero_stage": stage} for stage in STAGES]
    kinds += [{"zero_stage": 2, "offload": "optimizer"}, {"zero_stage": 3, "offload": "all"}]
    for i, settings in enumerate(kinds):
        jobs += [
            job(model, tmp_path / f"{i}-nan", settings=settings, last=3, nan_at=2),
            job(model, tmp_path / f"{i}-inf", settings=settings, last=3, inf_at=2),
            job(model, tmp_path / f"{i}-whole", settings=settings, last=1, save_at=1),
            job(
                model, tmp_path / f"{i}-only", settings=settings, first=3, last=3,
                load=str(tmp_path / f"{i}-whole" / "state"),
            ),
        ]  # fmt: skip
    said = [[ranks.do(one, ALONE)] for one in jobs] if num_ranks == 1 else ranks.run(2, jobs)
    for i, settings in enumerate(kinds):
        *bad, _, only = said[4 * i : 4 * i + 4]
        for answers in bad:
            for answer in answers:
                assert answer["steps"][1]["skipped"] == "nan_gradient", settings
                assert not answer["steps"][1]["changed"], settings
            # It left no trace: the next step is that of a run that never had it.
            assert answers[0]["steps"][2] == only[0]["steps"][0], settings
            assert answers[0]["digest"] == only[0]["digest"], settings


VARIANTS: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "minibatches": {"num_minibatches": 3, "proximal": "recompute", "zero_stage": 2},
    "reference": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "zero_stage": 3},
    "offload": {"offload": "optimizer", "zero_stage": 2},
    "offload all": {"offload": "all", "zero_stage": 3},
    "adapters": {"lora": {"rank": 4}, "kl_coefficient": 0.1, "zero_stage": 3},
    "sequence": {"sequence_parallel": 2},
    "sequence in parts": {"sequence_parallel": 2, "zero_stage": 3, "gradient_checkpointing": True},
}


def test_what_saves_memory_or_spreads_work_changes_no_number(model: Path, tmp_path: Path) -> None:
    jobs = [
        job(model, tmp_path / name, settings=settings, last=3)
        for name, settings in VARIANTS.items()
    ]
    for one, (said, _) in zip(jobs, ranks.run(2, jobs), strict=True):
        settings = Trainer(num_ranks=2, **one["settings"])
        for key in ("zero_stage", "offload", "sequence_parallel"):  # they do change bits
            assert said["environment"][key] == str(getattr(settings, key)), one["settings"]
        plain = {
            key: value
            for key, value in one["settings"].items()
            if key not in ("zero_stage", "offload", "sequence_parallel", "gradient_checkpointing")
        }
        alone = job(model, tmp_path / "plain", settings=plain, last=3)
        ranks.do(alone, ALONE)
        expected = weights_in(tmp_path / "plain" / "model")
        found = weights_in(Path(one["folder"]) / "model")
        assert distance(expected, found) < 1e-4, one["settings"]


def test_bfloat16_keeps_float32_gradients_and_weights_in_the_stages_that_have_it(
    model: Path, tmp_path: Path
) -> None:
    jobs = [
        job(model, tmp_path / f"{stage}", settings={"zero_stage": stage}, dtype="bfloat16", last=4)
        for stage in STAGES[1:]
    ]
    said = ranks.run(2, jobs)
    alone = ranks.do(job(model, tmp_path / "alone", dtype="bfloat16", last=4), ALONE)
    expected = weights_in(tmp_path / "alone" / "model")
    for one, answers in zip(jobs, said, strict=True):
        found = weights_in(Path(one["folder"]) / "model")
        assert distance(expected, found) < 4e-3, one["settings"]  # a unit in the last place: 2^-8
        for ours, theirs in zip(answers[0]["steps"], alone["steps"], strict=True):
            assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], abs=0.02)
    assert np.isfinite(expected).all()
