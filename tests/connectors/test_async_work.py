"""The async operator's logic, driven by hand and in a flow."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from datetime import UTC, datetime
from typing import Literal

import bytewax.operators as op
import pytest
from bytewax.dataflow import Dataflow
from bytewax.testing import TestingSink, TestingSource, run_main

from connectors.kafka.async_op import AsyncLogic, AsyncWork
from connectors.kafka.source import Item, StopFlag
from connectors.records import Cancel, Origin, Version


def item(offset: int, version: Version | None = None) -> Item:
    return Item(origin=Origin("prompts", 1, offset), record=None, min_version=version)


class Gate:
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        self.started: list[Item] = []
        self._open: dict[int, threading.Event] = {}

    def let(self, offset: int) -> None:
        self._open.setdefault(offset, threading.Event()).set()

    async def __call__(self, given: Item) -> list[str]:
        self.started.append(given)
        gate = self._open.setdefault(given.origin.offset, threading.Event())
        while not gate.is_set():
            await asyncio.sleep(0.001)
        return [f"{given.origin.offset} done"]


def drained(logic: AsyncLogic[str], count: int) -> list[str]:
    """Outputs of `count` completions, asked for at the times the logic wants to be asked."""
    found: list[str] = []
    deadline = time.monotonic() + 20
    while len(found) < count:
        due = logic.notify_at()
        assert due is not None
        assert due.tzinfo is not None
        time.sleep(max(0.0, (due - datetime.now(UTC)).total_seconds()))
        outputs, discard = logic.on_notify()
        found += outputs
        assert discard is False
        assert time.monotonic() < deadline
    return found


def refused(partition: int, offset: int) -> Item:
    raise AssertionError("nothing to fetch again")


def test_completions_come_out_in_the_order_they_end() -> None:
    gate = Gate()
    logic = AsyncWork(gate, refused, stop=StopFlag())(None)
    assert logic.notify_at() is None
    assert logic.on_batch([item(0), item(1), item(2)]) == ([], False)
    for offset in (2, 0):
        gate.let(offset)
        assert drained(logic, 1) == [f"{offset} done"]
    assert logic.snapshot() == ((1, 1, None),)
    gate.let(1)
    assert drained(logic, 1) == ["1 done"]
    assert logic.snapshot() == ()
    assert logic.notify_at() is None


def test_the_snapshot_holds_offsets_in_flight_and_a_restart_submits_them_again() -> None:
    gate = Gate()
    logic = AsyncWork(gate, refused, stop=StopFlag())(None)
    logic.on_batch([item(4, Version(1, 7)), item(5)])
    state = pickle.loads(pickle.dumps(logic.snapshot()))
    fetched: list[tuple[int, int]] = []

    def refetch(partition: int, offset: int) -> Item:
        fetched.append((partition, offset))
        return item(offset)

    again = Gate()
    resumed = AsyncWork(again, refetch, stop=StopFlag())(state)
    assert fetched == [(1, 4), (1, 5)]
    assert resumed.snapshot() == state
    for offset in (4, 5):
        again.let(offset)
    assert sorted(drained(resumed, 2)) == ["4 done", "5 done"]
    versions = {i.origin.offset: (i.min_version, i.resubmitted) for i in again.started}
    assert versions == {4: (Version(1, 7), True), 5: (None, True)}
    assert not any(i.resubmitted for i in gate.started)
    for offset in (4, 5):
        gate.let(offset)


def order(offset: int, then: Literal["requeue", "close"], version: int | None = None) -> Item:
    return Item(
        origin=Origin("prompts", 1, offset),
        record=None,
        min_version=None if version is None else Version(0, version),
        cancel=Cancel(f"prompts/1/{offset}", then, "stale"),
    )


class Obeying:
    """Work that ends at the second order it is given; it gives out what they were."""

    async def __call__(self, given: Item) -> list[str]:
        assert given.orders is not None
        orders = [await given.orders.take() for _ in range(2)]
        return [f"{cancel.then} {version}" for cancel, version in orders]


def test_a_cancel_reaches_the_work_of_its_item_once_and_no_other() -> None:
    logic = AsyncWork(Obeying(), refused, stop=StopFlag())(None)
    logic.on_batch([item(0, Version(0, 1)), item(1, Version(0, 1))])
    logic.on_batch([order(7, "close", 5)])  # it has ended, or never began
    logic.on_batch([order(0, "requeue", 1)])  # it starts no earlier anyway
    logic.on_batch([order(0, "requeue", 3), order(0, "requeue", 3)])
    assert logic.snapshot() == ((1, 0, (0, 3)), (1, 1, (0, 1)))
    later = [order(0, "close", 4), order(0, "close", 5), order(0, "requeue", 6)]
    found, _ = logic.on_batch(later)
    assert (found or drained(logic, 1)) == ["requeue 0.3", "close 0.4"]
    assert logic.snapshot() == ((1, 1, (0, 1)),)


def test_a_restarted_worker_remembers_what_was_demanded_until_it_is_done() -> None:
    logic = AsyncWork(Obeying(), refused, stop=StopFlag())(None)
    logic.on_batch([item(0, Version(0, 1)), item(1, Version(0, 1))])
    logic.on_batch([order(0, "requeue", 3), order(1, "close", 3)])
    state = pickle.loads(pickle.dumps(logic.snapshot()))
    assert state == ((1, 0, (0, 3)), (1, 1, (0, 1), "stale"))
    heard: list[tuple[int, str]] = []

    async def work(given: Item) -> list[str]:
        assert given.orders is not None
        cancel, _ = await given.orders.take()
        heard.append((given.origin.offset, cancel.then))
        return [f"{given.origin.offset} {given.min_version} {cancel.then} {cancel.reason}"]

    resumed = AsyncWork(work, lambda p, o: item(o), stop=StopFlag())(state)
    assert resumed.snapshot() == state
    assert drained(resumed, 1) == ["1 0.1 close stale"]
    resumed.on_batch([order(0, "requeue", 3)])  # read once more: it was obeyed
    found, _ = resumed.on_batch([order(0, "requeue", 4)])
    assert (found or drained(resumed, 1)) == ["0 0.3 requeue stale"]
    assert heard == [(1, "close"), (0, "requeue")]


def test_an_exception_in_the_work_is_raised_in_the_worker() -> None:
    async def broken(given: Item) -> list[str]:
        raise ZeroDivisionError("a broken invariant")

    logic = AsyncWork(broken, refused, stop=StopFlag())(None)
    with pytest.raises(ZeroDivisionError, match="a broken invariant"):  # noqa: PT012
        logic.on_batch([item(0)])  # it may have failed already
        drained(logic, 1)


def test_the_end_of_the_input_waits_for_the_work_unless_stopping() -> None:
    stop, gate = StopFlag(), Gate()
    logic = AsyncWork(gate, refused, stop=stop)(None)
    logic.on_batch([item(0)])
    threading.Timer(0.05, gate.let, [0]).start()
    assert logic.on_eof() == (["0 done"], False)
    logic.on_batch([item(1)])
    stop.set()
    assert logic.on_eof() == ([], False)
    assert logic.snapshot() == ((1, 1, None),)
    gate.let(1)


def test_a_flow_emits_every_output_under_its_key() -> None:
    async def twice(given: Item) -> list[int]:
        await asyncio.sleep(0.001 * (given.origin.offset % 7))
        return [given.origin.offset, -given.origin.offset]

    found: list[tuple[str, int]] = []
    flow = Dataflow("flow")
    stream = op.input("in", flow, TestingSource([(str(n % 2), item(n)) for n in range(1, 51)]))
    done = op.stateful_batch("work", stream, AsyncWork(twice, refused, stop=StopFlag()))
    op.output("out", done, TestingSink(found))
    run_main(flow)
    assert sorted(found) == sorted((str(n % 2), s * n) for n in range(1, 51) for s in (1, -1))
