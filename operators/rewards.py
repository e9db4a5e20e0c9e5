"""Rewards: what a scorer sees (`Scored`), the built-in ones, and `Rewards`, which scores a group.

A scorer is `score(sample, prompt) -> float | Mapping[str, Any]`, async or plain. A mapping holds
"reward", or "turns", a list of a number for each turn of the sample, whose sum is the reward if it
holds no other. Its other keys become `reward_parts`. A scorer that raises, hangs or gives no
finite number is tried again and then closes its whole group with the reason: an outage is never a
zero."""

from __future__ import annotations

import asyncio
import functools
import importlib
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from connectors.branches import BRANCH, TRANSCRIPT
from connectors.records import Closed, Group, Prompt, Trajectory
from connectors.turns import ends_of
from operators.llm import Text
from operators.together import together
from operators.user_code import TookTooLong, UserCode, clean, said

T = TypeVar("T")
RETRY_PAUSE_S: Final = 0.2  # doubled each time
TURN: Final = "turn"
"""Name of a turn's reward among `Trajectory.rewards`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One trajectory, decoded.

    text      of the last turn the policy wrote, special tokens left out
    messages  the whole conversation: the prompt's messages and what was said after them
    turns     how many the policy took, over all branches (connectors/turns.py)
    """

    trajectory: Trajectory
    text: str
    messages: tuple[Mapping[str, Any], ...]
    turns: int


