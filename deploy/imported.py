"""What an import did, or would do: counts, an example of each problem, what the run refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.algorithms import ESTIMATORS, needs_behaviour
from connectors.config import Config


@dataclass(slots=True)
class Imported:
    """`read`: rows and spans, whatever became of them. `examples`: where the first of each reason
    stands, and what is wrong with it."""

    files: int = 0
    read: int = 0
    written: int = 0
    calls: int = 0
    feedback: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    classes: Counter[str] = field(default_factory=Counter)
    why: Counter[str] = field(default_factory=Counter)
    tasks: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    known: set[int] = field(default_factory=set, repr=False)
    sessions: set[int] = field(default_factory=set, repr=False)

    def skip(self, where: str, reason: str, message: str) -> None:
        self.skipped[reason] += 1
        self.examples.setdefault(reason, f"{where}: {message}")

    @property
    def format(self) -> str:
        return "+".join(sorted(self.formats)) or "none"

    def as_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "files": self.files,
            "read": self.read,
            "written": self.written,
            "rejected": self.skipped.total(),
            "sessions": len(self.sessions),
            "calls": self.calls,
            "feedback": self.feedback,
            "classes": dict(self.classes),
            "tasks": dict(self.tasks),
            "skipped": dict(self.skipped),
            "examples": self.examples,
            "noted": self.noted,
            "refused": self.refused,
        }


def refused(config: Config, done: Imported) -> Iterator[str]:
    """What the run's configuration will not train on, and what to set."""
    trainer, num_text = config.trainer, done.classes["text"]
    needed = needs_behaviour(
        loss=trainer.loss,
        proximal=trainer.proximal,
        correction=trainer.correction,
        rejection=trainer.rejection,
    )
    if num_text and needed is not None:
        yield (
            f"{num_text} calls of class text: {needed} reads the log-probs of the policy that "
            'sampled; trainer.loss = "imitation" with correction and rejection "none" takes them'
        )
    if done.calls and config.nearline is None:
        yield f"{done.calls} calls: without a section [nearline] nothing makes groups of them"
    if done.calls and ESTIMATORS[trainer.advantage].needs_group:
        yield (
            f"{done.calls} calls: trainer.advantage {trainer.advantage!r} compares the samples of "
            "one prompt, and a session is one"
        )
    labelled = [name for name in done.tasks if config.tasks[name].reward == "feedback"]
    if labelled and not done.feedback:
        yield f"sessions of {', '.join(sorted(labelled))} wait for feedback: none was read here"


def summary(done: Imported, *, dry_run: bool) -> Sequence[str]:
    """For people."""
    verb = "would be written" if dry_run else "written"
    num = done.calls + done.feedback
    lines = [
        f"{done.read} rows of {done.files} files ({done.format}): {num} records {verb}, "
        f"{done.calls} calls and {done.feedback} feedback of {len(done.sessions)} sessions; "
        f"{done.skipped.total()} left out",
    ]
    lines += [f"  {name}: {count} calls" for name, count in sorted(done.classes.items())]
    lines += [f"    {count} {why}" for why, count in done.why.most_common()]
    tasks = done.tasks.most_common()
    lines += [f"  task {name or '(none)'}: {count} calls" for name, count in tasks]
    lines += [
        f"  left out: {count} {reason}, first {done.examples[reason]}"
        for reason, count in done.skipped.most_common()
    ]
    lines += [f"  {count} {name.replace('_', ' ')}" for name, count in done.noted.items() if count]
    return [*lines, *(f"  refused: {line}" for line in done.refused)]
