"""`headwater sft FILE`: a warm start from chat transcripts."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deploy import errors, gpus
from deploy.commands.arguments import Commands, add_json, command
from deploy.output import answer, stdout_for_answer

if TYPE_CHECKING:
    from trainer.sft import Lessons, Step


LINE_EVERY_S: Final = 15.0


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "sft",
        execute,
        "fine-tunes a model on chat transcripts, for a run to start from",
        "headwater sft chats.jsonl --model models/base --output models/warm --epochs 3",
    )
    parser.add_argument(
        "file", metavar="FILE", help="chats as JSON lines or a JSON array, also gzip: rows of "
        "messages (role, content, tool_calls) or of ShareGPT's conversations (from, value)",
    )  # fmt: skip
    for name, metavar, text in (
        ("--model", "PATH", "the Hugging Face model folder it starts from"),
        ("--output", "DIR", "the folder it writes, which is not there or empty"),
    ):
        parser.add_argument(name, metavar=metavar, help=text, required=True)
    parser.add_argument(
        "--format", choices=("auto", "messages", "sharegpt"), default="auto",
        help="of the rows (default: told apart row by row)",
    )  # fmt: skip
    numbers: tuple[tuple[str, Callable[[str], float], float | None, str], ...] = (
        ("--epochs", _count, 1, "how often each row is learnt"),
        ("--learning-rate", _positive, 1e-5, "the highest: it rises for some steps, then falls"),
        (
            "--batch-size",
            _count,
            16,
            "sequences a step: a row is one, or several where the template forks it",
        ),
        ("--threads", _count, None, "CPU threads; by default all that it may use"),
        ("--num-gpus", int, 0, "0 or 1"),
        ("--seed", int, 0, "of the rows' order"),
    )
    for name, kind, default, text in numbers:
        known = "" if default is None else " (default: %(default)s)"
        parser.add_argument(name, type=kind, default=default, metavar="N", help=text + known)
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights"
    )
    parser.add_argument(
        "--max-tokens", type=_count, metavar="N",
        help="longer rows are left out (default: 2048, or what the model has)",
    )  # fmt: skip
    parser.add_argument("--truncate", action="store_true", help="cut longer rows instead")
    add_json(parser)


def execute(arguments: argparse.Namespace) -> int:
    from connectors.config import ConfigError

    file, model, to = (
        Path(p).expanduser().resolve() for p in (arguments.file, arguments.model, arguments.output)
    )
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model: {model} holds no model (config.json is missing)")
    if arguments.num_gpus not in (0, 1):
        raise ConfigError(f"--num-gpus: one process trains on one GPU, got {arguments.num_gpus}")
    gpus.claim("--num-gpus", arguments.num_gpus)
    with stdout_for_answer(arguments.json):
        from trainer.export import check_target
        from trainer.sft import Recipe, fine_tune, read_lessons

        check_target(to)
        lessons = read_lessons(
            file, model, arguments.format, arguments.max_tokens, truncate=arguments.truncate
        )
        for line in _left_out(lessons):
            print(line, file=sys.stderr)
        recipe = Recipe(
            epochs=arguments.epochs,
            learning_rate=arguments.learning_rate,
            batch_size=arguments.batch_size,
            dtype=arguments.dtype,
            num_threads=arguments.threads or len(os.sched_getaffinity(0)),
            seed=arguments.seed,
        )
        with _progress() as on_step:
            steps = fine_tune(model, lessons, recipe, to, on_step)
    found = _answer(lessons, steps, to)
    answer(arguments.json, found, _lines(found))
    return errors.OK


def _answer(lessons: Lessons, steps: list[Step], to: Path) -> dict[str, Any]:
    losses = [step.loss for step in steps if step.loss is not None]
    return {
        "rows": lessons.num_rows,
        "sequences": len(lessons),
        "skipped": dict(lessons.skipped),
        "steps": len(losses),
        "steps_not_finite": len(steps) - len(losses),
        "tokens": sum(step.num_tokens for step in steps),
        "loss": {
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
        },
        "output": str(to),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    loss = found["loss"]
    lines = [f"{found['rows']} rows, {found['tokens']} tokens learnt in {found['steps']} steps"]
    if loss["first"] is not None:
        lines[0] += f": loss {loss['first']:.4g} at first, {loss['last']:.4g} at last"
    if lost := found["steps_not_finite"]:
        lines.append(f"{lost} steps changed nothing: their gradients were not finite")
    return [*lines, f"the model is in {found['output']}: name it as model.path"]


def _left_out(lessons: Lessons) -> list[str]:
    if not lessons.skipped:
        return []
    counts = ", ".join(f"{reason} {n}" for reason, n in lessons.skipped.most_common())
    return [*lessons.problems, f"{lessons.skipped.total()} rows left out: {counts}"]


@contextmanager
def _progress() -> Iterator[Callable[[Step], None]]:
    """A bar on stderr where that is a terminal, a line now and then elsewhere."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("fine-tuning"), BarColumn(), MofNCompleteColumn(),
        TextColumn("steps, loss {task.fields[loss]}"), TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, loss="-")
        said_at = time.monotonic()

        def on_step(step: Step) -> None:
            nonlocal said_at
            loss = "not finite" if step.loss is None else f"{step.loss:.4g}"
            bar.update(task, total=step.num_steps, completed=step.number, loss=loss)
            if not console.is_terminal and time.monotonic() - said_at > LINE_EVERY_S:
                console.print(f"step {step.number} of {step.num_steps}, loss {loss}")
                said_at = time.monotonic()

        yield on_step


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _positive(text: str) -> float:
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return number