Scorer = Callable[[Scored, Prompt], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTask:
    """`retries` after the first failure; `timeout_s` bounds each call."""

    score: Scorer
    timeout_s: float = 30.0
    retries: int = 2


class MissingPackage(ImportError):
    """A built-in scorer needs a package that is not installed."""


# ---------------------------------------------------------------------------------- built-in
# scorers
def exact_match(sample: Scored, prompt: Prompt) -> float:
    """1 if the text, stripped, is the prompt's `reward` as text."""
    return float(sample.text.strip() == str(prompt.reward).strip())


_NUMBER: Final = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def numeric_match(sample: Scored, prompt: Prompt) -> float:
    """1 if the last number in the text equals the prompt's `reward` (relative tolerance 1e-6).
    ValueError when `reward` is no number."""
    wanted = float(str(prompt.reward).replace(",", ""))
    found = _NUMBER.findall(sample.text)
    if not found:
        return 0.0
    return float(math.isclose(float(found[-1].replace(",", "")), wanted, rel_tol=1e-6))


def reasoning_gym() -> Scorer:
    """The scorer of reasoning-gym's data sets; the prompt's `reward` is {"dataset": NAME,
    "entry": the generated entry}. MissingPackage without the package."""
    try:
        gym: Any = importlib.import_module("reasoning_gym")
        extract: Any = importlib.import_module("reasoning_gym.utils").extract_answer
    except ImportError as error:
        raise MissingPackage(
            "the reward reasoning-gym needs its package: pip install -e '.[reasoning-gym]'"
        ) from error

    scorer_of: Any = functools.cache(gym.get_score_answer_fn)  # it builds the data set each time

    def reasoning_gym_score(sample: Scored, prompt: Prompt) -> float:
        task = prompt.reward
        if not isinstance(task, Mapping) or not {"dataset", "entry"} <= set(task):
            raise ValueError("the prompt's reward is no {dataset, entry} of reasoning-gym")
        answer = extract(sample.text) or sample.text.strip()
        return float(scorer_of(task["dataset"])(answer, task["entry"]))

    return reasoning_gym_score


def feedback(sample: Scored, prompt: Prompt) -> float:
    """ValueError: what was said about live traffic is its reward before it gets here."""
    raise ValueError(
        f"the reward of {prompt.task} is feedback, and nobody says anything about a prompt's own "
        "rollouts (give such prompts a task with a scorer)"
    )


BUILT_IN: Final[Mapping[str, Scorer]] = {
    "exact_match": exact_match,
    "numeric_match": numeric_match,
    "feedback": feedback,
}
"""Pure and quick: called in place, without a thread."""


# ------------------------------------------------------------------------------------ scoring a
# group
NAMES: Final = (*BUILT_IN, "reasoning-gym")
"""What `tasks.NAME.reward` may say beside a function of the user's."""


class _Unscored(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Rewards:
    """Use it on one event loop."""

    def __init__(self, tasks: Mapping[str, RewardTask], text: Text, user_code: UserCode) -> None:
        self._tasks, self._text, self._user_code = tasks, text, user_code

    async def __call__(self, group: Group) -> Group | Closed:
        """The group with every row's reward set, its trajectories scored side by side, or Closed
        with the reason of the first that could not be. A trajectory that carries its agent's own
        reward is not scored; one that forked is scored once, at its last turn, for all its
        rows."""
        task = self._tasks.get(group.task)
        if task is None:
            known = ", ".join(self._tasks)
            return Closed.now(
                group.group_id, "unknown_task", f"the configuration has only {known}", group.task
            )
        by_trajectory: dict[str, list[Trajectory]] = {}
        for row in group.trajectories:
            by_trajectory.setdefault(_without_branch(row), []).append(row)
        each = [self._rows(task, rows, group.prompt) for rows in by_trajectory.values()]
        try:
            scored = await (_in_turn if task.score in BUILT_IN.values() else together)(each)
        except _Unscored as end:
            return Closed.now(group.group_id, end.reason, str(end), group.task)
        return replace(group, trajectories=tuple(row for rows in scored for row in rows))

    async def _rows(
        self, task: RewardTask, rows: list[Trajectory], prompt: Prompt
    ) -> list[Trajectory]:
        if all(math.isfinite(row.reward) for row in rows):
            return rows
        last = max(rows, key=lambda row: row.finished_at)
        ends = ends_of(row.loss_mask for row in rows)
        sample = self.decoded(last, prompt, len(ends))
        for attempt in range(task.retries + 1):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * 2 ** (attempt - 1))
            try:
                found = _numbers(await self._score(task, sample, prompt), len(ends))
                return [_rewarded(row, at, found, ends) for at, row in enumerate(rows)]
            except _Unscored as error:
                failure = error
            except TookTooLong as error:
                failure = _Unscored("reward_timeout", str(error))
            except (Exception, SystemExit) as error:  # foreign code: it raises anything
                failure = _Unscored("reward_failed", said(error))
        raise _Unscored(failure.reason, f"{last.trajectory_id}: {failure}")

    async def _score(self, task: RewardTask, sample: Scored, prompt: Prompt) -> Any:
        if task.score in BUILT_IN.values():
            return task.score(sample, prompt)
        return await self._user_code.run(
            partial(task.score, sample, prompt), timeout_s=task.timeout_s
        )

    def decoded(self, row: Trajectory, prompt: Prompt, turns: int = 1) -> Scored:
        """What a scorer is shown of `row`, of a sample of so many turns."""
        text = self._text.decode(_last_turn(row))
        said = row.metadata.get(TRANSCRIPT)
        after = msgspec.json.decode(said) if said else [{"role": "assistant", "content": text}]
        asked = prompt.messages or [{"role": "user", "content": prompt.prompt or ""}]
        return Scored(trajectory=row, text=text, messages=(*asked, *after), turns=turns)


async def _in_turn(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """For calls that wait for nothing: a task costs more than they do."""
    try:
        return [await call for call in calls]
    finally:
        for call in calls:
            call.close()


def _without_branch(row: Trajectory) -> str:
    branch = row.metadata.get(BRANCH)
    return row.trajectory_id.removesuffix(f"/{branch}") if branch else row.trajectory_id


def _last_turn(row: Trajectory) -> NDArray[np.int32]:
    """Ids of the last stretch of generated tokens."""
    ends = ends_of([row.loss_mask])
    end = ends[-1][1] + 1 if ends else 0
    (before,) = (row.loss_mask[:end] == 0).nonzero()
    return row.tokens[before[-1] + 1 if len(before) else 0 : end]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reward:
    """What a scorer returned. `turns`: () where it gave no number for each."""

    reward: float
    parts: Mapping[str, float]
    turns: tuple[float, ...] = ()


def _numbers(made: Any, num_turns: int) -> _Reward:
    """_Unscored unless all numbers are finite in float32, and those of turns as many."""
    if not isinstance(made, Mapping):
        return _Reward(reward=_number(made), parts={})
    given, turns = dict(made), tuple[float, ...]()
    if isinstance(given.get("turns"), list | tuple | np.ndarray):  # a number would be a part
        turns = tuple(_number(value) for value in given.pop("turns"))
        if len(turns) != num_turns:
            raise _Unscored("reward_failed", f"{len(turns)} rewards of turns, it has {num_turns}")
        given.setdefault("reward", math.fsum(turns))
    if "reward" not in given:
        raise _Unscored("reward_failed", f"the mapping has no reward, only {sorted(made)}")
    reward = _number(given.pop("reward"))
    parts = {clean(str(name)): _number(value) for name, value in given.items()}
    return _Reward(reward=reward, parts=parts, turns=turns)


def _rewarded(
    row: Trajectory, at: int, found: _Reward, ends: Sequence[tuple[int, int]]
) -> Trajectory:
    """`row`, the sample's row number `at`; a turn's reward is earned at its last token."""
    placed = zip(ends, found.turns, strict=False)
    return replace(
        row,
        reward=found.reward,
        reward_parts=found.parts,
        rewards=tuple((token, value, TURN) for (of, token), value in placed if of == at),
    )


def _number(value: Any) -> float:
    if isinstance(value, np.generic | np.ndarray) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, Real):
        raise _Unscored("reward_failed", f"{value!r:.100} is no number")
    with np.errstate(over="ignore"):
        number = float(np.float32(float(value)))  # as the record holds it
    if not math.isfinite(number):
        raise _Unscored("reward_nan", f"{value!r:.100} is not finite")
    return number
