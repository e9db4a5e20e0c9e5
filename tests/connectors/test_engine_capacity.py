"""The rules of the router as functions: how much an engine gets, and which engine is taken."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.engines.capacity import most_running, next_limit
from connectors.engines.choice import Standing, able, best
from connectors.engines.types import EngineState, GenerateRequest
from connectors.records import Version

FIRST = Version(0, 1)


def state(
    *, num_running: int = 0, num_queued: int = 0, kv_use: float = 0.0, max_running: object = 32,
    version: Version | None = FIRST,
) -> EngineState:  # fmt: skip
    return EngineState(
        version=version,
        digest="d",
        epoch=0,
        num_running=num_running,
        num_queued=num_queued,
        kv_use=kv_use,
        info={"max_running": max_running},
    )


states = st.builds(
    state,
    num_running=st.integers(0, 600),
    num_queued=st.integers(0, 600),
    kv_use=st.floats(0, 1),
    max_running=st.integers(1, 512),
    version=st.none() | st.builds(Version, st.just(0), st.integers(0, 3)),
)
counts = st.integers(0, 700)


# -------------------------------------------------------------------------------- how much it gets
@given(counts, counts, states)
def test_a_limit_lies_between_one_and_what_the_engine_decodes_together(
    limit: int, sent: int, seen: EngineState
) -> None:
    assert 1 <= next_limit(limit, sent, seen) <= most_running(seen)


@given(counts, counts, st.floats(0.9, 1), st.integers(1, 512))
def test_a_full_cache_takes_a_quarter_of_what_is_there_once_the_last_cut_took_effect(
    limit: int, sent: int, kv_use: float, most: int
) -> None:
    before = max(1, min(limit, most))
    after = next_limit(limit, sent, state(kv_use=kv_use, max_running=most))
    if 0 < sent <= before:
        assert after == max(1, sent * 3 // 4)
    else:
        assert after == before


@given(counts, counts, st.floats(0, 0.89), st.integers(1, 512))
def test_room_raises_the_limit_only_where_it_is_used(
    limit: int, sent: int, kv_use: float, most: int
) -> None:
    before = max(1, min(limit, most))
    after = next_limit(limit, sent, state(kv_use=kv_use, max_running=most))
    assert after >= before
    assert (after > before) == (2 * sent > before and before < most)


@given(st.integers(0, 100))
def test_a_short_queue_is_welcome_and_a_long_one_is_not(queued: int) -> None:
    after = next_limit(16, 16, state(num_queued=queued, max_running=32))
    assert (after > 16) == (queued <= 4)
    assert (after < 16) == (queued > 4)


def test_what_queues_because_there_is_no_version_says_nothing_about_room() -> None:
    assert next_limit(16, 4, state(num_queued=16, version=None)) == 16


def test_an_engine_that_does_not_say_how_much_it_decodes_together_gets_some() -> None:
    assert most_running(state(max_running="many")) == 64
    assert most_running(state(max_running=0)) == 1


@given(
    num_pools=st.integers(1, 4),
    most=st.integers(4, 256),
    fits=st.floats(0.1, 1.5),
    looks=st.integers(1, 9),
)
def test_pools_that_share_an_engine_fill_it_and_share_it_fairly(
    num_pools: int, most: int, fits: float, looks: int
) -> None:
    """One was there before the others. Each always has work; a request takes `looks` looks; the
    cache holds `fits * most` sequences. In the second half of the time the engine has work and no
    pool is squeezed out."""
    limits, sent = [most] + [1] * (num_pools - 1), [0] * num_pools
    history: list[list[int]] = []
    for look in range(600):
        for k in range(num_pools):
            ending = sent[k] // looks + (look % looks < sent[k] % looks)
            sent[k] = max(sent[k] - ending, 0)
            sent[k] = max(sent[k], limits[k])
        running = min(most, sum(sent))
        seen = state(
            num_running=running,
            num_queued=sum(sent) - running,
            kv_use=min(1.0, running / (fits * most)),
            max_running=most,
        )
        limits = [next_limit(limits[k], sent[k], seen) for k in range(num_pools)]
        history.append(list(sent))
    late = history[300:]
    capacity = min(most, int(fits * most))
    mean = [sum(at[k] for at in late) / len(late) for k in range(num_pools)]
    assert sum(mean) >= 0.5 * capacity
    assert sum(mean) <= 1.5 * most + num_pools
    assert min(mean) >= max(1.0, 0.3 * max(mean))


# ---------------------------------------------------------------------------- which engine is taken
versions = st.builds(Version, st.integers(0, 1), st.integers(0, 3))
engines = st.builds(
    Standing,
    url=st.sampled_from("abcdefgh"),
    up=st.sampled_from([True, True, True, False]),
    leaving=st.sampled_from([False, False, False, True]),
    version=st.none() | versions,
    limit=st.integers(1, 4),
    num_sent=st.integers(0, 5),
    num_others=st.integers(0, 9),
    doubted=st.sampled_from([float("-inf"), 5.0, 15.0]),
)
several = st.lists(engines, max_size=6, unique_by=lambda e: e.url)


@given(several, st.none() | versions, st.none() | versions, st.sets(st.sampled_from("abcdefgh")))
def test_only_engines_that_are_there_and_can_start_the_request_are_waited_for(
    there: list[Standing], least: Version | None, most: Version | None, tried: set[str]
) -> None:
    low, high = least or Version(0, 0), most or Version(9, 9)
    can = [e for e in there if e.up and not e.leaving and e.version and low <= e.version <= high]
    request = GenerateRequest(request_id="r", token_ids=(1,), min_version=least, max_version=most)
    wanted = able(request, tried, there)
    assert set(wanted) <= set(can)
    assert bool(wanted) == bool(can)
    if {e.url for e in can} - tried:
        assert not {e.url for e in wanted} & tried


@given(several, st.none() | st.sampled_from("abcdefgh"), st.integers(1, 4))
def test_an_engine_with_room_is_always_found_and_its_home_before_a_lesser_load(
    there: list[Standing], home: str | None, num_samples: int
) -> None:
    now = 10.0
    free = [e for e in there if e.has_room(num_samples)]
    found = best(there, home, num_samples, now)
    assert (found is not None) == bool(free)
    if found is None:
        return
    assert found in free
    trusted = [e for e in free if e.doubted <= now]
    assert found in (trusted or free)
    at_home = [e for e in (trusted or free) if e.url == home]
    if at_home:
        assert found in at_home
    else:
        assert found.load == min(e.load for e in (trusted or free))


@given(engines, st.integers(1, 9))
def test_an_engine_with_nothing_of_ours_takes_any_request(one: Standing, num_samples: int) -> None:
    one.num_sent = 0
    assert one.has_room(num_samples)
