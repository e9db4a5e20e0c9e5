"""What `headwater run` keeps in a run's folder before any role starts, and how it is read back.

    RUN/run.lock       held while a supervisor lives: one `run` a folder
    RUN/config.toml    the configuration every role reads: overrides applied, absolute paths, the
                       broker's port fixed, a model that is built replaced by its folder; its
                       owner's alone if kafka.security.sasl_password is in it
    RUN/source.json    the folder the user's own modules are found in, and what built the model
    RUN/model/         the built model, if model.path names a function

`prepare` writes them for a new run. For an existing one it resumes: a changed configuration is
taken over, except for keys on which the log already depends.
"""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from connectors import plugins
from connectors.arrow import checksum
from connectors.config import Config, ConfigError, load, parse
from connectors.files import FileLock, Locked, replace_file
from connectors.prompt_lines import GENERATOR_PREFIX
from connectors.run_dir import RunDir
from deploy.errors import EnvironmentFailure
from deploy.model import build
from operators import agents, labels, rewards
from trainer.staleness import configured_policy

LOCK: Final = "run.lock"
_MODEL_SUFFIXES: Final = (".json", ".jinja", ".txt", ".model")
_FIXED: Final = (
    "run.namespace",
    "kafka.partitions",
    "broker.data_dir",
    "model.path",
    "model.dtype",
    "trainer.groups_per_step",
    "trainer.num_ranks",
    "trainer.zero_stage",
    "sampling.temperature",  # of the behaviour log-probs in flight
    "nearline.share",
)
"""The log's records, and the checkpoints, are only readable with these and those of
`[trainer.lora]`. So are the keys of `[staleness]`, by which granted groups were bounded, but for
the time cap; `nearline.share` says, as `trainer.groups_per_step` does, how many were granted."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """`folder`: where the user's file lay. `model`: the `module:function` that built RUN/model.
    `model_files`: checksums of what says how the weights are used."""

    folder: str
    model: str | None = None
    model_files: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`config` as the roles see it; `changes` lists what differs from the run's earlier start."""

    config: Config
    resumed: bool
    changes: tuple[str, ...] = ()


def load_run(run_dir: RunDir) -> Config:
    """The configuration kept in a run's folder; ConfigError when it holds no run."""
    if not run_dir.config_file.is_file():
        raise ConfigError(f"{run_dir.path}: is no run's folder (it has no config.toml)")
    return with_source(load(run_dir.config_file), run_dir)


def with_source(config: Config, run_dir: RunDir) -> Config:
    """`config`, read from `run_dir`, finding the user's modules where the user's own file lay."""
    source = _read_source(run_dir)
    return config if source is None else config.model_copy(update={"base_dir": source.folder})


@contextmanager
def locked(run_dir: RunDir) -> Iterator[None]:
    """Holds the run's lock; EnvironmentFailure when another `headwater run` does. It ends
    with this process, however that ends."""
    try:
        run_dir.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(f"{run_dir.path} cannot be made: {error.strerror}") from error
    try:
        lock = FileLock(run_dir.path / LOCK)
    except Locked as error:
        raise EnvironmentFailure(
            f"{run_dir.path} is locked: `headwater run` is at work in it (pid {error.pid})"
        ) from error
    with closing(lock):
        yield


