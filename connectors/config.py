"""A run's configuration: one TOML file, parsed once; unknown keys are refused with the nearest one.

`load(path, overrides)` -> `Config`; every problem is a `ConfigError` of one line naming the key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

GROUP_ESTIMATORS: Final = frozenset({"grpo"})
"""Advantages that compare the trajectories of one prompt."""


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line: where, the rule, the value got."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Run(Section):
    name: str = "run"
    """Names the run; its folder is `runs/NAME` unless `dir` or --run-dir says otherwise."""
    dir: str | None = None
    seed: int = 0
    namespace: str = "headwater."
    """Prefixes every topic, so that several runs share one broker."""
    launcher: Literal["local", "ray"] = "local"


class Kafka(Section):
    bootstrap_servers: str | None = None
    """host:port of an Apache Kafka; leave out to use the embedded broker."""
    partitions: int = Field(2, ge=1, le=1024)
    max_message_bytes: int = Field(64 << 20, ge=1 << 16)
    security: dict[str, str] = {}


class Broker(Section):
    embedded: bool = True
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free port at the first start and keeps it for the run."""
    data_dir: str | None = None
    fsync: Literal["always", "never"] = "never"
    """`never` survives kill -9 of the broker; `always` survives power loss too."""


class Model(Section):
    path: str
    """A Hugging Face model folder, or `package.module:function` (or `file.py:function`) that builds
    one into the folder it is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    context_tokens: int = Field(2048, ge=8)


class EngineSection(Section):
    kind: Literal["hf", "vllm"] = "hf"
    count: int = Field(1, ge=1)
    max_running: int = Field(64, ge=1)
    """Sequences decoded together on one engine."""
    num_gpus: float = Field(0, ge=0)
    urls: list[str] = []
    """Engines started elsewhere; leave out for those this run starts."""
    options: dict[str, Any] = {}


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(64, ge=1)
    stop_ids: list[int] = []
    """Empty: the tokenizer's end-of-sequence id (and the chat template's end-of-turn id)."""


class Task(Section):
    agent: str = "single_turn"
    """`single_turn`, `tool_loop`, or the user's own `module:function` or `file.py:function`."""
    reward: str
    """`exact_match`, `numeric_match`, `reasoning-gym`, `module:function` or `file.py:function`."""
    group_size: int = Field(8, ge=1)
    reward_timeout_s: float = Field(30.0, gt=0)
    reward_retries: int = Field(2, ge=0)
    prompts: str | None = None
    """A JSONL file or `reasoning-gym:NAME`; leave out when others produce into the topic."""
    repeat: bool = False
    """Start the file again at its end (the generator never ends)."""
    eval_prompts: str | None = None
    share: float = Field(1.0, gt=0)
    """Weight of this task among those with `prompts`."""


class Staleness(Section):
    policy: str = "n-step-off"
    bound: int | None = Field(None, ge=0)
    lookahead: int | Literal["auto"] = 1
    at_deadline: Literal["wait", "mask", "drop", "reweight"] = "wait"
    time_cap_s: float | None = Field(None, gt=0)
    parameters: dict[str, Any] = {}


class Rollout(Section):
    inflight: Literal["keep", "slices", "restart"] = "keep"
    slice_tokens: int = Field(256, ge=1)
    oversample: int = Field(0, ge=0)


