"""Scoring a group: values, parts, failures and their reasons; one slow scorer holds up nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from connectors.arrow import decode_group, encode_group
from connectors.records import Closed, Group, Origin, Prompt, Trajectory
from connectors.text import Text
from operators import rewards
from operators.rewards import Rewards, RewardTask, Scored
from operators.user_code import UserCode
from tests.operators.engine_fake import END, tokenizer

ORIGIN = Origin("headwater.prompts", 0, 3)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return tokenizer(tmp_path_factory.mktemp("plain"))


def row(text: Text, k: int, *turns: str, **changes: Any) -> Trajectory:
    """Prompt `q`, then the turns, with `t` between them."""
    ids, mask = text.encode("q"), [0]
    for turn in turns:
        written = [*text.encode(turn), END]
        ids, mask = [*ids, *written, *text.encode("t")], [*mask, *[1] * len(written), 0]
    made = Trajectory(
        trajectory_id=f"{ORIGIN}/{k}",
        group_id=str(ORIGIN),
        task="t",
        tokens=np.array(ids, np.int32),
        loss_mask=np.array(mask, np.int8),
        logprobs=np.zeros(len(ids), np.float32),
        segments=(),
        origin=ORIGIN,
        turns=len(turns),
    )
    return replace(made, **changes)


def a_group(text: Text, *answers: str, reward: Any = "19", number: int = 3) -> Group:
    origin = Origin("headwater.prompts", 0, number)
    rows = tuple(
        row(text, k, a, group_id=str(origin), trajectory_id=f"{origin}/{k}")
        for k, a in enumerate(answers)
    )
    prompt = Prompt(task="t", messages=[{"role": "user", "content": "q"}], reward=reward)
    return Group(group_id=str(origin), prompt=prompt, trajectories=rows)


def score_all(
    text: Text, score: Callable[..., Any], *groups: Group, **task: Any
) -> list[Group | Closed]:
    async def run() -> list[Group | Closed]:
        operator = Rewards({"t": RewardTask(score=score, **task)}, text, UserCode("rewards"))
        return await asyncio.gather(*(operator(g) for g in groups))

    return asyncio.run(run())


def rewards_of(ended: Group | Closed) -> list[float]:
    assert isinstance(ended, Group), ended
    return [t.reward for t in ended.trajectories]


def test_exact_match_compares_the_stripped_text(text: Text) -> None:
    (ended,) = score_all(text, rewards.exact_match, a_group(text, " 19\n", "190", "19"))
    assert rewards_of(ended) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("said", "reward"),
    [("it is 19.", 1), ("19.0", 1), ("1,900", 0), ("20, no: 19", 1), ("19 or 20", 0), ("none", 0)],
)
def test_numeric_match_takes_the_last_number(text: Text, said: str, reward: float) -> None:
    (ended,) = score_all(text, rewards.numeric_match, a_group(text, said, reward=19))
    assert rewards_of(ended) == [reward]


def test_a_scorer_sees_text_messages_and_prompt_and_may_return_parts(text: Text) -> None:
    seen: list[Scored] = []

    async def score(sample: Scored, prompt: Prompt) -> dict[str, Any]:
        seen.append(sample)
        return {"reward": np.float64(0.5), "length": len(sample.text)}

    (ended,) = score_all(text, score, a_group(text, "abc"))
    assert rewards_of(ended) == [0.5]
    assert isinstance(ended, Group)
    assert ended.trajectories[0].reward_parts == {"length": 3.0}
    assert seen[0].messages == (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "abc"},
    )


def test_of_several_turns_the_text_is_the_last(text: Text) -> None:
    group = replace(a_group(text, "x"), trajectories=(row(text, 0, "calc(12+7)", "19"),))
    (ended,) = score_all(text, rewards.exact_match, group)
    assert rewards_of(ended) == [1.0]


def test_a_forked_trajectory_is_scored_once_for_all_its_rows(text: Text) -> None:
    first = row(text, 0, "thought", finished_at=1.0)
    last = row(
        text,
        0,
        "19",
        finished_at=2.0,
        trajectory_id=f"{ORIGIN}/0/1",
        metadata={"headwater.branch": "1"},
    )
    other = row(text, 1, "20")
    group = replace(a_group(text, "x"), trajectories=(first, last, other))
    (ended,) = score_all(text, rewards.exact_match, group)
    assert rewards_of(ended) == [1.0, 1.0, 0.0]


def test_a_turn_s_reward_is_earned_at_its_last_token_and_their_sum_is_the_reward(
    text: Text,
) -> None:
    def score(sample: Scored, prompt: Prompt) -> dict[str, Any]:
        assert sample.turns == 2
        return {"turns": [0.25, np.float32(0.5)], "length": 2}

    one = row(text, 0, "calc(12+7)", "19", rewards=((0, 9.0, "another scorer's"),))
    (ended,) = score_all(text, score, replace(a_group(text, "x"), trajectories=(one,)))
    assert isinstance(ended, Group)
    (scored,) = ended.trajectories
    assert scored.reward == 0.75
    assert scored.reward_parts == {"length": 2.0}
    (first, _, _), (second, _, _) = scored.rewards
    assert scored.rewards == ((first, 0.25, "turn"), (second, 0.5, "turn"))
    assert scored.tokens[[first, second]].tolist() == [END, END]
    assert scored.loss_mask[[first, first + 1, second, second + 1]].tolist() == [1, 0, 1, 0]
    assert decode_group(encode_group(ended)).trajectories[0].rewards == scored.rewards


def test_turns_are_counted_over_all_branches_and_may_have_a_reward_beside_them(text: Text) -> None:
    branches = (
        row(text, 0, "a", "b", finished_at=1.0),
        row(text, 0, "c", trajectory_id=f"{ORIGIN}/0/1", metadata={"headwater.branch": "1"}),
    )
    group = replace(a_group(text, "x"), trajectories=branches)
    (ended,) = score_all(
        text, lambda sample, prompt: {"reward": 7.0, "turns": (1.0, 2.0, 3.0)}, group
    )
    assert rewards_of(ended) == [7.0, 7.0]
    assert isinstance(ended, Group)
    assert [[v for _, v, _ in t.rewards] for t in ended.trajectories] == [[1.0, 2.0], [3.0]]


def test_a_number_named_turns_is_a_part_as_any_other(text: Text) -> None:
    (ended,) = score_all(
        text, lambda sample, prompt: {"reward": 1.0, "turns": 3}, a_group(text, "x")
    )
    assert isinstance(ended, Group)
    assert ended.trajectories[0].reward_parts == {"turns": 3.0}


@pytest.mark.parametrize(
    ("turns", "reason", "message"),
    [
        ([1.0], "reward_failed", "1 rewards of turns, it has 2"),
        ([1.0, 2.0, 3.0], "reward_failed", "3 rewards of turns, it has 2"),
        ([], "reward_failed", "0 rewards of turns, it has 2"),
        ([1.0, float("nan")], "reward_nan", "nan is not finite"),
        ([3e38, 3e38], "reward_nan", "e+38 is not finite"),
        ([1.0, "2"], "reward_failed", "'2' is no number"),
        (2.0, "reward_failed", "the mapping has no reward, only ['turns']"),
    ],
)
def test_rewards_that_are_not_those_of_the_turns_close_the_group(
    text: Text, turns: Any, reason: str, message: str
) -> None:
    group = replace(a_group(text, "x"), trajectories=(row(text, 0, "a", "b"),))
    (ended,) = score_all(text, lambda sample, prompt: {"turns": turns}, group, retries=0)
    assert isinstance(ended, Closed)
    assert (ended.reason, message in ended.message) == (reason, True), ended.message


def test_a_reward_the_agent_set_is_kept_and_no_scorer_is_asked(text: Text) -> None:
    def score(sample: Scored, prompt: Prompt) -> float:
        raise AssertionError("asked")

    group = replace(a_group(text, "x"), trajectories=(row(text, 0, "x", reward=0.25),))
    (ended,) = score_all(text, score, group)
    assert rewards_of(ended) == [0.25]


@pytest.mark.parametrize(
    "returned",
    [float("nan"), float("inf"), 1e300, "1.0", None, {}, {"reward": None},
     {"reward": 1.0, "part": float("nan")}, np.array([1.0, 2.0])],
)  # fmt: skip
def test_what_is_no_finite_number_closes_the_group(text: Text, returned: Any) -> None:
    (ended,) = score_all(text, lambda sample, prompt: returned, a_group(text, "x"), retries=0)
    assert isinstance(ended, Closed)
    is_number = isinstance(returned, float) or (isinstance(returned, dict) and "part" in returned)
    assert ended.reason == ("reward_nan" if is_number else "reward_failed")
    assert ended.group_id == str(ORIGIN)


@pytest.mark.parametrize("returned", [1, True, np.float32(1), np.array(1.0)])
def test_any_finite_number_is_a_reward(text: Text, returned: Any) -> None:
    (ended,) = score_all(text, lambda sample, prompt: returned, a_group(text, "x"))
    assert rewards_of(ended) == [1.0]


def test_a_failing_scorer_is_tried_again_and_an_outage_is_never_a_zero(text: Text) -> None:
    calls: list[str] = []

    async def judge(sample: Scored, prompt: Prompt) -> float:
        calls.append(sample.text)
        raise ConnectionError("503 Service Unavailable")

    (ended,) = score_all(text, judge, a_group(text, "x"), retries=2)
    assert isinstance(ended, Closed)
    assert ended.reason == "reward_failed"
    assert "503" in ended.message
    assert len(calls) == 3


def test_a_scorer_that_recovers_gives_its_reward(text: Text) -> None:
    calls: list[int] = []

    def score(sample: Scored, prompt: Prompt) -> float:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("away")
        return 0.75

    (ended,) = score_all(text, score, a_group(text, "x"), retries=2)
    assert rewards_of(ended) == [0.75]


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
@pytest.mark.parametrize("plain", [True, False])
def test_a_scorer_cannot_end_the_process(text: Text, raised: BaseException, plain: bool) -> None:
    def score(sample: Scored, prompt: Prompt) -> float:
        raise raised

    async def async_score(sample: Scored, prompt: Prompt) -> float:
        raise raised

    (ended,) = score_all(text, score if plain else async_score, a_group(text, "x"), retries=0)
    assert isinstance(ended, Closed)
    assert ended.reason == "reward_failed"


async def hangs_awaiting(release: threading.Event) -> float:
    await asyncio.Event().wait()
    return 1.0


async def hangs_the_loop(release: threading.Event) -> float:
    release.wait(30)
    return 1.0


def hangs_its_thread(release: threading.Event) -> float:
    release.wait(30)
    return 1.0


@pytest.mark.parametrize("hang", [hangs_awaiting, hangs_the_loop, hangs_its_thread])
def test_a_scorer_that_hangs_times_out_and_holds_up_no_other_group(
    text: Text, hang: Callable[[threading.Event], Any]
) -> None:
    release = threading.Event()

    if asyncio.iscoroutinefunction(hang):

        async def score(sample: Scored, prompt: Prompt) -> Any:
            if sample.text == "hang":
                return await hang(release)
            for _ in range(3):
                await asyncio.sleep(0.01)
            return 1.0

    else:

        def score(sample: Scored, prompt: Prompt) -> Any:  # type: ignore[misc]
            return hang(release) if sample.text == "hang" else 1.0

    groups = [a_group(text, "hang" if n == 3 else "x", "y", number=n) for n in range(8)]
    try:
        ended = score_all(text, score, *groups, timeout_s=2.0, retries=0)
    finally:
        release.set()
    reasons = [e.reason if isinstance(e, Closed) else "scored" for e in ended]
    assert reasons == ["scored"] * 3 + ["reward_timeout"] + ["scored"] * 4


def test_groups_that_come_while_the_loop_is_held_are_scored_at_once(text: Text) -> None:
    release, held = threading.Event(), threading.Event()

    async def score(sample: Scored, prompt: Prompt) -> float:
        if sample.text == "hang":
            held.set()
            release.wait(60)
        return 1.0

    async def run() -> list[float]:
        task = RewardTask(score=score, timeout_s=60.0)
        operator = Rewards({"t": task}, text, UserCode("rewards"))
        slow = asyncio.ensure_future(operator(a_group(text, "hang")))
        await asyncio.to_thread(held.wait, 30)
        quick = await operator(a_group(text, "x", number=4))  # long before the hanging one's time
        assert not slow.done()
        release.set()
        return rewards_of(quick) + rewards_of(await slow)

    assert asyncio.run(run()) == [1.0, 1.0]


def test_trajectories_of_a_group_are_scored_side_by_side(text: Text) -> None:
    together = threading.Barrier(4)

    def score(sample: Scored, prompt: Prompt) -> float:
        together.wait(30)  # passes only when all four are being scored
        return 1.0

    (ended,) = score_all(text, score, a_group(text, *"abcd"))
    assert rewards_of(ended) == [1.0] * 4


def test_a_task_that_left_the_configuration_closes(text: Text) -> None:
    group = a_group(text, "x")
    gone = replace(group, prompt=Prompt(task="gone", prompt="q"))
    (ended,) = score_all(text, rewards.exact_match, gone)
    assert isinstance(ended, Closed)
    assert ended.reason == "unknown_task"


def test_reasoning_gym_scores_its_own_entries(text: Text) -> None:
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("basic_arithmetic", seed=1, size=1)[0]
    task = {"dataset": "basic_arithmetic", "entry": entry}
    group = a_group(text, entry["answer"], f"<answer>{entry['answer']}</answer>", "-", reward=task)
    (ended,) = score_all(text, rewards.reasoning_gym(), group)
    assert rewards_of(ended)[:2] == [1.0, 1.0]
    assert rewards_of(ended)[2] < 1.0
