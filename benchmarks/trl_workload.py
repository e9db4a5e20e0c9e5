"""What both sides of the comparison with TRL are given, and what each answers. Read by two
interpreters, so it needs the standard library alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

SLOWNESS: Final = 4.0
"""A slow reward sleeps so many times the seconds that TRL generates in a step of the workload
`tiny`: the mean over the steady state of its first seed. Both sides sleep that number."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """example      names the model, the prompts and the configuration that Headwater starts from
    num_skipped  steps before the steady state, which is measured
    target       the most that a step of ours may take, of one of TRL's
    """

    name: str
    says: str
    example: str
    task: str
    groups_per_step: int
    group_size: int
    max_tokens: int
    learning_rate: float
    num_steps: int
    num_skipped: int
    target: float
    is_slow: bool = False

    @property
    def num_rows(self) -> int:
        return self.groups_per_step * self.group_size

    def of_steps(self, num_steps: int) -> Workload:
        """Shorter or longer, with as large a part left out."""
        num_skipped = max(1, num_steps * self.num_skipped // self.num_steps)
        return replace(self, num_steps=num_steps, num_skipped=num_skipped)


_TINY: Final = Workload(
    name="tiny",
    says="two layers, 128 wide, sort five digits; the reward is instant",
    example="quickstart",
    task="sort",
    groups_per_step=16,
    group_size=8,
    max_tokens=12,
    learning_rate=3e-4,
    num_steps=40,
    num_skipped=8,
    target=1.5,
)
WORKLOADS: Final = {
    one.name: one
    for one in (
        _TINY,
        Workload(
            **{
                **asdict(_TINY),
                "name": "slow",
                "says": f"the same; each reward sleeps {SLOWNESS:g} x TRL's rollout of `tiny`",
                "num_steps": 30,
                "num_skipped": 6,
                "target": 0.5,
                "is_slow": True,
            }
        ),
        Workload(
            name="135m",
            says="SmolLM2-135M-Instruct writes numbers in digits",
            example="smollm2",
            task="digits",
            groups_per_step=4,
            group_size=8,
            max_tokens=8,
            learning_rate=1e-5,
            num_steps=5,
            num_skipped=2,
            target=1.0,
        ),
    )
}
"""In the order they run: `slow` needs what `tiny` measures."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run of TRL: `model` is a folder, `prompts` a file of `prompt_lines`."""

    workload: Workload
    seed: int
    model: str
    prompts: str
    num_threads: int

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Order:
        said = json.loads(file.read_text())
        return cls(**{**said, "workload": Workload(**said["workload"])})


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run of one side did. Lists have an entry a step; seconds count from its command.

    num_tokens      that were generated and trained
    parts_s         where the time of each step went, by the side's own clock
    processor_s     seconds of a core that a step of the steady state takes, by process
    prompt_ids      token ids of the trained prompts, by the prompt's id
    staleness_mean  versions that a trained token is old
    load            average of the machine, one minute, before the run
    """

    workload: str
    system: str
    seed: int
    ends_s: list[float]
    rewards: list[float]
    num_tokens: list[int]
    parts_s: dict[str, list[float]]
    processor_s: dict[str, float]
    prompt_ids: dict[str, list[int]]
    settings: dict[str, Any]
    staleness_mean: float = 0.0
    sleep_s: float = 0.0
    load: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Run:
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


def prompt_lines(lines: Sequence[str], seed: int, sleep_s: float | None) -> Iterator[str]:
    """The example's prompts in the order of `seed`, the same for both sides, each with its number
    in that order as its id. `sleep_s`: what `trl_reward.slow` reads; None leaves the reward as the
    example has it."""
    order = list(range(len(lines)))
    random.Random(seed).shuffle(order)
    for number, at in enumerate(order):
        line = json.loads(lines[at])
        if sleep_s is not None:
            line["reward"] = {"answer": line["reward"], "sleep_s": sleep_s}
        yield json.dumps({"id": f"{number:04}", **line})
