"""A run's configuration: one TOML file, parsed once; unknown keys are refused with the nearest one.

`load(path, overrides)` -> `Config`; every problem is a `ConfigError` of one line naming the key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from connectors.algorithms import ESTIMATORS, LOSSES, estimator
from connectors.config import live
from connectors.config.log import Broker, Kafka, KafkaSecurity
from connectors.config.nearline import Gateway, Nearline, TaskFeedback
from connectors.config.section import MOST_STEPS, MOST_TOKENS, YEAR_S, ConfigError, Section
from connectors.config.trainer import Overlong, Source, Trainer

__all__ = [
    "Broker",
    "Checkpoint",
    "Config",
    "ConfigError",
    "EngineSection",
    "Eval",
    "Gateway",
    "Kafka",
    "KafkaSecurity",
    "Model",
    "Nearline",
    "Overlong",
    "Rollout",
    "Run",
    "SamplingSection",
    "Section",
    "Source",
    "Staleness",
    "Task",
    "TaskFeedback",
    "Trainer",
    "load",
    "parse",
]  # fmt: skip


class Run(Section):
    name: str = "run"
    """Names the run; its folder is `runs/NAME` unless `dir` or --run-dir says otherwise."""
    dir: str | None = None
    seed: int = 0
    namespace: str = "headwater."
    """Prefixes every topic, so that several runs share one broker."""
    launcher: Literal["local", "ray"] = "local"


class Model(Section):
    path: str
    """A Hugging Face model folder, or `package.module:function` (or `file.py:function`) that builds
    one into the folder it is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    context_tokens: int = Field(2048, ge=8, le=MOST_TOKENS)


def _engine_url(text: str) -> str:
    try:
        url = urlsplit(text)
        whole = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # brackets, or a port no machine has
        whole = False
    if not whole or url.query or url.fragment or any(map(str.isspace, text)):
        raise ValueError("should be http:// or https://, a host and, if need be, a port")
    return text


class EngineSection(Section):
    kind: Literal["hf", "vllm"] = "hf"
    count: int = Field(1, ge=1, le=10_000)
    max_running: int = Field(64, ge=1, le=65_536)
    """Sequences decoded together on one engine."""
    num_gpus: float = Field(0, ge=0, le=1024)
    urls: list[Annotated[str, AfterValidator(_engine_url)]] = Field([])
    """Engines started elsewhere; leave out for those this run starts."""
    options: dict[str, Any] = Field({})


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(64, ge=1, le=MOST_TOKENS)
    stop_ids: list[int] = Field([])
    """Empty: the tokenizer's end-of-sequence id (and the chat template's end-of-turn id)."""


class Task(Section):
    agent: str = "single_turn"
    """`single_turn`, `tool_loop`, or the user's own `module:function` or `file.py:function`."""
    reward: str
    """`exact_match`, `numeric_match`, `reasoning-gym`, `module:function` or `file.py:function`;
    `feedback`: of live traffic, what was said about it."""
    group_size: int = Field(8, ge=1, le=65_536)
    reward_timeout_s: float = Field(30.0, gt=0, le=YEAR_S)
    reward_retries: int = Field(2, ge=0, le=1000)
    prompts: str | None = None
    """A JSONL file or `reasoning-gym:NAME`; leave out when others produce into the topic."""
    repeat: bool = False
    """Start the file again at its end (the generator never ends)."""
    eval_prompts: str | None = None
    share: float = Field(1.0, gt=0)
    """Weight of this task among those with `prompts`."""
    feedback: TaskFeedback = TaskFeedback()
    """How live traffic of this task gets its label, where `reward` is `feedback`."""


class Staleness(Section):
    policy: str = "deadline"
    bound: int | None = Field(None, ge=0, le=10_000)
    """Steps that a trained token may be old: the parameter of `deadline` (4 if left out); of other
    policies it follows from theirs, and must be this."""
    lookahead: int | Literal["auto"] | None = None
    """Steps ahead that prompts are granted: of `deadline` (2 if left out, at most the bound; "auto"
    finds it while the run goes on) and `n-step-off`."""
    at_deadline: Literal["wait", "mask", "drop", "reweight"] | None = None
    """Of `deadline`: what becomes of a group that is not ready in time (`wait` if left out)."""
    time_cap_s: float | None = Field(None, gt=0, le=YEAR_S)
    """A group whose rollout takes longer is closed. It counts from when a worker takes the prompt
    up, through every requeue; not the time in which an outage holds up one of its requests."""
    parameters: dict[str, Any] = Field({})
    """Of the policy, under its own names."""


