"""Whatever way calls and feedback come, interleaved, doubled, delayed within the windows, the rows
and the labels are the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.traffic import Call, Feedback
from operators.labels import Label, combined
from operators.traces import assemble
from operators.user_code import UserCode
from tests.operators.live_calls import EOS, call, choice, said, words
from tests.operators.test_sessions import World

IDLE_S, WINDOW_S = 100.0, 1000.0
Record = Call | Feedback


@st.composite
def sessions(draw: st.DrawFn, name: str) -> list[Record]:
    """Calls of one session within half of IDLE_S: turns that go on from any earlier one, retries,
    forks, and what was said about them."""
    wholes: list[list[int]] = []
    asked: list[list[int]] = []
    calls: list[Record] = []
    num = draw(st.integers(1, 6))
    for n in range(num):
        kind = draw(st.sampled_from(["go on", "retry", "anew", "rewritten"])) if n else "anew"
        if kind == "go on":
            new = draw(st.lists(st.integers(20, 22), max_size=2))
            prompt = [*draw(st.sampled_from(wholes)), *new]
        elif kind == "retry":
            prompt = draw(st.sampled_from(asked))
        elif kind == "rewritten":
            prompt = [i for i in draw(st.sampled_from(wholes)) if i != 7] + [23]
        else:
            prompt = draw(st.lists(st.integers(10, 12), min_size=1, max_size=2))
        answers = draw(st.lists(st.lists(st.integers(7, 9), max_size=3), min_size=1, max_size=2))
        made = [choice([*ids, EOS], version=draw(st.integers(0, 2))) for ids in answers]
        asked.append(prompt)
        wholes += [[*prompt, *ids, EOS] for ids in answers]
        time = draw(st.integers(0, 50)) if draw(st.booleans()) else 8 * n
        calls.append(call(f"{name}/{n}", prompt, *made, time=float(time), session=name))
    about: list[Record] = []
    for n in range(draw(st.integers(0, 4))):
        value = draw(st.sampled_from([0.0, 0.5, 1.0]))
        at = {"time": float(draw(st.integers(0, 100))), "value": value}
        if draw(st.booleans()):
            about.append(said(f"{name}/f{n}", session=name, **at))
        else:
            about.append(said(f"{name}/f{n}", call=f"{name}/{draw(st.integers(0, num - 1))}", **at))
    return [*calls, *about]


def outcome(records: Sequence[Record], late: Sequence[Record] = ()) -> dict[str, Any]:
    """By session, its rows and its label. `late`: what comes after the sessions closed."""
    world = World(idle_s=IDLE_S, rule={"window_s": WINDOW_S, "combine": "mean"})
    world.take(*records).wait(IDLE_S).take(*late).wait(IDLE_S + WINDOW_S)
    calls = {r.id: r for r in records if isinstance(r, Call)}
    written = [job for job in world.written if job.late is None and job.correction is None]
    assert len(world.written) == len(written) == len({job.name for job in written})
    assert Counter(s.id for job in written for s in job.calls) == Counter(list(calls))
    assert world.state.lapsed == {}
    return {job.name: _made(job, calls) for job in written}


def _made(job: Any, calls: dict[str, Call]) -> tuple[Any, Label | None]:
    rule = World(rule={"window_s": WINDOW_S}).limits.rules["t"]
    rows, problems = assemble(
        [calls[seen.id] for seen in job.calls], temperature=1.0, tokenise=words
    )
    assert problems == []
    plain = [
        (
            r.row.tokens.tolist(),
            r.row.loss_mask.tolist(),
            [x for x in r.row.logprobs.tolist() if x == x],
            r.row.segments,
            r.behaviour,
            r.calls,
        )
        for r in rows
    ]
    return plain, asyncio.run(combined(rule, job.signals, UserCode("test")))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_interleaving_gives_the_same_rows_and_labels(data: st.DataObject) -> None:
    records = [r for name in ("p", "q", "r") for r in data.draw(sessions(name))]
    expected = outcome(records)
    doubled = [*records, *data.draw(st.lists(st.sampled_from(records), max_size=5))]
    shuffled = data.draw(st.permutations(doubled))
    late = [
        r
        for r in shuffled
        if isinstance(r, Feedback) and data.draw(st.booleans(), label="after the close")
    ]
    early = [r for r in shuffled if r not in late]
    assert outcome(early, late) == expected


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_answer_that_is_no_retry_is_trained_once_with_its_own_prefix(
    data: st.DataObject,
) -> None:
    calls = [r for r in data.draw(sessions("p")) if isinstance(r, Call)]
    rows, _ = assemble(calls, temperature=1.0, tokenise=words)
    turns = {
        (one.prompt_ids or ()) + (c.token_ids or ()): c.token_ids
        for one in calls
        for c in one.choices
    }
    seen: Counter[tuple[int, ...]] = Counter()
    for traced in rows:
        tokens, mask = traced.row.tokens.tolist(), traced.row.loss_mask.tolist()
        ends = [n for n in range(len(mask)) if mask[n] and (n + 1 == len(mask) or not mask[n + 1])]
        for segment in traced.row.segments:
            whole = tuple(tokens[: segment.end])
            assert turns[whole] == whole[segment.start :]
            seen[whole] += 1
        assert traced.row.segments[-1].end == len(tokens) == ends[-1] + 1
    kept = {whole for whole in turns if seen[whole]}
    for one in calls:
        twins = [c for c in calls if c.prompt_ids == one.prompt_ids]
        assert kept & {
            (one.prompt_ids or ()) + (c.token_ids or ()) for twin in twins for c in twin.choices
        }
