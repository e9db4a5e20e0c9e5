"""One role alone: what the supervisor starts, and what a deployment of its own starts on each
machine.

Every role takes CONFIG and the run's folder, in which it finds the others. SIGTERM ends it with
exit 0.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from connectors.signals import stop_on_signals
from deploy import gpus
from deploy.commands.arguments import Commands, add_config, command, load_config
from deploy.lifeline import die_with

if TYPE_CHECKING:
    from connectors.config import Config
    from connectors.run_dir import RunDir

Role = Callable[["Config", "RunDir", argparse.Namespace], None]


def add(commands: Commands) -> None:
    """Declares broker, engine, gateway, rollout, reward, dataflow, nearline, feeder, evaluate and
    trainer."""
    for name, (role, summary) in _ROLES.items():
        parser = command(
            commands,
            name,
            _execute(role),
            summary,
            f"headwater {name} runs/quickstart/config.toml --run-dir runs/quickstart",
        )
        add_config(parser)
        parser.add_argument("--supervisor", type=int, metavar="PID", help=argparse.SUPPRESS)
        if name in ("broker", "engine", "gateway"):
            parser.add_argument("--port", type=int, help="port to serve on (default: a free one)")
        if name == "broker":
            parser.add_argument("--while-read", action="store_true", help=argparse.SUPPRESS)
        if name == "engine":
            parser.add_argument("--name", default="engine-0", help="its name within the run")
        if name == "trainer":
            parser.add_argument(
                "--stop-after-steps", type=int, metavar="N", help="end once the run has N steps"
            )


def _execute(role: Role) -> Callable[[argparse.Namespace], int]:
    def execute(arguments: argparse.Namespace) -> int:
        if arguments.supervisor is not None:
            die_with(arguments.supervisor)
        config, run_dir = load_config(arguments)
        role(config, run_dir, arguments)
        return 0

    return execute


def _broker(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    from deploy.log import serve_broker

    serve_broker(config, run_dir, arguments.port, while_read=arguments.while_read)


def _engine(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    from connectors.engines.server import serve_engine

    gpus.claim("engine.num_gpus", config.engine.num_gpus)
    serve_engine(config, run_dir, arguments.name, port=arguments.port or 0)


def _gateway(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    from connectors.gateway.role import serve_gateway

    serve_gateway(config, run_dir, port=arguments.port)


def _dataflow(*stages: str) -> Role:
    def start(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
        from pipelines.job import run_dataflow

        run_dataflow(config, run_dir, set(stages))

    return start


def _nearline(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    gpus.claim("trainer.num_gpus", 0)  # what a log lacks is computed on the CPU
    from functools import partial

    from connectors.kafka.locate import cluster
    from deploy.recompute import Recompute
    from pipelines.nearline_job import run_nearline

    recompute = Recompute(config, run_dir, partial(cluster, config, run_dir))
    run_nearline(config, run_dir, recompute)


def _feeder(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    from connectors.kafka.feeder import feed_prompts
    from connectors.kafka.locate import cluster

    run_dir.register("feeder")
    feed_prompts(cluster(config, run_dir), config, stop_on_signals(threading.Event()))


def _evaluate(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    from pipelines.evaluate import evaluate

    run_dir.register("evaluate")
    evaluate(config, run_dir, stop_on_signals(threading.Event()))


def _trainer(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> None:
    gpus.claim("trainer.num_gpus", config.trainer.num_gpus)
    from trainer.loop import train

    limit = arguments.stop_after_steps
    if limit is not None and limit < config.trainer.num_steps:
        section = config.trainer.model_copy(update={"num_steps": limit})
        config = config.model_copy(update={"trainer": section})
    train(config, run_dir)


_ROLES: dict[str, tuple[Role, str]] = {
    "broker": (_broker, "serves the Kafka protocol from the run's folder"),
    "engine": (_engine, "generates: token ids in; ids, log-probs and versions out"),
    "gateway": (_gateway, "serves the model to applications, as OpenAI does, and records it"),
    "rollout": (_dataflow("rollout"), "turns granted prompts into groups of trajectories"),
    "reward": (_dataflow("reward"), "scores groups and filters them by version"),
    "dataflow": (_dataflow("rollout", "reward"), "rollout and reward in one job"),
    "nearline": (_nearline, "turns live traffic and what was said about it into groups"),
    "feeder": (
        _feeder,
        "keeps `prompts` ahead of the grants for tasks that name a file or generator",
    ),
    "evaluate": (_evaluate, "scores held-out prompts every few versions"),
    "trainer": (_trainer, "trains on trajectories, publishes weights, checkpoints"),
}
