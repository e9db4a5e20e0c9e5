"""Where a task's prompts come from: a JSONL file or a reasoning-gym generator, by position.

Position k always gives the same bytes, so a feeder that knows how far it got needs no other memory.
"""

from __future__ import annotations

import importlib
from array import array
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import msgspec

from connectors.config import ConfigError

GENERATOR_PREFIX: Final = "reasoning-gym:"


class PromptLines(Protocol):
    """`num_lines` None: endless."""

    @property
    def num_lines(self) -> int | None: ...

    def line(self, k: int) -> bytes: ...


class PromptFile:
    """The lines of a JSONL file as they stand; blank ones are no lines. ConfigError when there is
    no file or nothing in it. Keeps 8 bytes a line in memory."""

    def __init__(self, path: Path) -> None:
        self._starts = array("q")
        try:
            self._file: BinaryIO = path.open("rb")
            start = 0
            for line in self._file:
                if line.strip():
                    self._starts.append(start)
                start += len(line)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        if not self._starts:
            raise ConfigError(f"{path}: holds no prompts")

    @property
    def num_lines(self) -> int:
        return len(self._starts)

    def line(self, k: int) -> bytes:
        self._file.seek(self._starts[k])
        return self._file.readline().rstrip(b"\r\n")


class GeneratedPrompts:
    """Problem k of the generator `name` under `seed`; `reward` is what reasoning-gym's scorer
    takes. ConfigError when the package or the name is not there."""

    num_lines: Final = None

    def __init__(self, name: str, seed: int) -> None:
        try:
            gym: Any = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ConfigError(
                f"prompts {GENERATOR_PREFIX}{name} need reasoning-gym: "
                "pip install -e '.[reasoning-gym]'"
            ) from error
        self._name, self._seed = name, seed
        try:
            self._problems: Any = gym.create_dataset(name, seed=seed, size=2**31 - 1)
        except ValueError as error:
            raise ConfigError(f"prompts {GENERATOR_PREFIX}{name}: {error}") from error

    def line(self, k: int) -> bytes:
        entry = self._problems[k]
        prompt = {
            "id": f"{self._name}-{self._seed}-{k}",
            "messages": [{"role": "user", "content": entry["question"]}],
            "reward": {"dataset": self._name, "entry": entry},
        }
        return msgspec.json.encode(prompt, enc_hook=str)


def open_lines(prompts: str, *, base_dir: str, seed: int) -> PromptLines:
    """What a task's `prompts` key names."""
    if prompts.startswith(GENERATOR_PREFIX):
        return GeneratedPrompts(prompts.removeprefix(GENERATOR_PREFIX), seed)
    return PromptFile(Path(base_dir, prompts).expanduser())


def with_task(line: bytes, task: str) -> bytes:
    """The line, with the task's name if it is a JSON object that names none."""
    prompt = json_object(line)
    if prompt is None or "task" in prompt:
        return line
    return msgspec.json.encode({"task": task, **prompt})


def json_object(line: bytes) -> dict[str, Any] | None:
    """None when the line is none: the rollout operator says what is wrong with it."""
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
