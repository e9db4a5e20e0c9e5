"""Engines: sequences that share them, against a plain reading of the rule and by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from deploy.simulate.clock import Clock
from deploy.simulate.engines import Request, Runs
from deploy.simulate.fleet import Fleet
from deploy.simulate.lengths import Fixed
from deploy.simulate.workload import Workload


def request(*lefts: int, context: int = 0, slow: float = 1.0) -> Request:
    return Request(group=object(), context=context, lefts=list(lefts), slow=slow)


class Bench:
    """One engine unless told otherwise, a second a token; it holds version 0 from the start.
    `ended`: of each group, when each sample ended; `runs`: what it decoded."""

    def __init__(self, **settings: Any) -> None:
        given = {"num_engines": 1, "num_slots": 8, "token_s": 1.0, "prompt_tokens": 0, **settings}
        self.clock = Clock()
        self.workload = Workload(name="bench", lengths=Fixed(tokens=1), **given)
        self.fleet = Fleet(self.workload, self.clock, self._ended)
        self.ended: dict[Any, list[float]] = {}
        self.runs: dict[Any, list[Runs]] = {}
        self.fleet.hold(0)

    def _ended(self, request: Request, runs: Runs) -> bool:
        self.ended.setdefault(request.group, []).append(self.clock.now)
        self.runs.setdefault(request.group, []).append(runs)
        return False

    def at(self, second: float, action: Callable[[], Any]) -> Any:
        """What happens until then, then the action."""
        self.fleet.run(until=second)
        self.clock.now = second
        return action()

    def submit(self, second: float, *requests: Request) -> None:
        for one in requests:
            self.at(second, partial(self.fleet.submit, one))

    def ends(self, *requests: Request) -> list[float]:
        """When their samples came to their ends, one request after the other."""
        self.fleet.run(until=math.inf)
        return [second for one in requests for second in self.ended[one.group]]

    def decoded(self, one: Request) -> Runs:
        """By its only sample."""
        (runs,) = self.runs[one.group]
        return runs


def test_a_sample_alone_takes_its_prefill_and_its_tokens() -> None:
    bench = Bench(token_s=0.5, token_s_per_sequence=0.5, prefill_tokens_per_s=10.0)
    alone = request(7, context=20)
    bench.submit(3.0, alone)
    assert bench.ends(alone) == [pytest.approx(3 + 2 + 7)]


def test_two_share_an_engine_until_the_first_ends() -> None:
    bench = Bench(token_s=1.0, token_s_per_sequence=1.0)  # 2 s a token alone, 3 s for two
    long, short = request(10), request(2)
    bench.submit(0.0, long)
    bench.submit(8.0, short)  # long has 4 tokens
    # 2 tokens each at 3 s: short ends at 14, long has 6, and 4 more at 2 s
    assert bench.ends(long, short) == [pytest.approx(22), pytest.approx(14)]


def test_the_samples_of_a_request_prefill_together_and_end_one_by_one() -> None:
    bench = Bench(token_s=1.0, token_s_per_sequence=1.0, prefill_tokens_per_s=10.0)
    both = request(4, 2, context=20)
    bench.submit(0.0, both)
    # prefill until 2, two tokens each at 3 s until 8, two more at 2 s
    assert bench.ends(both) == [pytest.approx(8), pytest.approx(12)]
    assert bench.runs[both.group] == [[(0, 2)], [(0, 4)]]


def test_a_slow_one_takes_longer_and_slows_nobody() -> None:
    bench = Bench()
    slow, other = request(3, slow=4.0), request(5)
    bench.submit(0.0, slow, other)
    assert bench.ends(slow, other) == [12, 5]


def test_what_finds_no_slot_waits_in_line_and_starts_on_the_engine_that_runs_least() -> None:
    bench = Bench(num_engines=2, num_slots=4)
    first = [request(tokens) for tokens in (9, 3, 8, 9)]
    bench.submit(0.0, *first)
    assert [engine.num_running for engine in bench.fleet.engines] == [2, 2]
    second, third = request(4), request(1)
    bench.submit(1.0, second, third)
    assert bench.fleet.num_queued == 2
    assert bench.ends(second, third) == [3 + 4, 7 + 1]
    assert bench.fleet.busy_s() == 9 + 3 + 8 + 9 + 4 + 1


def test_the_first_samples_start_where_not_all_find_a_slot() -> None:
    """Three slots: 5 and 6 wait for those of 1 and 2 and start in turn."""
    bench = Bench(num_engines=3, num_slots=3)
    one = request(2, 4, 1, 5, 6)
    bench.submit(0.0, one)
    assert (bench.fleet.num_running, bench.fleet.num_queued) == (3, 2)
    assert bench.ends(one) == [1, 2, 4, 1 + 5, 2 + 6]


def test_a_withdrawn_group_leaves_its_slots_and_what_it_decoded() -> None:
    bench = Bench(num_slots=2)
    group, next_one, last = request(10, 3, 7), request(5), request(2)
    bench.submit(0.0, group, next_one, last)
    found = bench.at(4.5, lambda: bench.fleet.withdraw(group.group))
    # two started; the slot of the sample of 3 went to the third at 3
    left = sorted((one.lefts, one.runs) for one in found)
    assert left == [([6], [(0, 1)]), ([6], [(0, 4)])]
    bench.at(5.0, lambda: bench.fleet.withdraw(last.group))
    bench.fleet.run(until=math.inf)
    assert bench.ended == {group.group: [3], next_one.group: [9.5]}
    assert bench.fleet.withdraw(group.group) == []


def test_a_token_is_of_the_version_held_when_it_begins() -> None:
    bench = Bench(prefill_tokens_per_s=10.0)
    one = request(6, context=10)  # decodes from second 1
    bench.submit(0.0, one)
    bench.at(0.5, lambda: bench.fleet.hold(1))  # before its first token, after its first prefill
    bench.at(3.0, lambda: bench.fleet.hold(2))  # as the third begins
    bench.at(4.5, lambda: bench.fleet.hold(4))  # during the fourth
    assert bench.ends(one) == [7]
    assert bench.decoded(one) == [(1, 2), (2, 2), (4, 2)]
    assert one.first == 0


def test_a_slice_is_of_the_version_held_at_its_start() -> None:
    bench = Bench(inflight="slices")
    one = request(6)
    bench.submit(0.0, one)
    bench.at(2.0, lambda: bench.fleet.hold(1))
    assert bench.ends(one) == [6]
    assert bench.decoded(one) == [(0, 6)]


def test_a_restart_begins_again_under_the_new_version() -> None:
    bench = Bench(inflight="restart", num_slots=3)
    running, other, waiting = request(6, 1), request(3), request(1)
    bench.submit(0.0, running, other, waiting)
    # the sample of 1 ended at 1 and is kept, and `waiting`, in its slot, ended at 2
    assert bench.at(2.5, lambda: bench.fleet.hold(1)) == 2 + 2  # tokens lost
    assert bench.ends(running, other, waiting) == [1, 8.5, 5.5, 2]
    assert bench.runs[running.group] == [[(0, 1)], [(1, 6)]]
    assert bench.decoded(other) == [(1, 3)]
    assert (running.first, other.first, waiting.first) == (1, 1, 0)


def test_a_full_cache_preempts_the_last_one() -> None:
    """Each holds its prompt of 10 and what it decoded. At second 3, 2 * 13 tokens fill the cache.
    The second one leaves with 3 tokens and decodes the 5 it lacks after `long` ends at second 8."""
    bench = Bench(kv_tokens=26, prompt_tokens=10)
    long, second = request(8, context=10), request(8, context=10)
    bench.submit(0.0, long, second)
    bench.at(4.0, lambda: bench.fleet.hold(1))
    assert bench.fleet.take_num_preempted() == 1
    assert bench.fleet.take_num_preempted() == 0
    assert (bench.fleet.num_running, bench.fleet.num_queued) == (1, 1)
    assert bench.fleet.kv_use() == pytest.approx(14 / 26)
    assert bench.ends(long, second) == [pytest.approx(8), pytest.approx(13)]
    assert bench.decoded(second) == [(0, 3), (1, 5)]
    assert second.first == 0


def test_of_a_request_the_longest_sample_is_preempted_alone() -> None:
    bench = Bench(kv_tokens=26, prompt_tokens=10)
    both = request(6, 8, context=10)
    bench.submit(0.0, both)
    bench.at(3.5, lambda: None)
    assert (bench.fleet.num_running, bench.fleet.num_queued) == (1, 1)
    assert bench.ends(both) == [pytest.approx(6), pytest.approx(6 + 5)]
    assert bench.runs[both.group] == [[(0, 6)], [(0, 3), (0, 5)]]


def test_what_was_preempted_prefills_all_that_it_has() -> None:
    bench = Bench(kv_tokens=26, prompt_tokens=10, prefill_tokens_per_s=1000.0)
    long, second = request(8, context=10), request(8, context=10)
    bench.submit(0.0, long, second)
    # 10 tokens of prefill take 0.01 s; it leaves with 3 tokens decoded, then takes 0.013 s and 5 s
    assert bench.ends(long, second) == [pytest.approx(8.01), pytest.approx(8.01 + 0.013 + 5)]


def test_what_was_preempted_goes_to_an_engine_with_room() -> None:
    bench = Bench(kv_tokens=52, num_engines=2, num_slots=8, prompt_tokens=10)
    crowd = [request(8, context=10), request(1, context=10), request(8, context=10)]
    bench.submit(0.0, *crowd)  # the second one runs on the other engine, and ends
    assert bench.ends(*crowd) == [pytest.approx(8), pytest.approx(1), pytest.approx(8)]
    assert bench.fleet.take_num_preempted() == 1


def side_by_side(
    arrivals: list[tuple[float, Request]], holds: list[float], workload: Workload
) -> dict[Request, tuple[float, list[int]]]:
    """When each ends, and how many tokens it had begun at each of `holds`: one engine, everybody
    served a little at a time."""
    work: dict[Request, list[float]] = {}  # prefill, done
    line: list[Request] = []
    begun: dict[Request, list[int]] = {s: [] for _, s in arrivals}
    ended: dict[Request, float] = {}
    left = {s: s.lefts[0] for _, s in arrivals}
    total = {s: s.lefts[0] * s.slow for _, s in arrivals}
    outside = sorted([*arrivals, *((t, None) for t in holds)], key=lambda event: event[0])
    now = 0.0
    while outside or work:
        token_s = workload.token_s + workload.token_s_per_sequence * len(work)
        end_in = {s: (p + total[s] - done) * token_s for s, (p, done) in work.items()}
        first = min(end_in, key=lambda s: end_in[s], default=None)
        until = outside[0][0] if outside else math.inf
        ends = first is not None and now + end_in[first] < until
        step = end_in[first] if first is not None and ends else until - now
        for s in work:
            work[s][1] += step / token_s
        now += step
        if ends and first is not None:
            ended[first] = now
            del work[first]
        else:
            _, arrived = outside.pop(0)
            if arrived is not None:
                line.append(arrived)
            else:
                for s in begun:
                    prefill, done = work.get(s, [0.0, 0.0])
                    some = math.ceil((done - prefill) / s.slow)
                    begun[s].append(left[s] if s in ended else max(0, some))
        while line and len(work) < workload.num_slots:
            joining = line.pop(0)
            shared = workload.token_s + workload.token_s_per_sequence * (len(work) + 1)
            rate = workload.prefill_tokens_per_s or math.inf
            work[joining] = [joining.context / rate / shared, 0.0]
    return {s: (ended[s], begun[s]) for _, s in arrivals}


@pytest.mark.parametrize("per_sequence", [0.0, 0.05])
def test_ends_and_versions_are_those_of_a_plain_reading(per_sequence: float) -> None:
    chance = random.Random(5)
    for _ in range(60):
        bench = Bench(
            num_slots=chance.randint(1, 5),
            token_s=0.1,
            token_s_per_sequence=per_sequence,
            prefill_tokens_per_s=50.0,
        )
        arrivals = sorted(
            (
                (
                    chance.uniform(0, 20),
                    request(
                        chance.randint(1, 60),
                        context=chance.randint(0, 40),
                        slow=chance.choice([1.0, 3.0]),
                    ),
                )
                for _ in range(12)
            ),
            key=lambda arrival: arrival[0],
        )
        holds = sorted(chance.uniform(0, 40) for _ in range(6))
        expected = side_by_side(arrivals, holds, bench.workload)
        fleet = bench.fleet
        events: list[tuple[float, Callable[[], Any]]] = [
            *((t, partial(fleet.submit, s)) for t, s in arrivals),
            *((t, partial(fleet.hold, version)) for version, t in enumerate(holds, start=1)),
        ]
        for second, action in sorted(events, key=lambda event: event[0]):
            bench.at(second, action)
        bench.fleet.run(until=math.inf)
        for one, (end, begun) in expected.items():
            assert bench.ended[one.group] == [pytest.approx(end)]
            counts = [*begun, sum(n for _, n in bench.decoded(one))]
            runs = [
                (version, upto - before)
                for version, (before, upto) in enumerate(zip([0, *counts], counts, strict=False))
                if upto > before
            ]
            assert bench.decoded(one) == runs


def test_engines_that_overflow_keep_going_and_lose_no_token() -> None:
    chance = random.Random(6)
    for _ in range(40):
        bench = Bench(
            num_engines=2,
            num_slots=16,
            kv_tokens=240,
            token_s=0.1,
            token_s_per_sequence=0.02,
            prefill_tokens_per_s=100.0,
        )
        work = [
            request(*(chance.randint(1, 80) for _ in range(3)), context=chance.randint(0, 40))
            for _ in range(10)
        ]
        lengths = [sorted(one.lefts) for one in work]
        for one in work:
            bench.submit(chance.uniform(0, 0.6) + bench.clock.now, one)
            assert bench.fleet.kv_use() <= 1 + 1e-9
        bench.fleet.run(until=math.inf)
        assert bench.fleet.take_num_preempted() > 0
        assert lengths == [
            sorted(sum(n for _, n in runs) for runs in bench.runs[one.group]) for one in work
        ]
        assert (bench.fleet.num_running, bench.fleet.num_queued) == (0, 0)
        assert bench.fleet.kv_use() == 0
