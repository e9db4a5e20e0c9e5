"""The task of the SmolLM2 example: a number in words, to be written in digits.

    python examples/smollm2/prompts.py      writes prompts.jsonl and eval.jsonl beside itself

All numbers from 100 to 999, each once: the held-out ones are never trained on.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

NUM_HELD_OUT = 128
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
EXAMPLE = 562
"""Shown in each prompt, solved, so it is nobody's question."""


def in_words(number: int) -> str:
    """English words of a number below 1000."""
    if number < 20:
        return ONES[number]
    if number < 100:
        ten, one = divmod(number, 10)
        return TENS[ten - 2] + (f"-{ONES[one]}" if one else "")
    hundred, rest = divmod(number, 100)
    return f"{ONES[hundred]} hundred" + (f" {in_words(rest)}" if rest else "")


def prompt(number: int) -> str:
    """The line that asks for `number`: a short instruction, one solved example, the question."""
    messages = [
        {"role": "system", "content": "Write the number in digits."},
        {"role": "user", "content": in_words(EXAMPLE)},
        {"role": "assistant", "content": str(EXAMPLE)},
        {"role": "user", "content": in_words(number)},
    ]
    return json.dumps({"messages": messages, "reward": str(number)}) + "\n"


def write(folder: Path, seed: int = 0) -> None:
    """`prompts.jsonl` and `eval.jsonl`, the same ones each time."""
    numbers = [number for number in range(100, 1000) if number != EXAMPLE]
    random.Random(seed).shuffle(numbers)
    held_out, trained = numbers[:NUM_HELD_OUT], numbers[NUM_HELD_OUT:]
    (folder / "eval.jsonl").write_text("".join(map(prompt, held_out)))
    (folder / "prompts.jsonl").write_text("".join(map(prompt, trained)))


if __name__ == "__main__":
    write(Path(__file__).parent)
