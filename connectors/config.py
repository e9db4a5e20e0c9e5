"""A run's configuration: one TOML file, parsed once; unknown keys are refused with the nearest one.

`load(path, overrides)` -> `Config`; every problem is a `ConfigError` of one line naming the key."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from connectors.algorithms import (
    KL,
    Advantage,
    Aggregation,
    Correction,
    Level,
    Loss,
    Proximal,
    Rejection,
    estimator,
    policy_loss,
)


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line: where, the rule, the value got."""


_MOST_TOKENS: Final = 10_000_000
"""Of a sequence: no model has a longer context."""
_MOST_STEPS: Final = 10**9
_YEAR_S: Final = 365 * 24 * 3600


class Section(BaseModel):
    """Strict: a flag or a string is no number. An integer is one, where a float is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class Run(Section):
    name: str = "run"
    """Names the run; its folder is `runs/NAME` unless `dir` or --run-dir says otherwise."""
    dir: str | None = None
    seed: int = 0
    namespace: str = "headwater."
    """Prefixes every topic, so that several runs share one broker."""
    launcher: Literal["local", "ray"] = "local"


class KafkaSecurity(Section):
    """How every role and command proves itself to the log, and the log to them."""

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ssl_cafile: str | None = None
    """PEM of who signed the brokers' certificates; leave out to trust whom this machine trusts."""
    ssl_certfile: str | None = None
    """PEM of a client's certificate, where the brokers ask for one."""
    ssl_keyfile: str | None = None
    """Of ssl_certfile; leave out if that file holds it too."""
    ssl_check_hostname: bool = True
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: str | None = Field(None, repr=False)
    """Is copied into the run's config.toml, which then only its owner can read."""
    sasl_password_file: str | None = None
    """Its first line is the password. Without either, HEADWATER_SASL_PASSWORD in the environment
    is."""

    @property
    def tls(self) -> bool:
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def sasl(self) -> bool:
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    def problem(self) -> str | None:
        """What does not go together, by key; the values may be secret."""
        for key, field in type(self).model_fields.items():
            if key == "security_protocol" or getattr(self, key) == field.default:
                continue
            needed = "SSL" if key.startswith("ssl_") else "SASL_PLAINTEXT"
            if not (self.tls if needed == "SSL" else self.sasl):
                return (
                    f"{key} needs security_protocol = {needed} or SASL_SSL, got "
                    f"{self.security_protocol}"
                )
        for key in ("sasl_mechanism", "sasl_username"):
            if self.sasl and not getattr(self, key):
                return f"security_protocol = {self.security_protocol} needs {key}"
        if self.sasl_password is not None and self.sasl_password_file is not None:
            return "sasl_password and sasl_password_file: one of them is enough"
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            return "ssl_keyfile needs ssl_certfile"
        return None


class Kafka(Section):
    bootstrap_servers: str | None = None
    """host:port of an Apache Kafka; leave out to use the embedded broker."""
    partitions: int = Field(2, ge=1, le=1024)
    max_message_bytes: int = Field(64 << 20, ge=1 << 16, le=(1 << 31) - 1)
    security: KafkaSecurity = KafkaSecurity()


class Broker(Section):
    embedded: bool = True
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free port at the first start and keeps it for the run."""
    data_dir: str | None = None
    fsync: Literal["always", "never"] = "never"
    """`never` survives kill -9 of the broker; `always` survives power loss too."""
    tls_cert: str | None = None
    """PEM; with it the broker serves over TLS only."""
    tls_key: str | None = None
    """Of tls_cert; leave out if that file holds it too."""
    users: str | None = None
    """Who may connect, a file: `python -m connectors.broker users add NAME --file F` writes it."""


class Model(Section):
    path: str
    """A Hugging Face model folder, or `package.module:function` (or `file.py:function`) that builds
    one into the folder it is given."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    context_tokens: int = Field(2048, ge=8, le=_MOST_TOKENS)


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
    urls: list[Annotated[str, AfterValidator(_engine_url)]] = []
    """Engines started elsewhere; leave out for those this run starts."""
    options: dict[str, Any] = {}


class SamplingSection(Section):
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(64, ge=1, le=_MOST_TOKENS)
    stop_ids: list[int] = []
    """Empty: the tokenizer's end-of-sequence id (and the chat template's end-of-turn id)."""


class Task(Section):
    agent: str = "single_turn"
    """`single_turn`, `tool_loop`, or the user's own `module:function` or `file.py:function`."""
    reward: str
    """`exact_match`, `numeric_match`, `reasoning-gym`, `module:function` or `file.py:function`."""
    group_size: int = Field(8, ge=1, le=65_536)
    reward_timeout_s: float = Field(30.0, gt=0, le=_YEAR_S)
    reward_retries: int = Field(2, ge=0, le=1000)
    prompts: str | None = None
    """A JSONL file or `reasoning-gym:NAME`; leave out when others produce into the topic."""
    repeat: bool = False
    """Start the file again at its end (the generator never ends)."""
    eval_prompts: str | None = None
    share: float = Field(1.0, gt=0)
    """Weight of this task among those with `prompts`."""


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
    time_cap_s: float | None = Field(None, gt=0, le=_YEAR_S)
    """A group whose rollout takes longer is closed. It counts from when a worker takes the prompt
    up, through every requeue; not the time in which an outage holds up one of its requests."""
    parameters: dict[str, Any] = {}
    """Of the policy, under its own names."""