def prepare(
    config: Config, run_dir: RunDir, say: Callable[[str], object] = lambda line: None
) -> Prepared:
    """Writes the files above, with the lock held; `say` hears what may take a while. ConfigError
    when the log depends on a changed key or a file the configuration names is missing;
    EnvironmentFailure for a taken port or a missing model."""
    check_files(config)
    configured_policy(config)
    resumed = run_dir.config_file.is_file()
    run_dir.path.mkdir(parents=True, exist_ok=True)
    source = _source(config, run_dir)
    table = _table(config, run_dir, load(run_dir.config_file) if resumed else None)
    changes: tuple[str, ...] = ()
    if resumed:
        changes = _changes(run_dir, table, source)
    if config.kafka.bootstrap_servers is None:
        check_port(table["broker"]["port"])
    prepared = parse(table, base_dir=config.base_dir, where=str(run_dir.config_file))
    if source.model is not None and not (resumed and (run_dir.path / "model").is_dir()):
        say(f"building the model ({run_dir.log_file('model')} says how far it is)")
        build(source.model, source.folder, run_dir)
    source = msgspec.structs.replace(source, model_files=_model_files(run_dir, table))
    replace_file(run_dir.path / "source.json", msgspec.json.encode(source))
    write_config(run_dir, tomli_w.dumps(table).encode())
    return Prepared(config=prepared, resumed=resumed, changes=changes)


def retake(config: Config, run_dir: RunDir) -> tuple[str, ...]:
    """Takes a changed configuration over into a run's folder, as resuming it would, while the run
    may be at work: its roles see it when they start. 'key: old -> new' for what differs.
    ConfigError and EnvironmentFailure as `prepare`."""
    check_files(config)
    configured_policy(config)
    table = _table(config, run_dir, load(run_dir.config_file))
    changes = _changes(run_dir, table, _source(config, run_dir))
    parse(table, base_dir=config.base_dir, where=str(run_dir.config_file))
    write_config(run_dir, tomli_w.dumps(table).encode())
    return changes


def write_config(run_dir: RunDir, content: bytes) -> None:
    """RUN/config.toml, for its owner alone if a password is in it."""
    secret = "sasl_password" in tomllib.loads(content.decode())["kafka"]["security"]
    replace_file(run_dir.config_file, content, mode=0o600 if secret else 0o666)


def check_port(port: int) -> None:
    """EnvironmentFailure when `port` of the loopback interface is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvironmentFailure(
                f"broker.port: port {port} is taken by another process ({error.strerror})"
            ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _table(config: Config, run_dir: RunDir, before: Config | None) -> dict[str, Any]:
    """The configuration as every role is to read it."""
    table = config.model_dump(exclude_none=True)
    table["run"]["dir"] = str(run_dir.path)
    built = _builder(config) is not None
    table["model"]["path"] = str(
        run_dir.path / "model" if built else _absolute(config, config.model.path)
    )
    if not config.broker.port:
        table["broker"]["port"] = (before and before.broker.port) or _free_port()
    for section, keys in (
        (table["broker"], ("data_dir", "tls_cert", "tls_key", "users")),
        (
            table["kafka"]["security"],
            ("ssl_cafile", "ssl_certfile", "ssl_keyfile", "sasl_password_file"),
        ),
        (table.get("gateway", {}), ("keys_file",)),
    ):
        section.update({key: _absolute(config, section[key]) for key in keys if key in section})
    if config.checkpoint.url is not None and "://" not in config.checkpoint.url:
        table["checkpoint"]["url"] = _absolute(config, config.checkpoint.url)
    for task in table["tasks"].values():
        for key in ("agent", "reward", "prompts", "eval_prompts"):
            if key in task:
                task[key] = _absolute_spec(config, task[key], is_file=key.endswith("prompts"))
        combine = task["feedback"]["combine"]
        task["feedback"]["combine"] = _absolute_spec(config, combine, is_file=False)
    return table


def _absolute(config: Config, path: str) -> str:
    return str(config.resolve(path).resolve())


def _absolute_spec(config: Config, spec: str, *, is_file: bool) -> str:
    """Files and `file.py:function` made absolute; names and `module:function` as they are."""
    file, separator, name = spec.rpartition(":")
    if separator and file.endswith(".py"):
        return f"{_absolute(config, file)}:{name}"
    if is_file and not spec.startswith(GENERATOR_PREFIX):
        return _absolute(config, spec)
    return spec


def _builder(config: Config) -> str | None:
    """model.path if it names a function that builds the model, `file.py` made absolute."""
    source, separator, name = config.model.path.rpartition(":")
    if separator and source and name.isidentifier():
        return _absolute_spec(config, config.model.path, is_file=False)
    return None


def check_files(config: Config) -> None:
    """ConfigError for a missing file or an unknown name of a task, EnvironmentFailure for a missing
    model folder. Nothing of the user's is imported."""
    if _builder(config) is None:
        folder = config.resolve(config.model.path)
        if not (folder / "config.json").is_file():
            raise EnvironmentFailure(
                f"model.path: {folder} is no model folder (no config.json in it)"
            )
    for name, task in config.tasks.items():
        for key in ("prompts", "eval_prompts"):
            value = getattr(task, key)
            if (
                value
                and not value.startswith(GENERATOR_PREFIX)
                and not config.resolve(value).is_file()
            ):
                raise ConfigError(f"tasks.{name}.{key}: there is no file {config.resolve(value)}")
        named = (
            ("agent", task.agent, agents.BUILT_IN),
            ("reward", task.reward, rewards.NAMES),
            ("feedback.combine", task.feedback.combine, labels.COMBINE),
        )
        for key, spec, built_in in named:
            try:
                plugins.check(spec, config.base_dir, built_in)
            except ConfigError as error:
                raise ConfigError(f"tasks.{name}.{key}: {error}") from error


