from pathlib import Path
from typing import Any

import pytest

from connectors.config import Config, ConfigError, load, parse

MINIMAL = '[model]\npath = "m"\n[tasks.a]\nreward = "exact_match"\n'


def config_file(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[trainer]\nlearning_rte = 1",
            "unknown key trainer.learning_rte, did you mean learning_rate?",
        ),
        ("[traner]\n", "unknown key traner, did you mean trainer?"),
        ("[trainer]\nclip_high = 0.3", "unknown key trainer.clip_high, is it of loss_parameters?"),
        ("[trainer]\nrho_max = 1", "unknown key trainer.rho_max, is it of advantage_parameters?"),
        ("[tasks.b]\nrewrd = 'x'", "unknown key tasks.b.rewrd, did you mean reward?"),
        ("[trainer]\nzero_stage = 7", "trainer.zero_stage: input should be 0, 1, 2 or 3, got 7"),
        (
            "[trainer]\nnum_ranks = 4\nsequence_parallel = 3",
            "trainer.sequence_parallel: must divide num_ranks (4), got 3",
        ),
        (
            "[trainer]\nnum_ranks = 2\nnum_gpus = 1",
            "trainer.num_gpus: one rank trains on one GPU, so 0 or 2, got 1",
        ),
        (
            "[trainer]\noffload = 'all'\nzero_stage = 2",
            "trainer.offload: 'all' needs zero_stage of at least 3, got 2",
        ),
        (
            "[trainer]\nnum_steps = 10\nwarmup_steps = 10",
            "trainer.warmup_steps: must be below num_steps (10), got 10",
        ),
        (
            "[trainer]\nmax_tokens_per_microbatch = 100",
            "a trajectory may have 2048 tokens (model.context_tokens), so it must be at least that",
        ),
        (
            "[trainer]\nmax_tokens_per_microbatch = 'most'",
            "trainer.max_tokens_per_microbatch: input should be 'auto'",
        ),
        (
            "[trainer]\nlora = {rank = 0}",
            "trainer.lora.rank: input should be greater than or equal to 1, got 0",
        ),
        (
            "[trainer]\nlora = {alpa = 1.0}",
            "unknown key trainer.lora.alpa, did you mean alpha?",
        ),
        (
            "[sampling]\ntemperature = 0",
            "sampling.temperature: input should be greater than 0, got 0",
        ),
        (
            "[broker]\nembedded = false",
            "kafka.bootstrap_servers is needed when broker.embedded = false",
        ),
        (
            "[eval]\nevery_versions = 'often'",
            "eval.every_versions: input should be a valid integer",
        ),
        ("base_dir = '/'", "unknown key base_dir"),
        (
            "[trainer]\nadvantage = 'grpoo'",
            "trainer.advantage: input should be 'grpo', 'dr-grpo',",
        ),
        (
            "[trainer]\nadvantage_parameters = {epsilom = 1.0}",
            "advantage_parameters: grpo: unknown parameter 'epsilom', did you mean 'epsilon'?",
        ),
        (
            "[trainer]\nadvantage = 'gpg'\nadvantage_parameters = {f_norm = 0}",
            "gpg: f_norm must be a finite number of at least 1e-06, got 0",
        ),
        (
            "[trainer]\nadvantage = 'spo'\nadvantage_parameters = {high = 1e-50}",
            "advantage_parameters: spo: low must be below high (1e-50), got 0.0",
        ),
        (
            "[trainer]\nadvantage = 'spo'\nadvantage_parameters = {half_live = 0.1}",
            "advantage_parameters: spo: unknown parameter 'half_live', did you mean 'half_life'?",
        ),
        (
            "[trainer]\nadvantage = 'spo'\nadvantage_parameters = {half_life = 0}",
            "advantage_parameters: spo: half_life must be a finite number above 0, got 0",
        ),
        (
            "[trainer]\nadvantage = 'spo'\nadvantage_parameters = {rho_min = 0.97}",
            "advantage_parameters: spo: rho_min must be at most rho_max (0.96), got 0.97",
        ),
        (
            "[trainer]\nadvantage = 'spo'\nadvantage_parameters = {low = 1}",
            "advantage_parameters: spo: low must be below high (1.0), got 1",
        ),
        (
            "[trainer]\nadvantage = 'reinforce++'\ncredit = 'turn'",
            "trainer.credit: reinforce++ credits each token, so it takes only 'sample', got 'turn'",
        ),
        (
            "[trainer]\nadvantage = 'spo'\ncredit = 'turn'",
            "trainer.credit: spo values whole samples, so it takes only 'sample', got 'turn'",
        ),
        (
            "[trainer.overlong]\nmax_length = 9\nbuffer = 2\npenalty = 2e12",
            "trainer.overlong.penalty: input should be less than or equal to 1000000000000",
        ),
        (
            "[trainer]\nnum_minibatches = 2",
            "trainer.proximal: 'reuse' is the policy at the step's start only while num_minibatch",
        ),
        (
            "[trainer]\nnum_minibatches = 2\nloss = 'reinforce'\ncorrection = 'none'\n"
            "rejection = 'k1'",
            "trainer.proximal: 'reuse' is the policy at the step's start only while num_minibatch",
        ),
        (
            "[trainer]\nkl_coefficient = -0.1",
            "trainer.kl_coefficient: input should be greater than or equal to 0, got -0.1",
        ),
        (
            "[trainer]\nnum_minibatches = 3\ngroups_per_step = 2\nproximal = 'recompute'",
            "trainer.num_minibatches: must be at most groups_per_step (2), got 3",
        ),
        (
            "[trainer]\ndiscount = 0.9",
            "trainer.discount: is of turns and needs credit = 'turn', got 0.9",
        ),
        (
            "[trainer]\ncredit = 'turn'\ndiscount = 1.1",
            "trainer.discount: input should be less than or equal to 1, got 1.1",
        ),
        (
            "[trainer.overlong]\nmax_length = 8\nbuffer = 9",
            "trainer.overlong: buffer must be at most max_length (8), got ",
        ),
        (
            "[trainer.overlong]\nmax_length = 8\nbufer = 9",
            "unknown key trainer.overlong.bufer, did you mean buffer?",
        ),
        (
            "[trainer]\nadvantage = 'maxrl'\noverlong = {max_length = 8, buffer = 4}",
            "trainer.overlong: maxrl needs rewards of at least 0, and a penalty may bring them bel",
        ),
        (
            "[trainer]\nlearning_rate = inf",
            "trainer.learning_rate: input should be a finite number",
        ),
        ("[staleness]\nbound = true", "staleness.bound: input should be a valid integer, got True"),
        ("[staleness]\nbound = '4'", "staleness.bound: input should be a valid integer, got '4'"),
        (
            "[staleness]\ntime_cap_s = true",
            "staleness.time_cap_s: input should be a valid number, got True",
        ),
        (
            "[trainer]\ngroups_per_step = 99999999999",
            "trainer.groups_per_step: input should be less than or equal to 1000000, got 999999",
        ),
        (
            "[engine]\ncount = 1000000",
            "engine.count: input should be less than or equal to 10000, got 1000000",
        ),
        (
            "[tasks.b]\nreward = 'x'\ngroup_size = 99999999",
            "tasks.b.group_size: input should be less than or equal to 65536, got 99999999",
        ),
        (
            "[trainer]\nmax_tokens_per_microbatch = 0",
            "max_tokens_per_microbatch: input should be 'auto' or greater than or equal to 1, got",
        ),
        (
            "[trainer.lora]\ntargets = 'q_proj'",
            "trainer.lora.targets: input should be 'all-linear' or a valid ",
        ),
        ("[trainer]\ndtype = 'bfloat16'", "unknown key trainer.dtype, is it model.dtype?"),
        ("[rollout]\noversample = 2", "rollout.oversample: only 0 is available yet, got 2"),
        (
            "[tasks.b]\nreward = 'x'\ngroup_size = 1",
            "tasks.b.group_size: grpo compares the trajectories of a group, so it needs at least 2",
        ),
    ],
)
def test_a_wrong_key_or_value_is_one_line_that_names_it(
    tmp_path: Path, text: str, message: str
) -> None:
    file = config_file(
        tmp_path,
        ("" if text.startswith("[") else text + "\n") + MINIMAL + text * text.startswith("["),
    )
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_count_has_a_limit_and_an_integer_is_a_number_too(tmp_path: Path) -> None:
    config = load(config_file(tmp_path, MINIMAL + "[staleness]\ntime_cap_s = 900\n"))
    assert config.staleness.time_cap_s == 900.0
    whole: dict[str, Any] = {"model": {"path": "m"}, "tasks": {"a": {"reward": "r"}}}
    for name, section in Config.model_fields.items():
        for key, field in getattr(section.annotation, "model_fields", {}).items():
            if field.annotation is int and key != "seed":
                table = {**whole, name: {**whole.get(name, {}), key: 10**30}}
                with pytest.raises(ConfigError, match=rf"{name}\.{key}: "):
                    parse(table, base_dir="")


