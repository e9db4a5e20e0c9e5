"""What an engine holds after turns that ended well, badly or not at all."""

from __future__ import annotations

import pytest

from connectors.records import Version
from connectors.weights import Ack, EpochRefused, FenceRequest, Holding, RelabelRequest
from connectors.weights.wire import DigestMismatch, UpdateAborted

FIRST, SECOND = Version(0, 1), Version(0, 2)


@pytest.fixture
def holding() -> Holding:
    """Holds the first version."""
    made = Holding("loaded")
    made.admit(1)
    made.hold(made.begin_turn(), FIRST, "first")
    return made


def held(holding: Holding) -> tuple[Version | None, str]:
    return holding.version, holding.digest


def test_an_engine_starts_with_bytes_but_without_a_version() -> None:
    holding = Holding("loaded")

    assert (held(holding), holding.epoch) == ((None, "loaded"), -1)
    assert held(Holding()) == (None, "")


def test_an_update_called_off_before_its_first_byte_costs_nothing(holding: Holding) -> None:
    turn = holding.begin_turn()
    holding.lose(turn)

    assert held(holding) == (FIRST, "first")


def test_an_update_that_breaks_off_after_its_first_byte_costs_the_version_not_the_bytes(
    holding: Holding,
) -> None:
    turn = holding.begin_turn()
    holding.began(turn)
    assert held(holding) == (FIRST, "first"), "it is still what is generated with"
    holding.lose(turn)

    assert held(holding) == (None, "first")
    holding.relabel(RelabelRequest(epoch=1, version=FIRST, digest="first"))
    assert held(holding) == (FIRST, "first")


def test_an_update_that_breaks_off_in_the_model_leaves_neither_until_the_next(
    holding: Holding,
) -> None:
    turn = holding.begin_turn()
    holding.touched(turn)
    holding.lose(turn)

    assert held(holding) == (None, "")
    ack = holding.hold(holding.begin_turn(), SECOND, "second")
    assert ack == Ack(version=SECOND, digest="second")
    assert held(holding) == (SECOND, "second")


@pytest.mark.parametrize("by", ["another update", "a newer trainer"])
def test_what_an_overtaken_turn_still_does_changes_nothing(holding: Holding, by: str) -> None:
    late = holding.begin_turn()
    holding.began(late)
    if by == "another update":
        holding.begin_turn()
    else:
        holding.fence(FenceRequest(epoch=2))
    assert held(holding) == (None, "first")

    assert not holding.is_current(late)
    for act in (
        lambda: holding.began(late),
        lambda: holding.touched(late),
        lambda: holding.hold(late, SECOND, "second"),
    ):
        with pytest.raises(UpdateAborted):
            act()
    holding.lose(late)
    assert held(holding) == (None, "first")


def test_a_trainer_older_than_one_met_is_refused(holding: Holding) -> None:
    holding.admit(3)
    turn = holding.begin_turn()

    for act in (
        lambda: holding.admit(2),
        lambda: holding.fence(FenceRequest(epoch=2)),
        lambda: holding.relabel(RelabelRequest(epoch=2, version=SECOND, digest="first")),
    ):
        with pytest.raises(EpochRefused):
            act()
    holding.admit(3)
    assert (holding.epoch, holding.is_current(turn)) == (3, True)
    assert held(holding) == (FIRST, "first")


def test_a_relabel_needs_the_very_bytes(holding: Holding) -> None:
    with pytest.raises(DigestMismatch, match="holds first"):
        holding.relabel(RelabelRequest(epoch=1, version=SECOND, digest="second"))
    assert held(holding) == (FIRST, "first")

    holding.relabel(RelabelRequest(epoch=1, version=SECOND, digest="first"))
    assert held(holding) == (SECOND, "first")


def test_a_turn_leaves_the_group_unless_it_keeps_it() -> None:
    left: list[None] = []
    holding = Holding(void=lambda: left.append(None))

    holding.begin_turn(keep_group=True)
    assert left == []
    holding.begin_turn()
    holding.admit(1)
    assert len(left) == 2