class Rollout(Section):
    inflight: Literal["keep", "slices", "restart"] = "keep"
    slice_tokens: int = Field(256, ge=1)
    oversample: int = Field(0, ge=0)


class Checkpoint(Section):
    url: str | None = None
    """A folder, or a URL of any fsspec file system (`s3://bucket/prefix`); leave out for
    `RUN/checkpoints`."""
    every_steps: int = Field(10, ge=1, le=MOST_STEPS)
    keep: int = Field(2, ge=1, le=1_000_000)
    """The newest ones stay."""
    keep_hours: float | None = Field(None, gt=0, le=1_000_000)
    """Younger ones stay, too."""
    trim_log: bool = False
    """Delete what the oldest kept checkpoint needs no more from `rollouts`, `trajectories` and
    `steps`, once there are `keep` of them, at least 2: then a damaged one is not the end."""
    options: dict[str, Any] = Field({})
    """For the URL's file system, beside its own configuration and environment (which are the better
    place for secrets), e.g. `endpoint_url`."""


class Eval(Section):
    every_versions: int = Field(0, ge=0, le=MOST_STEPS)
    """0 = never."""
    max_prompts: int = Field(128, ge=1, le=MOST_STEPS)
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    num_samples: int = Field(1, ge=1, le=65_536)
    """Of a prompt. One is greedy, more are drawn as `sampling` says."""
    pass_k: list[Annotated[int, Field(ge=1)]] = Field([])
    """Report pass@k for each of these, at most `num_samples`."""
    pass_reward: float = 1.0
    """A sample with this reward or a higher one passes."""

    @model_validator(mode="after")
    def _enough_samples(self) -> Eval:
        if (most := max(self.pass_k, default=0)) > self.num_samples:
            raise ValueError(
                f"pass_k: pass@{most} needs num_samples of at least {most}, got {self.num_samples}"
            )
        return self


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
    gateway: Gateway | None = None
    """An OpenAI-compatible server in front of the engines, which records what it serves."""
    nearline: Nearline | None = None
    """Live traffic becomes training data."""

    base_dir: str = Field("", exclude=True)
    """Folder of the file: relative paths in it start there. Set by `load`, no key of the file."""

    def resolve(self, path: str) -> Path:
        """`path` of this configuration, relative to the file's folder."""
        return Path(self.base_dir, path).expanduser()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.kafka.bootstrap_servers is None and not self.broker.embedded:
            raise ValueError("kafka.bootstrap_servers is needed when broker.embedded = false")
        if (problem := self.kafka.security.problem() or self._embedded_security()) is not None:
            raise ValueError(f"kafka.security: {problem}")
        if self.checkpoint.trim_log and self.checkpoint.keep < 2:
            raise ValueError("checkpoint.trim_log needs checkpoint.keep of at least 2, got 1")
        if self.broker.tls_key is not None and self.broker.tls_cert is None:
            raise ValueError("broker.tls_key needs broker.tls_cert")
        for key, (only, value) in self._single_choices().items():
            if value != only:
                raise ValueError(f"{key}: only {only!r} is available yet, got {value!r}")
        if (problem := self.trainer.problem()) is not None:
            raise ValueError(f"trainer.{problem}")
        budget, longest = self.trainer.max_tokens_per_microbatch, self.model.context_tokens
        if budget != "auto" and budget < longest:
            raise ValueError(
                f"trainer.max_tokens_per_microbatch: a trajectory may have {longest} tokens "
                f"(model.context_tokens), so it must be at least that, got {budget}"
            )
        if self.model.dtype != "float32" and self.trainer.zero_stage == 0:
            raise ValueError(
                f"trainer.zero_stage: 0 trains in float32 only, got model.dtype {self.model.dtype} "
                "(DeepSpeed would add gradients up in it); from 1 on they are added up in float32"
            )
        chosen = estimator(self.trainer.advantage, self.trainer.advantage_parameters)
        if (problem := live.problem(self, chosen)) is not None:
            raise ValueError(problem)
        for name, task in self.tasks.items():
            if chosen.needs_group and task.group_size < 2:
                raise ValueError(
                    f"tasks.{name}.group_size: {self.trainer.advantage} compares the trajectories "
                    f"of a group, so it needs at least 2, got {task.group_size}"
                )
        return self

    def _embedded_security(self) -> str | None:
        """How a run's own clients would miss its own broker."""
        broker, security = self.broker, self.kafka.security
        if self.kafka.bootstrap_servers is not None:
            return None
        for key, served, asked in (
            ("tls_cert", broker.tls_cert is not None, security.tls),
            ("users", broker.users is not None, security.sasl),
        ):
            if served != asked:
                return (
                    f"security_protocol = {security.security_protocol} does not go with the "
                    f"embedded broker, which has {'a' if served else 'no'} broker.{key}"
                )
        return None

    def _single_choices(self) -> dict[str, tuple[Any, Any]]:
        """Keys that have their name and one value; refusing the others beats ignoring them."""
        return {
            "run.launcher": ("local", self.run.launcher),
            "rollout.inflight": ("keep", self.rollout.inflight),
            "rollout.slice_tokens": (256, self.rollout.slice_tokens),
            "rollout.oversample": (0, self.rollout.oversample),
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
    others = {_place(p["loc"]) for p in problems} - {_place(first["loc"])}
    where = ".".join(map(str, _place(first["loc"])))
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "extra_forbidden":
        return f"unknown key {where}{_nearest(first['loc'])}{more}"
    if first["type"] == "missing":
        return f"{where} is required{more}"
    rule = _rule([p["msg"] for p in problems if _place(p["loc"]) == _place(first["loc"])])
    if not where or ", got " in rule or first["loc"][-1] == "sasl_password":
        return f"{where and where + ': '}{rule}{more}"
    return f"{where}: {rule}, got {first['input']!r}{more}"


def _rule(messages: Sequence[str]) -> str:
    """Of a key that takes values of several kinds there is a message for each kind."""
    rules = dict.fromkeys(m.removeprefix("Value error, ") for m in messages)
    first, *others = (rule[:1].lower() + rule[1:] for rule in rules)
    return " or ".join([first, *(rule.removeprefix("input should be ") for rule in others)])


def _place(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Of a key that takes values of several kinds, without the kind that was tried."""
    last = str(location[-1]) if location else ""
    is_kind = last in ("int", "float", "str") or last.startswith(
        ("literal[", "constrained-", "list[", "tuple[")
    )
    return location[:-1] if is_kind else location


def _nearest(location: tuple[int | str, ...]) -> str:
    """', did you mean X?' for the key that is closest among its section's keys."""
    section: Any = Config
    for part in location[:-1]:
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break
        if str(part) in section.model_fields:
            kind = section.model_fields[str(part)].annotation
            kinds = get_args(kind) or (kind,)  # of what may be left out, or a task's, by name
            section = next(
                (k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None
            )
    if section is Trainer and (tables := _tables_with(str(location[-1]))):
        return f", is it of {' or '.join(tables)}?"
    if tables := _sections_with(str(location[-1])):
        return f", is it {' or '.join(tables)}?"
    known = [k for k in getattr(section, "model_fields", {}) if k != "base_dir"]
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
    return f", did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"


def _sections_with(key: str) -> list[str]:
    """The keys of that name in the configuration's sections."""
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    return [
        f"{name}.{key}"
        for name, kind in sections.items()
        if isinstance(kind, type) and issubclass(kind, Section) and key in kind.model_fields
    ]


def _tables_with(name: str) -> list[str]:
    """The tables of `[trainer]` in which some algorithm has a parameter of that name."""
    of_advantages = (key for one in ESTIMATORS.values() for key in (*one.parameters, *one.tracker))
    of_losses = (key for one in LOSSES.values() for key in one.parameters)
    tables = {"advantage_parameters": of_advantages, "loss_parameters": of_losses}
    return [table for table, keys in tables.items() if name in keys]
