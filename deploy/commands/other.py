"""Other consumers of a run's log: shadow, a second trainer, and rescore, a second reward."""

from __future__ import annotations

import argparse
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from connectors.signals import stop_on_signals
from deploy import errors, gpus
from deploy.commands.arguments import (
    Commands,
    add_json,
    add_overrides,
    add_run,
    command,
    load_run,
)
from deploy.commands.read_log import add_range
from deploy.commands.run import steps
from deploy.output import answer, stdout_for_answer

if TYPE_CHECKING:
    from connectors.config import Config

AWAY_S = 60.0
"""How long these commands, which may run for days, wait for a broker that restarts."""


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "shadow",
        shadow,
        "trains a second time on a run's trajectories, with other settings, for nobody",
        "headwater shadow runs/quickstart runs/half_rate --set trainer.learning_rate=5e-6",
    )
    add_run(parser)
    parser.add_argument("dir", metavar="DIR", help="the shadow's own folder; it goes on from it")
    parser.add_argument(
        "--steps", type=steps, metavar="N", help="end once it has N steps in all "
        "(default: trainer.num_steps)",
    )  # fmt: skip
    parser.add_argument(
        "--trajectories", metavar="NS", help="train on another namespace, e.g. a rescored one"
    )
    parser.add_argument(
        "--follow", action="store_true",
        help="wait at the log's end (default: only while the run is at work on this machine)",
    )  # fmt: skip
    add_overrides(parser)
    add_json(parser)
    parser = command(
        commands,
        "rescore",
        rescore,
        "scores a run's rollouts again, with another reward, into another namespace",
        "headwater rescore runs/quickstart --reward strict.py:score --namespace strict.",
    )
    add_run(parser)
    parser.add_argument("--reward", required=True, metavar="SPEC", help="as a task's reward")
    parser.add_argument("--namespace", required=True, metavar="NS", help="prefix of its topics")
    parser.add_argument("--task", metavar="T", help="only groups of this task")
    add_range(parser)
    add_json(parser)


def shadow(arguments: argparse.Namespace) -> int:
    from connectors.run_dir import RunDir

    load_run(arguments)
    run, folder = RunDir(arguments.run), RunDir(arguments.dir)
    from deploy import run_folder
    from deploy import shadow as folders
    from deploy.log import opened

    folders.check_overrides(arguments.overrides)
    folders.check_folder(folder)
    namespace = arguments.trajectories and _prefix(arguments.trajectories)
    with stdout_for_answer(arguments.json), run_folder.locked(folder):
        if folder.config_file.is_file():
            folders.resume(run, folder, arguments.overrides, namespace)
        else:
            with opened(run_folder.load_run(run), run) as log:
                folders.make(run, folder, log, arguments.overrides, namespace)
        config = _limited(run_folder.load_run(folder), arguments.steps)
        gpus.claim("trainer.num_gpus", config.trainer.num_gpus)
        from trainer.shadow import shadow as train

        with opened(config, folder) as cluster:
            trained = train(
                config,
                folder,
                replace(cluster, unavailable_s=AWAY_S),
                stop_on_signals(threading.Event()),
                follow=arguments.follow or folders.is_at_work(run),
            )
    counts = trained.counts
    found = {
        "resumed_step": trained.resumed_step,
        "step": trained.step,
        "digest": trained.digest,
        "trained": counts.trained,
        "passed_over": counts.closed,
        "passed_over_by_reason": counts.closed_by_reason,
    }
    line = f"step {trained.step}, digest {trained.digest}: {counts.trained} groups trained, "
    lines = [f"{line}{counts.closed} passed over"]
    if trained.step == trained.resumed_step:
        is_there = trained.step >= config.trainer.num_steps
        why = f"it was to end at {config.trainer.num_steps}" if is_there else "the log has no more"
        lines.append(f"it was at step {trained.step} already and trained nothing: {why}")
    answer(arguments.json, found, lines)
    return errors.OK


def rescore(arguments: argparse.Namespace) -> int:
    config, run_dir = load_run(arguments)
    from deploy.log import opened
    from deploy.rescore import reward_spec, span
    from pipelines.rescore import rescore as score_again

    stop = stop_on_signals(threading.Event())
    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        given = arguments.since or arguments.until
        done = score_again(
            config,
            run_dir,
            replace(cluster, unavailable_s=AWAY_S),
            _prefix(arguments.namespace),
            reward=reward_spec(config, arguments.reward),
            task=arguments.task,
            span=span(cluster, arguments.since, arguments.until) if given else None,
            stop=stop,
        )
    found = {
        "namespace": _prefix(arguments.namespace),
        "done": done.done,
        "from": done.what.first,
        "to": {p: at - 1 for p, at in done.what.stop.items()},
        "written": done.written,
        "records": done.records,
        "dead_letters": done.dead_letters,
    }
    state = "done" if done.done else "stopped: the same command goes on"
    lines = [
        f"{done.written} records written now; {found['namespace']} holds {done.records}, and "
        f"{done.dead_letters} dead letters; {state}"
    ]
    answer(arguments.json, found, lines)
    return errors.OK if done.done else errors.FAILED


def _limited(config: Config, num_steps: int | None) -> Config:
    if num_steps is None:
        return config
    section = config.trainer.model_copy(update={"num_steps": num_steps})
    return config.model_copy(update={"trainer": section})


def _prefix(namespace: str) -> str:
    """A topic's name goes on after a dot."""
    return namespace if namespace.endswith(".") else namespace + "."