def test_a_trimmed_log_hangs_on_more_than_one_checkpoint(tmp_path: Path) -> None:
    text = MINIMAL + "[checkpoint]\ntrim_log = true\nkeep = 1\n"
    with pytest.raises(ConfigError, match=r"trim_log needs checkpoint\.keep of at least 2, got 1"):
        load(config_file(tmp_path, text))


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "",
        "ftp://x",
        "http://",
        "http://:8000",
        "http://[bad",
        "http://h:99999999",
        "http://h:0",
        "http://h:x",
        "http://a b:1",
        "http://h:1?x=1",
    ],
)
def test_an_engine_url_that_names_no_engine_is_refused(tmp_path: Path, url: str) -> None:
    text = MINIMAL + f"[engine]\nurls = ['http://h:1', '{url}']"
    with pytest.raises(
        ConfigError, match=r"engine\.urls\.1: should be http:// or https://"
    ) as caught:
        load(config_file(tmp_path, text))
    assert f"got {url!r}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_engine_urls_are_of_any_host_and_may_have_a_port_and_a_path(tmp_path: Path) -> None:
    urls = ["http://127.0.0.1:8000", "https://engines.example/one/", "http://[::1]:8000"]
    config = parse(
        {"engine": {"urls": urls}, "model": {"path": "m"}, "tasks": {"a": {"reward": "x"}}},
        base_dir="",
    )
    assert config.engine.urls == urls


