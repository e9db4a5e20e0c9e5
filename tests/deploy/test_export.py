"""A run whose checkpoints lie in an object store and whose log is trimmed: its trainer is killed
and recovers, its log is audited and replayed, its weights are exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connectors import weights
from connectors.config import ConfigError
from connectors.kafka.client import Cluster, read_all
from connectors.run_dir import RunDir
from deploy.log import opened
from deploy.run_folder import load_run
from tests.deploy.written_log import write_example
from tests.small_run import SmallRun
from tests.trainer.s3_server import BUCKET, S3, s3_server
from trainer.export import NothingToExport, export
from trainer.step_log import chain, read_steps

pytestmark = pytest.mark.xdist_group("export")  # one run for all

NUM_STEPS = 10


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def run(s3: S3, tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> SmallRun:
    """Ended after NUM_STEPS, with one kill -9 of its trainer on the way."""
    made = SmallRun(
        tmp_path_factory.mktemp("run"),
        tiny_model_path,
        settings={
            "checkpoint.url": f"s3://{BUCKET}/run",
            **{f"checkpoint.options.{key}": value for key, value in s3.options.items()},
            "checkpoint.every_steps": 2,
            "checkpoint.trim_log": True,
            "trainer.num_steps": NUM_STEPS,
        },
    )
    with made.running() as process:
        made.wait_for_step(process, 5)
        made.kill("trainer")
        assert process.wait(240) == 0, made.logs()
    return made


def test_the_log_is_trimmed_and_the_run_went_on_from_the_object_store(
    run: SmallRun, s3: S3
) -> None:
    kept = {key.split("/")[1] for key in s3.objects("run/")}
    assert kept == {f"step-{NUM_STEPS - 2:08d}", f"step-{NUM_STEPS:08d}"}
    assert not list((run.run_dir.path / "checkpoints").glob("*"))
    config = load_run(run.run_dir)
    with opened(config, run.run_dir) as log:
        first = {
            topic: read_all(log, log.topic(topic), [0])[0].offset
            for topic in ("steps", "trajectories", "rollouts", "policy", "prompts")
        }
        manifests = chain(read_steps(log))
    assert all(first[topic] > 0 for topic in ("steps", "trajectories", "rollouts"))
    assert (first["policy"], first["prompts"]) == (0, 0)
    assert manifests[0].step > 1
    assert manifests[-1].step == NUM_STEPS


def test_the_trimmed_log_is_audited_and_replayed(run: SmallRun) -> None:
    audit = run.ask("audit")
    assert audit["ok"], audit
    replayed = run.ask("replay")
    assert replayed["equal"]
    assert replayed["steps"] >= 1


def digest_of(folder: Path) -> str:
    """Of a Hugging Face folder's weights, by transformers alone."""
    from transformers import AutoModelForCausalLM

    parameters = dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())
    layout = weights.plan(weights.shapes_of(parameters), torch.float32)
    return weights.digest(parameters, layout)


def test_an_export_loads_in_transformers_with_the_digest_of_its_manifest(
    run: SmallRun, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    found = run.ask("export", "--to", tmp_path / "new" / "model")
    assert found == {
        "step": NUM_STEPS,
        "version": {"incarnation": 0, "number": NUM_STEPS},
        "path": str(tmp_path / "new" / "model"),
    }
    with opened(load_run(run.run_dir), run.run_dir) as log:
        made = {m.step: m.digest for m in chain(read_steps(log))}
    assert digest_of(tmp_path / "new" / "model") == made[NUM_STEPS]
    assert AutoTokenizer.from_pretrained(tmp_path / "new" / "model").encode("a")
    assert [entry.name for entry in (tmp_path / "new").iterdir()] == ["model"]
    (plain := tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "new" / "model").iterdir()}
    assert modes == {plain.stat().st_mode}


def test_an_earlier_step_is_exported_into_an_empty_folder(run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    config = load_run(run.run_dir)
    with opened(config, run.run_dir) as log:
        meta = export(log, run.run_dir, config, folder, NUM_STEPS - 2)
    assert meta.step == NUM_STEPS - 2
    assert digest_of(folder) == meta.digest


def test_what_cannot_be_exported_is_said(run: SmallRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    config = load_run(run.run_dir)
    with opened(config, run.run_dir) as log:
        with pytest.raises(ConfigError, match=f"{tmp_path} is no empty folder"):
            export(log, run.run_dir, config, tmp_path)
        there = f"no checkpoint of step 3; it has {NUM_STEPS - 2}, {NUM_STEPS}"
        with pytest.raises(NothingToExport, match=there):
            export(log, run.run_dir, config, tmp_path / "x", 3)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_run_without_a_checkpoint_is_told_how_it_comes_to_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = write_example(cluster, tmp_path)
    with pytest.raises(NothingToExport, match=r"at step 2, .* one every 10 steps \(checkpoint\."):
        export(cluster, RunDir(tmp_path), log.config, tmp_path / "to")
