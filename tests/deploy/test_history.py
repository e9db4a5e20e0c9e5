"""What became of each prompt, against plain sets; which versions lead to the current weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connectors.records import Fork, Version
from deploy.history import ARRIVED, CLOSED, DROPPED, REFUNDED, TRAINED, Line, Prompts

FATES = (ARRIVED, CLOSED, DROPPED, REFUNDED, TRAINED)
PLACES = st.tuples(st.integers(0, 1), st.integers(0, 5))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("grant"), PLACES, st.just(0)),
            st.tuples(st.sampled_from(["mark", "unmark"]), PLACES, st.sampled_from(FATES)),
        ),
        max_size=30,
    )
)
def test_counts_are_those_of_the_granted_prompts_whatever_is_read_first(
    acts: list[tuple[str, tuple[int, int], int]],
) -> None:
    prompts, limits = Prompts("p"), [0, 0]
    fates: dict[tuple[int, int], set[int]] = {}
    for what, (partition, offset), fate in acts:
        if what == "grant":
            limits[partition] = max(limits[partition], offset)
            prompts.grant(limits)
        elif what == "mark":
            prompts.mark((partition, offset), fate)
            fates.setdefault((partition, offset), set()).add(fate)
        else:
            prompts.unmark((partition, offset), fate)
            fates.get((partition, offset), set()).discard(fate)
    prompts.grant(limits)
    granted = [(p, o) for p in (0, 1) for o in range(limits[p])]
    of = [fates.get(place, set()) for place in granted]
    assert prompts.num_granted == len(granted)
    assert prompts.closed == sum(CLOSED in f for f in of)
    assert prompts.dropped == sum(bool({DROPPED, REFUNDED} & f) and CLOSED not in f for f in of)
    assert prompts.arrived == sum(ARRIVED in f for f in of)
    assert prompts.open == sum(not f - {ARRIVED} for f in of)
    assert [prompts.fate(place) for place in granted] == [sum(f) for f in of]
    assert not any(prompts.granted(place) for place in prompts.early)


def test_a_foreign_id_names_no_prompt() -> None:
    prompts = Prompts("a.prompts")
    assert prompts.place("a.prompts/1/20") == (1, 20)
    for wrong in ("b.prompts/1/20", "a.prompts/1", "a.prompts/1/-2", "a.prompts/01/2", "x"):
        assert prompts.place(wrong) is None


def test_the_line_ends_where_rollbacks_left_it_and_goes_through_rebuilds() -> None:
    lineage = {
        1: Fork(parent=0, number=10, reason="rollback"),
        2: Fork(parent=1, number=14, reason="rebuild"),
        3: Fork(parent=2, number=7, reason="rollback"),
    }
    line = Line(3, lineage)
    for version in (Version(3, 99), Version(2, 7), Version(1, 7), Version(0, 7), Version(0, 0)):
        assert version in line
    for version in (Version(2, 8), Version(1, 8), Version(0, 8), Version(4, 1)):
        assert version not in line
    assert Version(1, 14) in Line(2, lineage)
    assert Version(0, 11) not in Line(2, lineage)
