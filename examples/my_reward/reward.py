"""Scores one answer: 1.0 when its last number is the right one, and a little for being a number."""

import re


def score(sample, prompt):
    """`sample.text` is what the model wrote, `prompt.reward` what prompts.jsonl has for it. Return
    a number, or a mapping with "reward" and parts to keep beside it. A function that waits for a
    judge or a sandbox may be `async def`. Raising means "ask again", never zero."""
    numbers = re.findall(r"-?\d+", sample.text)
    correct = float(bool(numbers) and numbers[-1] == str(prompt.reward))
    digits = sum(c.isdigit() for c in sample.text) / max(len(sample.text), 1)
    return {"reward": correct + 0.5 * digits, "correct": correct, "digits": digits}