class Rollout(Section):
    inflight: Literal["keep", "slices", "restart"] = "keep"
    slice_tokens: int = Field(256, ge=1)
    oversample: int = Field(0, ge=0)


class Source(Section):
    """Of a shadow trainer: the log of the run it follows. `headwater shadow` writes it."""

    run: str
    """That run's folder; its broker serves both."""
    grants: str
    """Namespace of the `policy` whose grants give the order of the groups."""
    namespace: str
    """Namespace of the `trajectories` it trains on."""
    starts: list[int]
    """First offset it reads, by partition."""
    ends: list[int] = []
    """Where some of what was granted is not in `trajectories`: a prompt below `limits` that has no
    terminal below `ends` is passed over."""
    limits: list[int] = []


class Overlong(Section):
    """DAPO's soft punishment of long samples: their reward falls linearly over the last `buffer`
    tokens below `max_length`, by `penalty` there and beyond."""

    max_length: int = Field(ge=1, le=_MOST_TOKENS)
    """Generated tokens of a sample, over all its turns and branches."""
    buffer: int = Field(ge=1, le=_MOST_TOKENS)
    penalty: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _within(self) -> Overlong:
        if self.buffer > self.max_length:
            raise ValueError(
                f"buffer must be at most max_length ({self.max_length}), got {self.buffer}"
            )
        return self


