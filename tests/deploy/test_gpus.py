"""Placing roles on GPUs. The machine's GPUs are made up: none are needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.config import Config, load
from connectors.run_dir import RunDir
from deploy import gpus
from deploy.doctor import examine
from deploy.errors import EnvironmentFailure
from deploy.gpus import VARIABLE, claim, place
from deploy.run import plan
from tests.deploy.command import config_text


def test_whole_gpus_are_nobody_elses() -> None:
    wanted = {"trainer": 2, "engine-0": 1, "engine-1": 1}
    placed = place(wanted, ["4", "5", "6", "7"])
    assert placed == {"trainer": "4,5", "engine-0": "6", "engine-1": "7"}


def test_shares_of_a_gpu_are_put_together_and_none_is_no_gpu() -> None:
    assert place({"trainer": 0.5, "engine-0": 0.5, "engine-1": 0}, ["0", "1"]) == {
        "trainer": "0",
        "engine-0": "0",
        "engine-1": "",
    }
    assert place({"a": 0.6, "b": 0.6, "c": 0.4}, ["0", "1"]) == {"a": "0", "b": "1", "c": "0"}


def test_too_few_gpus_are_one_line_that_says_who_asked() -> None:
    with pytest.raises(EnvironmentFailure, match=r"1 GPUs are visible.*trainer 1, engine-0 1$"):
        place({"trainer": 1, "engine-0": 1, "engine-1": 0}, ["0"])


@given(st.lists(st.sampled_from([0, 0.25, 0.5, 0.75, 1, 1.5, 2]), max_size=6), st.integers(0, 6))
def test_no_gpu_is_given_out_more_than_whole(counts: list[float], num_gpus: int) -> None:
    wanted = {str(i): count for i, count in enumerate(counts)}
    try:
        placed = place(wanted, [f"gpu{i}" for i in range(num_gpus)])
    except EnvironmentFailure:
        return
    used: dict[str, float] = {}
    for role, names in placed.items():
        got = names.split(",") if names else []
        assert len(got) == -(-wanted[role] // 1)
        for gpu in got:
            used[gpu] = used.get(gpu, 0) + min(wanted[role], 1)
    assert all(total <= 1 for total in used.values())


@pytest.mark.parametrize(
    ("named", "expected"), [(None, ["0", "1"]), ("3,GPU-8f,5", ["3", "GPU-8f"])]
)
def test_what_is_visible_is_named_as_the_caller_named_it(
    monkeypatch: pytest.MonkeyPatch, named: str | None, expected: list[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(VARIABLE, raising=False)
    if named is not None:
        monkeypatch.setenv(VARIABLE, named)
    assert gpus.visible() == expected


def test_who_asks_for_no_gpu_sees_none_and_who_asks_gets_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    claim("trainer.num_gpus", 0)
    assert os.environ[VARIABLE] == ""
    monkeypatch.setattr(gpus, "visible", lambda: ["0"])
    claim("trainer.num_gpus", 0.5)
    with pytest.raises(EnvironmentFailure, match=r"trainer\.num_gpus = 2, but torch finds 1 GPUs"):
        claim("trainer.num_gpus", 2)


def config(tmp_path: Path, **sections: str) -> Config:
    file = tmp_path / "a.toml"
    file.write_text(config_text(tmp_path / "m", **sections))
    return load(file)


def test_a_run_gives_trainer_and_engines_their_own_gpus_and_leaves_other_roles_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: ["0", "1", "2", "3"])
    trainer = "num_ranks = 2\nnum_gpus = 2"  # its ranks share these out
    asking = config(tmp_path, engine="count = 2\nnum_gpus = 1", trainer=trainer)
    gangs = plan(asking, RunDir(tmp_path / "run"), 1)
    seen = {member.name: member.gpus for gang in gangs for member in gang.members}
    assert seen == {
        "broker": None, "dataflow": None, "engine-0": "2", "engine-1": "3", "trainer": "0,1",
    }  # fmt: skip


def test_the_doctor_says_who_gets_which_gpu_or_that_there_are_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(tmp_path, engine="num_gpus = 0.5\ncount = 2", trainer="num_gpus = 1")
    for visible, ok, says in (
        (["0", "1"], True, "trainer: 0, engine-0: 1, engine-1: 1"),
        (["0"], False, "too few"),
    ):
        monkeypatch.setattr(gpus, "visible", lambda visible=visible: visible)
        (check,) = [c for c in examine(str(tmp_path / "a.toml")) if c.name == "gpus"]
        assert check.ok is ok
        assert says in check.fix


def test_a_run_without_gpus_does_not_look_for_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "visible", lambda: pytest.fail("looked"))
    gangs = plan(config(tmp_path), RunDir(tmp_path / "run"), 1)
    assert {m.gpus for gang in gangs for m in gang.members if m.gpus is not None} == {""}
