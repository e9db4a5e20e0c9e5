"""The plumbing's own limit: trajectories a second from prompt to manifest when neither the engine
nor the optimizer costs anything.

    python -P -m benchmarks.plumbing
    python -P -m benchmarks.plumbing --client in-process     without HTTP between agent and engine
    python -P -m benchmarks.plumbing --profile PY_SPY        and where each process spends its time

Everything is a run's own: the embedded broker over TCP, the topics, bytewax with the rollout and
the reward stage in one process (a decoded text and `numeric_match` for each trajectory), the feed,
ledger, grants, step log, manifests and publishing. Only two parts stand in (`plumbing_roles`): the
engine answers each request at once with canned tokens and log-probs, by the product's HTTP server
in a process of its own; a step of the optimizer changes nothing. The prompts (16 ids each) are
written before.

The window is from the manifest of step WARM_STEPS to the last. CPU seconds are those of the
processes, all threads and children, in that window. One JSON object, then a table.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import tomli_w

from benchmarks.plumbing_roles import RIGHT
from connectors.config import Config, load
from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.locate import cluster as locate
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import Manifest, Prompt, encode
from connectors.run_dir import RunDir
from deploy.launcher import CHILD_ENVIRONMENT, headwater_command
from tests.models import tiny_model
from trainer.step_log import chain, read_steps

WARM_STEPS: Final = 10
PROMPT_TOKENS: Final = 16
SAMPLE_S: Final = 0.05
START_S: Final = 120.0
PROFILE_HZ: Final = 100
TOP: Final = 12

Cpu = Mapping[str, list[tuple[float, float]]]
"""By process: when (Unix seconds), and how many CPU seconds until then."""


def configuration(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    return {
        "run": {"name": "plumbing"},
        "kafka": {"partitions": arguments.partitions},
        "model": {"path": str(model), "context_tokens": 4096},
        "engine": {"max_running": 4096},
        "sampling": {"max_tokens": arguments.tokens},
        "tasks": {"canned": {"reward": "numeric_match", "group_size": arguments.group_size}},
        "staleness": {"policy": "deadline", "bound": 4, "lookahead": 2},
        "trainer": {"groups_per_step": arguments.groups, "num_steps": arguments.steps},
        "checkpoint": {"every_steps": 1_000_000},
    }


class Processes:
    """The roles under way, and the CPU they use."""

    def __init__(self, config_file: Path, run_dir: RunDir) -> None:
        self._place = [str(config_file), str(run_dir.path)]
        self._run_dir = run_dir
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._stop = threading.Event()
        self.cpu: dict[str, list[tuple[float, float]]] = {}

    def product(self, role: str) -> None:
        config, folder = self._place
        lifeline = ("--supervisor", os.getpid())
        self._start(role, headwater_command(role, config, "--run-dir", folder, *lifeline))

    def stand_in(self, role: str) -> None:
        module = "benchmarks.plumbing_roles"
        self._start(
            role, [sys.executable, "-P", "-m", module, role, *self._place, str(os.getpid())]
        )

    def _start(self, role: str, command: list[str]) -> None:
        log = self._run_dir.log_file(role)
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **CHILD_ENVIRONMENT, "PYTHONPATH": os.getcwd()}
        with log.open("ab") as file:
            self._started[role] = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment
            )
        self.cpu[role] = []
        deadline = time.monotonic() + START_S
        while not any(r.name == role or r.name == f"{role}-0" for r in self._run_dir.roles()):
            self.check(role)
            if time.monotonic() > deadline:
                raise SystemExit(f"{role} does not start")
            time.sleep(0.05)

    def check(self, role: str) -> None:
        if self._started[role].poll() not in (None, 0):
            raise SystemExit(f"{role} ended:\n{self._run_dir.log_file(role).read_text()[-3000:]}")

    def pid(self, role: str) -> int:
        return self._started[role].pid

    def wait(self, role: str) -> None:
        while self._started[role].poll() is None:
            for other in self._started:
                self.check(other)
            time.sleep(0.1)
        self.check(role)

    def watch(self) -> None:
        """Samples CPU times until `end`."""
        watched = {role: psutil.Process(p.pid) for role, p in self._started.items()}

        def sample() -> None:
            while not self._stop.wait(SAMPLE_S):
                for role, process in watched.items():
                    try:
                        used = process.cpu_times()
                    except psutil.Error:
                        continue
                    self.cpu[role].append((time.time(), used.user + used.system))

        threading.Thread(target=sample, daemon=True).start()

    def end(self) -> None:
        self._stop.set()
        for process in reversed(self._started.values()):
            process.terminate()
        for process in self._started.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def write_prompts(cluster: Cluster, config: Config) -> None:
    """As many as the run can be granted."""
    ahead = 8 * config.trainer.groups_per_step
    count = config.trainer.num_steps * config.trainer.groups_per_step + ahead
    value = encode(
        Prompt(task="canned", token_ids=[100 + i for i in range(PROMPT_TOKENS)], reward=RIGHT)
    )
    with closing(Producer(cluster)) as producer:
        for index in range(count):
            producer.send(cluster.topic("prompts"), index % config.kafka.partitions, value)
            if index % 1024 == 0:
                producer.flush()
        producer.flush()


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config_file = folder / "config.toml"
    model = tiny_model(folder / "model")
    config_file.write_text(tomli_w.dumps(configuration(arguments, model)))
    config, run_dir = load(config_file), RunDir(folder)
    with ExitStack() as stack:
        processes = Processes(config_file, run_dir)
        stack.callback(processes.end)
        processes.product("broker")
        cluster = locate(config, run_dir)
        ensure_topics(cluster, topics(config.kafka.partitions))
        write_prompts(cluster, config)
        processes.stand_in("engine")
        if arguments.client == "http":
            processes.product("dataflow")
        else:
            processes.stand_in("dataflow")
        processes.stand_in("trainer")
        processes.watch()
        profiles = stack.enter_context(profiled(arguments.profile, processes, folder))
        processes.wait("trainer")
        manifests = chain(read_steps(cluster))
        sizes = {
            (r.partition, r.offset): len(r.value)
            for r in read_all(
                cluster, cluster.topic("trajectories"), range(config.kafka.partitions)
            )
        }
    return figures(arguments, manifests, sizes, processes.cpu) | {
        "profile": {role: hot(path) for role, path in profiles.items()}
    }


def figures(
    arguments: argparse.Namespace,
    manifests: Sequence[Manifest],
    sizes: Mapping[tuple[int, int], int],
    cpu: Cpu,
) -> dict[str, Any]:
    first, last = manifests[WARM_STEPS - 1], manifests[-1]
    window_s = last.finished_at - first.finished_at
    records = [record for m in manifests[WARM_STEPS:] for record in m.records]
    num = len(records) * arguments.group_size
    num_bytes = sum(sizes[r.partition, r.offset] for r in records)
    seconds = {
        role: _at(samples, last.finished_at) - _at(samples, first.finished_at)
        for role, samples in cpu.items()
    }
    each = {role: round(1000 * used / num, 3) for role, used in seconds.items()}
    names = [n for n in last.metrics if n.startswith("seconds/")]
    later = manifests[WARM_STEPS:]
    return {
        "client": arguments.client,
        "tokens": arguments.tokens,
        "group_size": arguments.group_size,
        "groups_a_step": arguments.groups,
        "partitions": arguments.partitions,
        "steps": len(later),
        "window_s": round(window_s, 2),
        "trajectories_per_s": round(num / window_s, 1),
        "groups_per_s": round(len(records) / window_s, 1),
        "mb_per_s": round(num_bytes / window_s / 1e6, 2),
        "cpu_s_per_1000": each,
        "cpu_s_per_1000_sum": round(sum(each.values()), 3),
        "cores_used": round(sum(seconds.values()) / window_s, 2),
        "step_seconds": {
            n.removeprefix("seconds/"): round(sum(m.metrics[n] for m in later) / len(later), 4)
            for n in names if all(n in m.metrics for m in later)
        },
        "staleness_mean": round(sum(m.staleness["mean"] for m in later) / len(later), 2),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def _at(samples: list[tuple[float, float]], when: float) -> float:
    """CPU seconds until then, on the line between two samples."""
    after = bisect.bisect_left(samples, when, key=lambda sample: sample[0])
    after = min(max(after, 1), len(samples) - 1)
    (t0, used0), (t1, used1) = samples[after - 1], samples[after]
    return used0 + (used1 - used0) * min(1.0, max(0.0, (when - t0) / (t1 - t0)))


# ------------------------------------------------------------------------------------ the profile
@contextmanager
def profiled(py_spy: str | None, processes: Processes, folder: Path) -> Any:
    """py-spy's collapsed stacks of each role, by role: of threads that run, sampled until the
    end."""
    if py_spy is None:
        yield {}
        return
    paths = {role: folder / f"{role}.stacks" for role in processes.cpu}
    # One after the other is no way: they are sampled together, or they would not be one load.
    spies = [
        subprocess.Popen(
            [py_spy, "record", "--pid", str(processes.pid(role)), "--rate", str(PROFILE_HZ),
             "--format", "raw", "--output", str(path), "--nonblocking", "--duration", "100000"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for role, path in paths.items()
    ]  # fmt: skip
    try:
        yield paths
    finally:
        for spy in spies:
            spy.send_signal(2)
        for spy in spies:
            spy.wait(60)


def hot(path: Path) -> dict[str, Any]:
    """The functions in whose own code most samples lie, and those below which most lie."""
    own: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, count = line.rsplit(" ", 1)
        frames = [re.sub(r":\d+\)$", ")", frame) for frame in stack.split(";")]
        own[frames[-1]] += int(count)
        below.update(dict.fromkeys(frames, int(count)))
    total = max(1, own.total())
    return {
        name: {frame: round(count / total, 3) for frame, count in counts.most_common(3 * TOP)}
        for name, counts in (("own", own), ("with_callees", below))
    }


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{found['client']}: {found['trajectories_per_s']:g} trajectories/s of {found['tokens']} "
        f"tokens, {found['groups_per_s']:g} groups/s, {found['mb_per_s']:g} MB/s, "
        f"{found['cores_used']:g} cores",
        f"{'process':<12} CPU s per 1,000 trajectories",
    ]
    for role, used in found["cpu_s_per_1000"].items():
        lines.append(f"{role:<12} {used:8.3f}")
    lines.append(f"{'all':<12} {found['cpu_s_per_1000_sum']:8.3f}")
    for role, kinds in found["profile"].items():
        for kind, frames in kinds.items():
            lines.append(f"\n{role}: {kind.replace('_', ' ')}")
            lines += [f"  {share:6.1%}  {frame}" for frame, share in list(frames.items())]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--client", choices=("http", "in-process"), default="http")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32, help="a step")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--profile", metavar="PY_SPY", help="the py-spy program")
    parser.add_argument("--folder", type=Path, help="of the run, kept; a temporary one by default")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_STEPS:
        parser.error(f"--steps must be more than {WARM_STEPS}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(arguments, folder)
    print(json.dumps({k: v for k, v in found.items() if k != "profile"}))
    print(table(found))


if __name__ == "__main__":
    main()