class Trainer(Section):
    num_ranks: int = Field(1, ge=1)
    num_gpus: float = Field(0, ge=0)
    zero_stage: Literal[0, 1, 2, 3] = 1
    groups_per_step: int = Field(8, ge=1)
    learning_rate: float = Field(1e-6, ge=0)
    num_steps: int = Field(100, ge=1)
    advantage: Literal["grpo"] = "grpo"
    loss: Literal["ppo"] = "ppo"
    correction: Literal["tis", "none"] = "tis"
    """`tis`: weight each token by min(exp(prox - behaviour), cap); `none`."""
    correction_cap: float = Field(2.0, gt=0)
    clip_low: float = Field(0.2, gt=0)
    clip_high: float = Field(0.2, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_tokens_per_microbatch: int = Field(8192, ge=1)
    num_threads: int = Field(1, ge=1)
    """CPU threads of the trainer; bits depend on it, so it is recorded in every manifest."""
    publish_timeout_s: float = Field(60.0, gt=0)


class Checkpoint(Section):
    url: str | None = None
    """Leave out for `RUN/checkpoints`."""
    every_steps: int = Field(10, ge=1)
    keep: int = Field(2, ge=1)


class Eval(Section):
    every_versions: int = Field(0, ge=0)
    """0 = never."""
    max_prompts: int = Field(128, ge=1)
    max_tokens: int | None = Field(None, ge=1)


class Config(Section):
    run: Run = Run()
    kafka: Kafka = Kafka()
    broker: Broker = Broker()
    model: Model
    engine: EngineSection = EngineSection()
    sampling: SamplingSection = SamplingSection()
    tasks: dict[str, Task] = Field(min_length=1)
    staleness: Staleness = Staleness()
    rollout: Rollout = Rollout()
    trainer: Trainer = Trainer()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()

    base_dir: str = Field("", exclude=True)
    """Folder of the file: relative paths in it start there. Set by `load`, no key of the file."""

    def resolve(self, path: str) -> Path:
        """`path` of this configuration, relative to the file's folder."""
        return Path(self.base_dir, path).expanduser()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.kafka.bootstrap_servers is None and not self.broker.embedded:
            raise ValueError("kafka.bootstrap_servers is needed when broker.embedded = false")
        for key, (only, value) in self._single_choices().items():
            if value != only:
                raise ValueError(f"{key}: only {only!r} is available yet, got {value!r}")
        for name, task in self.tasks.items():
            if self.trainer.advantage in GROUP_ESTIMATORS and task.group_size < 2:
                raise ValueError(
                    f"tasks.{name}.group_size: {self.trainer.advantage} compares the trajectories "
                    f"of a group, so it needs at least 2, got {task.group_size}"
                )
        return self

    def _single_choices(self) -> dict[str, tuple[Any, Any]]:
        """Keys that have their name and one value; refusing the others beats ignoring them."""
        return {
            "run.launcher": ("local", self.run.launcher),
            "engine.kind": ("hf", self.engine.kind),
            "staleness.at_deadline": ("wait", self.staleness.at_deadline),
            "rollout.inflight": ("keep", self.rollout.inflight),
            "rollout.slice_tokens": (256, self.rollout.slice_tokens),
            "rollout.oversample": (0, self.rollout.oversample),
            "trainer.num_ranks": (1, self.trainer.num_ranks),
            "trainer.zero_stage": (1, self.trainer.zero_stage),
        }


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads `path`, applies `key=value` overrides (dotted key, TOML value, bare text is a string)
    and returns a valid Config; ConfigError otherwise."""
    file = Path(path)
    try:
        table = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is no TOML: {error}") from error
    for override in overrides:
        _override(table, override)
    return parse(table, base_dir=str(file.resolve().parent), where=str(file))


def parse(table: dict[str, Any], *, base_dir: str, where: str = "config") -> Config:
    """A Config from a parsed table; ConfigError otherwise."""
    if "base_dir" in table:
        raise ConfigError(f"{where}: unknown key base_dir")
    try:
        return Config(**table, base_dir=base_dir)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + _one_line(error)) from error


def _override(table: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"--set {override}: is not key=value")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = key.strip().split(".")
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {parent} is no section")
    table[last] = value


def _one_line(error: ValidationError) -> str:
    problems = error.errors()
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {where}{_nearest(first['loc'])}{more}"
    if first["type"] == "missing":
        return f"{where} is required{more}"
    rule = first["msg"].removeprefix("Value error, ")
    rule = rule[:1].lower() + rule[1:]
    if not where:
        return f"{rule}{more}"
    return f"{where}: {rule}, got {first['input']!r}{more}"


def _nearest(location: tuple[int | str, ...]) -> str:
    """', did you mean X?' for the key that is closest among its section's keys."""
    section: Any = Config
    for part in location[:-1]:
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break
        if str(part) in section.model_fields:
            kind = section.model_fields[str(part)].annotation
            section = Task if kind == dict[str, Task] else kind
    known = [k for k in getattr(section, "model_fields", {}) if k != "base_dir"]
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
    return f", did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"