def test_a_task_without_reward_and_a_file_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks.a.reward is required"):
        parse({"model": {"path": "m"}, "tasks": {"a": {}}}, base_dir="")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is no TOML"):
        load(config_file(tmp_path, "= 3"))


def test_overrides_are_toml_values_or_plain_text(tmp_path: Path) -> None:
    config = load(
        config_file(tmp_path, MINIMAL),
        ["trainer.num_steps=7", "run.name=other", "tasks.a.repeat=true", "model.path=other"],
    )
    assert config.trainer.num_steps == 7
    assert config.run.name == "other"
    assert config.tasks["a"].repeat is True
    assert config.model.path == "other"
    with pytest.raises(ConfigError, match="is not key=value"):
        load(config_file(tmp_path, MINIMAL), ["trainer.num_steps"])
    with pytest.raises(ConfigError, match=r"unknown key trainer.num_stps, did you mean num_steps"):
        load(config_file(tmp_path, MINIMAL), ["trainer.num_stps=1"])


def test_relative_paths_start_at_the_files_folder(tmp_path: Path) -> None:
    config = load(config_file(tmp_path, MINIMAL))
    assert config.resolve(config.model.path) == tmp_path / "m"
    assert config.resolve("/abs") == Path("/abs")


@pytest.mark.parametrize(
    "lines",
    [
        "proximal = 'loglinear'",
        "loss = 'reinforce'\ncorrection = 'none'",
        "loss = 'imitation'\ncorrection = 'none'\nproximal = 'reuse'",
    ],
)
def test_several_optimizer_steps_go_with_what_is_not_measured_from_the_forward_s_own(
    tmp_path: Path, lines: str
) -> None:
    text = f"{MINIMAL}group_size = 2\n[trainer]\nnum_minibatches = 2\n{lines}\n"
    assert load(config_file(tmp_path, text)).trainer.num_minibatches == 2