class Trainer(Section):
    num_ranks: int = Field(1, ge=1)
    num_gpus: float = Field(0, ge=0, le=1024)
    zero_stage: Literal[0, 1, 2, 3] = 1
    groups_per_step: int = Field(8, ge=1, le=1_000_000)
    learning_rate: float = Field(1e-6, ge=0)
    num_steps: int = Field(100, ge=1, le=_MOST_STEPS)
    advantage: Advantage = "grpo"
    advantage_parameters: dict[str, Any] = {}
    """Of the advantage, under its own names; of `spo` those of the values it tracks."""
    credit: Literal["sample", "turn"] = "sample"
    """What one advantage is given to: a whole `sample`, or each `turn` the policy took in it, by
    what it and the turns after it earned."""
    discount: float = Field(1.0, ge=0, le=1)
    """Of what later turns earned, a turn, with credit = "turn"."""
    filter_groups: bool = False
    """Drop a group as `filtered`, when it arrives, where all its advantages are 0: it would take a
    place in a step and teach nothing. Its prompt is replaced by the next one."""
    overlong: Overlong | None = None
    """Punish long samples; leave out to reward them as the task does."""
    loss: Loss = "ppo"
    loss_parameters: dict[str, Any] = {}
    """Of the loss, under its own names."""
    aggregation: Aggregation = "token-mean"
    """How the losses of a step's tokens become one."""
    num_minibatches: int = Field(1, ge=1, le=1024)
    """Optimizer steps a step: its groups, in order, are cut into so many parts."""
    proximal: Proximal = "reuse"
    """What the loss's ratio is measured from, and r below: the policy at the step's start
    (`reuse`, the forward's own log-probs, with one optimizer step; `recompute`, a forward before
    the first of several), `loglinear` between it and the one that sampled, by age, or that
    `behaviour` itself (then r is 1)."""
    aggregation_constant: float = Field(1.0, gt=0)
    """Of `constant-norm`: what the sum over a sample's tokens is divided by, such as the longest
    sample allowed."""
    correction: Correction = "tis"
    """Of r = exp(prox - behaviour), the weight of a token's loss. `tis`: min(r, cap); `icepop`: r
    from low to cap, else 0; `mis`: the token's own r where r at the level is, else 0; `none`: 1."""
    correction_level: Level = "token"
    """Of r: a token's, the product over its `sequence` or the `geometric` mean over it."""
    correction_low: float = Field(0.5, ge=0)
    correction_cap: float = Field(2.0, gt=0)
    rejection: Rejection = "none"
    """Tokens that leave the loss: r outside low to high (`k1`), (log r)^2 / 2 (`k2`) or r - 1 -
    log r (`k3`) above high, of a token or added up or averaged as the level says."""
    rejection_level: Level = "sequence"
    rejection_low: float = Field(0.5, ge=0)
    rejection_high: float = Field(2.0, gt=0)
    entropy_coefficient: float = Field(0.0, ge=0)
    """Of the mean entropy, which is taken off the loss."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Of the KL to the initial model, which is added to the loss."""
    kl: KL = "k3"
    """How that KL is estimated a token."""
    gap_alert: float = Field(0.1, ge=0, le=1)
    """Share of tokens whose probabilities the trainer and the engine put more than 10% apart, above
    which a step is an alert."""
    max_grad_norm: float = Field(1.0, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_tokens_per_microbatch: int = Field(8192, ge=1, le=10 * _MOST_TOKENS)
    num_threads: int = Field(1, ge=1, le=1024)
    """CPU threads of the trainer; bits depend on it, so it is recorded in every manifest."""
    source: Source | None = None
    publish_timeout_s: float = Field(60.0, gt=0, le=_YEAR_S)
    publish_through: Literal["auto", "memory", "group"] = "auto"
    """How engines get weights: `memory`, which processes of one host share; `group`, a broadcast
    over gloo or NCCL; `auto`: memory where it can be shared, the group elsewhere."""

    def problem(self) -> str | None:
        """What does not go together in the mathematics, by key."""
        if (problem := self._credit_problem()) is not None:
            return problem
        try:
            loss = policy_loss(self.loss, self.loss_parameters)
        except ValueError as error:
            return f"loss_parameters: {error}"
        for key in ("correction", "rejection"):
            if not loss.corrected and (found := getattr(self, key)) != "none":
                return f"{key}: {self.loss} takes only 'none', got {found!r}"
        if (most := self.groups_per_step) < self.num_minibatches:
            return f"num_minibatches: must be at most groups_per_step ({most}), got " + str(
                self.num_minibatches
            )
        reads = loss.reads_proximal or (self.correction, self.rejection) != ("none", "none")
        if self.num_minibatches > 1 and self.proximal == "reuse" and reads:
            return (
                "proximal: 'reuse' is the policy at the step's start only while num_minibatches is "
                f"1; with {self.num_minibatches} choose recompute, loglinear or behaviour"
            )
        for kind, low, high in (
            (self.correction in ("icepop", "mis"), "correction_low", "correction_cap"),
            (self.rejection == "k1", "rejection_low", "rejection_high"),
        ):
            if kind and getattr(self, low) > getattr(self, high):
                return f"{low}: must be at most {high} ({getattr(self, high)}), got " + str(
                    getattr(self, low)
                )
        return None

    def _credit_problem(self) -> str | None:
        name = self.advantage
        try:
            chosen = estimator(name, self.advantage_parameters)
        except ValueError as error:
            return f"advantage_parameters: {error}"
        if self.credit == "turn" and chosen.per_token:
            return f"credit: {name} credits each token, so it takes only 'sample', got 'turn'"
        if self.discount != 1 and self.credit != "turn":
            return f"discount: is of turns and needs credit = 'turn', got {self.discount}"
        if self.filter_groups and (chosen.whitens or chosen.needs_value):
            return (
                f"filter_groups: the advantages of {name} are relative to the step, so no group "
                "tells by itself whether it carries a signal"
            )
        if self.overlong is not None and chosen.least > -math.inf:
            return (
                f"overlong: {name} needs rewards of at least {chosen.least:g}, and a penalty may "
                "bring them below"
            )
        return None


class Checkpoint(Section):
    url: str | None = None
    """A folder, or a URL of any fsspec file system (`s3://bucket/prefix`); leave out for
    `RUN/checkpoints`."""
    every_steps: int = Field(10, ge=1, le=_MOST_STEPS)
    keep: int = Field(2, ge=1, le=1_000_000)
    """The newest ones stay."""
    keep_hours: float | None = Field(None, gt=0, le=1_000_000)
    """Younger ones stay, too."""
    trim_log: bool = False
    """Delete what the oldest kept checkpoint needs no more from `rollouts`, `trajectories` and
    `steps`, once there are `keep` of them, at least 2: then a damaged one is not the end."""
    options: dict[str, Any] = {}
    """For the URL's file system, beside its own configuration and environment (which are the better
    place for secrets), e.g. `endpoint_url`."""


class Eval(Section):
    every_versions: int = Field(0, ge=0, le=_MOST_STEPS)
    """0 = never."""
    max_prompts: int = Field(128, ge=1, le=_MOST_STEPS)
    max_tokens: int | None = Field(None, ge=1, le=_MOST_TOKENS)
    num_samples: int = Field(1, ge=1, le=65_536)
    """Of a prompt. One is greedy, more are drawn as `sampling` says."""
    pass_k: list[Annotated[int, Field(ge=1)]] = []
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
        chosen = estimator(self.trainer.advantage, self.trainer.advantage_parameters)
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
    if not where or first["loc"][-1] == "sasl_password":
        return f"{where and where + ': '}{rule}{more}"
    return f"{where}: {rule}, got {first['input']!r}{more}"


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
    known = [k for k in getattr(section, "model_fields", {}) if k != "base_dir"]
    close = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
    return f", did you mean {close[0]}?" if close else f"; known here: {', '.join(known)}"
