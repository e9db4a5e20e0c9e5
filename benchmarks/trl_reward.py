"""The rewards of the comparison with TRL, as both sides call them. Standard library alone: two
interpreters load it.

    tasks.sort.reward = "benchmarks/trl_reward.py:slow"
"""

from __future__ import annotations

from asyncio import sleep
from collections.abc import Mapping
from typing import Any


async def slow(sample: Any, prompt: Any) -> float:
    """What Headwater asks: `prompt.reward` has `answer` and `sleep_s`."""
    return await judged(sample.text, prompt.reward)


async def judged(text: str, wanted: Mapping[str, Any]) -> float:
    """`exact` after a sleep, as of a judge elsewhere: it takes no processor, and any number of them
    go on side by side."""
    await sleep(wanted["sleep_s"])
    return exact(text, wanted["answer"])


def exact(text: str, answer: str) -> float:
    """Headwater's `exact_match`."""
    return float(text.strip() == answer.strip())