def _changes(run_dir: RunDir, table: Mapping[str, Any], source: Source) -> tuple[str, ...]:
    """'key: old -> new' for every key that differs; ConfigError, with all of them, for those that
    must not."""
    earlier = load(run_dir.config_file).model_dump(exclude_none=True)
    before, after = dict(_flat(earlier)), dict(_flat(table))
    known = _read_source(run_dir)
    if known is not None:
        before["model.path"] = known.model or before["model.path"]
    after["model.path"] = source.model or after["model.path"]
    differ = [
        (key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if key != "run.dir" and before.get(key) != after.get(key)
    ]
    fixed = [
        f"{key}: cannot change from {_said(old)} to {_said(new)}"
        for key, old, new in differ
        if key in _FIXED
        or key.startswith("trainer.lora")
        or (key.startswith("staleness.") and key != "staleness.time_cap_s")
    ]
    if fixed:
        raise ConfigError(
            f"{'; '.join(fixed)}: the log and the checkpoints in {run_dir.path} depend on it "
            "(start another run with it, in a folder of its own)"
        )
    return tuple(
        f"{key}: changed" if key.endswith("sasl_password") else f"{key}: {old!r} -> {new!r}"
        for key, old, new in differ
    )


def _said(value: Any) -> str:
    return "nothing" if value is None else repr(value)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _source(config: Config, run_dir: RunDir) -> Source:
    """Of this start. A run resumed from its own config.toml names the built folder; what built it
    is then known from before."""
    known = _read_source(run_dir)
    if known is not None and config.model.path == str(run_dir.path / "model"):
        return Source(folder=config.base_dir, model=known.model)
    return Source(folder=config.base_dir, model=_builder(config))


def _model_files(run_dir: RunDir, table: Mapping[str, Any]) -> dict[str, str]:
    """Of the model's folder, all but its weights, whose digests are in the log. ConfigError when
    one is not what the run began with."""
    folder = Path(table["model"]["path"])
    files = sorted(file for file in folder.iterdir() if file.suffix in _MODEL_SUFFIXES)
    now = {file.name: f"{checksum(file.read_bytes()):08x}" for file in files}
    known = _read_source(run_dir)
    before = known.model_files if known is not None else {}
    for name in sorted(before.keys() | now.keys()) if before else ():
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"model.path: {folder / name} is not what it was when the run began: the log in "
                f"{run_dir.path} depends on it (put it back, or start another run)"
            )
    return now


def _read_source(run_dir: RunDir) -> Source | None:
    file = run_dir.path / "source.json"
    return msgspec.json.decode(file.read_bytes(), type=Source) if file.is_file() else None
