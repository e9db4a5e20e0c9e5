"""What keeps a `vllm` engine from starting is said in one line, before its processes start where
that can be known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connectors.config import ConfigError
from connectors.engines.types import EngineStartError
from connectors.engines.vllm import build
from connectors.engines.vllm.environment import CAUSE
from deploy.launcher import last_line
from tests.connectors.vllm_bench import config
from tests.deploy.command import command
from tests.models import tiny_model
from tests.vllm_gate import requires_vllm

pytestmark = pytest.mark.xdist_group("vllm")


def refused(settings: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        build(settings)
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


def test_without_vllm_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.engines.vllm.version.installed", lambda: None)
    line = refused(config(tmp_path), EngineStartError)
    assert "make vllm" in line
    assert ".[vllm]" in line


def test_another_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.engines.vllm.version.installed", lambda: ("vllm", "0.33.1"))
    assert "0.33.1" in refused(config(tmp_path), EngineStartError)


@requires_vllm
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enable_prefix_cachin": True}, "did you mean enable_prefix_caching?"),
        ({"max_model_len": 99}, "is set by model.context_tokens"),
        ({"logprobs_mode": "raw_logprobs"}, "is set by the engine"),
        ({"stall_s": -1}, "engine.options.stall_s"),
        ({"enable_prefix_caching": "banana"}, "enable_prefix_caching: Input should be a valid"),
        ({"max_num_batched_tokens": 4}, "max_num_batched_tokens: must be at least engine.max_run"),
        ({"kv_cache_memory_bytes": -5}, "kv_cache_memory_bytes: must be at least 1, got -5"),
        ({"hf_overrides": {"num_hidden_layers": 1}}, "engine.options.hf_overrides: could make the"),
        ({"load_format": "dummy"}, "engine.options.load_format: could make the"),
        ({"worker_cls": "x.Y"}, "engine.options.worker_cls: could make the"),
        ({"speculative_config": {"metho": "ngram"}}, "metho"),
        ({"speculative_config": {"method": "eagle", "num_speculative_tokens": 2}}, "refuses them"),
    ],
)
def test_a_wrong_option_is_named(tiny_model_path: Path, options: dict[str, Any], said: str) -> None:
    if "speculative_config" in options:
        options["speculative_config"].setdefault("model", str(tiny_model_path))
    assert said in refused(config(tiny_model_path, options=options), ConfigError)


@requires_vllm
def test_what_is_refused_as_another_model_is_known_to_vllm() -> None:
    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    from connectors.engines.vllm import options

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert options._ANOTHER_MODEL | set(options._AT_LEAST_ONE) <= known


@requires_vllm
def test_more_may_run_than_vllm_takes_tokens_in_a_step_by_default(tiny_model_path: Path) -> None:
    build(config(tiny_model_path, max_running=3000))


@requires_vllm
def test_drafts_with_probabilities_are_refused_where_our_log_probs_would_be_wrong(
    tiny_model_path: Path,
) -> None:
    drafts = {"method": "draft_model", "model": str(tiny_model_path), "num_speculative_tokens": 2}
    settings = config(tiny_model_path, options={"speculative_config": drafts})
    assert "'draft_model' would give log-probs that" in refused(settings, ConfigError)


@requires_vllm
def test_gpus_that_the_installed_build_does_not_see_are_refused(tiny_model_path: Path) -> None:
    assert "num_gpus = 1" in refused(config(tiny_model_path, num_gpus=1), EngineStartError)


@requires_vllm
def test_a_model_that_cannot_be_served_is_refused_with_its_folder(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert "has no config.json" in refused(settings, EngineStartError)
    (tmp_path / "config.json").write_text('{"model_type')
    assert str(tmp_path) in refused(settings, EngineStartError)
    (tmp_path / "config.json").write_text('{"model_type": "nobody-s"}')
    assert "nobody-s" in refused(settings, EngineStartError)


@requires_vllm
def test_attention_heads_that_vllm_does_not_know_on_cpu_are_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    model = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    model.architectures = ["Qwen2ForCausalLM"]
    model.save_pretrained(tmp_path)
    line = refused(config(tmp_path), EngineStartError)
    assert "have 16" in line
    assert "32, 64" in line


@requires_vllm
def test_the_context_is_no_longer_than_the_model(tmp_path: Path) -> None:
    decoder, _ = build(config(tiny_model(tmp_path / "tiny"), context_tokens=8000))
    assert decoder.context_tokens == 4096


@requires_vllm
@pytest.mark.parametrize(
    ("options", "damage", "said"),
    [
        pytest.param(
            "kv_cache_memory_bytes = 200000",
            False,
            "lower model.context_tokens",
            marks=pytest.mark.slow,
        ),
        ("", True, "any model weights"),
    ],
)
def test_what_ends_vllms_processes_at_their_start_is_the_last_line_of_the_log(
    tmp_path: Path, options: str, damage: bool, said: str
) -> None:
    model = tiny_model(tmp_path / "tiny")
    if damage:
        (model / "model.safetensors").unlink()
    (tmp_path / "config.toml").write_text(
        f'[model]\npath = "{model}"\n[engine]\nkind = "vllm"\noptions = {{ {options} }}\n'
        '[tasks.t]\nreward = "exact_match"\n'
    )
    log = tmp_path / "log"
    with log.open("wb") as file:
        code = subprocess.call(
            command("engine", tmp_path / "config.toml", "--run-dir", tmp_path / "run"),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    assert (code, said in last_line(log)) == (3, True), last_line(log)


@requires_vllm
def test_a_vllm_that_is_not_ours_is_left_as_it_is() -> None:
    program = (
        "from connectors.engines.vllm.plugin import register; register()\n"
        "from vllm.v1.sample.sampler import Sampler\n"
        "print(hasattr(Sampler.forward, 'of_headwater'))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER")}
    for mine, patched in ((environment, "False"), ({**environment, CAUSE: "/dev/null"}, "True")):
        done = subprocess.run(
            [sys.executable, "-c", program], env=mine, capture_output=True, text=True, check=True
        )
        assert done.stdout.split()[-1] == patched
