"""Whether a run's vLLM engines could start: said before anything does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import errors, vllm_checks
from deploy.cli import main
from deploy.doctor import Check, examine
from tests.deploy.command import config_text
from tests.vllm_gate import requires_vllm

MISSING = "vLLM is not installed: do this"


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_checks.version, "problem", lambda: MISSING)


def written(tmp_path: Path, model: Path, engine: str = 'kind = "vllm"') -> str:
    file = tmp_path / "a.toml"
    file.write_text(config_text(model, engine=engine))
    return str(file)


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.mark.usefixtures("no_vllm")
def test_a_run_without_its_vllm_is_one_line_and_exit_3_before_anything_starts(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, tiny_model_path)
    assert main(["run", file, "--run-dir", str(tmp_path / "run")]) == errors.ENVIRONMENT
    assert capsys.readouterr().err == f"headwater: {MISSING}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_vllm")
def test_the_doctor_says_what_an_engine_lacks_also_when_it_is_an_override(
    tmp_path: Path, tiny_model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, tiny_model_path, 'kind = "hf"')
    assert "vllm" not in by_name(examine(file))
    arguments = ["doctor", file, "--set", "engine.kind=vllm", "--json"]
    assert main(arguments) == errors.ENVIRONMENT
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [c for c in checks if not c["ok"]] == [{"name": "vllm", "ok": False, "fix": MISSING}]


@pytest.mark.usefixtures("no_vllm")
def test_engines_that_run_elsewhere_need_no_vllm_here(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    file = written(tmp_path, tiny_model_path, 'kind = "vllm"\nurls = ["http://10.0.0.7:8000"]')
    assert "vllm" not in by_name(examine(file))


@requires_vllm
def test_the_doctor_prepares_an_engine(tmp_path: Path, tiny_model_path: Path) -> None:
    checks = by_name(examine(written(tmp_path, tiny_model_path)))
    assert all(checks[name].ok for name in ("vllm", "engine", "engine memory")), checks


@requires_vllm
def test_the_doctor_counts_the_memory_of_all_engines(
    tmp_path: Path, tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_checks, "refusal", lambda folder, source: None)
    file = written(tmp_path, tiny_model_path)
    options = "engine.options.kv_cache_memory_bytes=1_000_000_000_000"
    check = by_name(examine(file, [options, "engine.count=9"]))["engine memory"]
    assert not check.ok
    assert "about 8390.9 GiB" in check.fix  # 9 caches of 10^12 bytes, and 1 GiB each


@requires_vllm
def test_a_temperature_that_vllm_would_change_is_found_before_the_start(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    source = [written(tmp_path, tiny_model_path), "sampling.temperature=0.005"]
    said = vllm_checks.refusal(tiny_model_path, source)
    assert said is not None
    assert said.startswith("sampling.temperature: ")


@requires_vllm
def test_the_doctor_names_a_head_size_that_the_cpu_build_cannot_serve(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    check = by_name(examine(written(tmp_path, tmp_path / "model")))["engine"]
    assert not check.ok
    assert "this model's have 16" in check.fix
