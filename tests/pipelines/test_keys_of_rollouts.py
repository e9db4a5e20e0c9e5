"""One terminal a prompt reaches the scorers."""

from __future__ import annotations

from connectors.kafka.client import Record
from connectors.kafka.source import Item
from connectors.records import Origin
from connectors.settled import Intervals
from pipelines.reward import first_terminal


def passed(*keys: str, partition: int = 0) -> list[str]:
    """The keys of the records of one partition of `rollouts` that pass."""
    first, settled, found = first_terminal("t.prompts"), None, []
    for offset, key in enumerate(keys):
        origin = Origin("t.rollouts", partition, offset)
        record = Record(
            topic=origin.topic,
            partition=partition,
            offset=offset,
            key=key.encode(),
            value=b"",
            headers={},
            timestamp_ms=0,
        )
        state: Intervals
        state, items = first(settled, Item(origin=origin, record=record))
        settled = state
        found += [key] * len(items)
    return found


def test_a_second_terminal_of_a_prompt_is_dropped() -> None:
    assert passed("t.prompts/0/0", "t.prompts/0/1", "t.prompts/0/0") == [
        "t.prompts/0/0",
        "t.prompts/0/1",
    ]


def test_a_key_that_is_no_prompts_of_the_partition_takes_no_prompts_place() -> None:
    foreign = ["other/0/5", "t.prompts/1/5", "t.prompts/0/05", "t.prompts/0/ 5", "5"]
    assert passed(*foreign, "t.prompts/0/5") == [*foreign, "t.prompts/0/5"]
