"""An agent whose rollouts have a long tail: it answers as `single_turn` does, then waits as for a
tool call, log-normally long.

    tasks.sort.agent = "benchmarks/long_tail.py:rollout"

How long depends on the prompt and on how many samples of it came before, on nothing else: every run
that begins anew waits as long for the n-th sample of a prompt, whatever its policy or its weights.
"""

from __future__ import annotations

import hashlib
import json
from asyncio import sleep
from collections import Counter
from typing import Final

import numpy as np

from connectors.records import Prompt
from operators.agents import LLM, Outcome, Tools

MEDIAN_S: Final = 0.08
SIGMA: Final = 1.1
LONGEST_S: Final = 2.5
SAID: Final = f"log-normal, median {MEDIAN_S:g} s, sigma {SIGMA:g}, at most {LONGEST_S:g} s"

_samples: Counter[str] = Counter()


async def rollout(prompt: Prompt, llm: LLM, tools: Tools) -> Outcome:
    if prompt.messages is None:
        raise ValueError("needs messages")
    name = prompt.id or json.dumps(prompt.messages)
    number = _samples[name]  # the group's samples start in order
    _samples[name] += 1
    await llm.chat(prompt.messages)
    waits_s = wait_s(name, number)
    await sleep(waits_s)
    return Outcome(metadata={"waited_s": f"{waits_s:.3f}"})


def wait_s(name: str, number: int) -> float:
    """Of the `number`-th sample of the prompt `name`."""
    digest = hashlib.blake2b(f"{name}/{number}".encode(), digest_size=8).digest()
    normal = np.random.default_rng(int.from_bytes(digest, "big")).standard_normal()
    return min(LONGEST_S, MEDIAN_S * float(np.exp(SIGMA * normal)))
