"""Where a run's time goes, from its log: shares of the time from step to step.

    python benchmarks/shares.py runs/smollm2

The trainer does one thing at a time, so the first table adds up to the whole:

waiting     for scored groups: the rollout is behind
forward     log-probs of the step's rows
update      gradients and the optimizer
snapshot    the copy of the weights that is published, and its digest
checkpoint  the copy of what is saved, where a step has one, and waiting for the save before
the rest    cutting rows, the manifest written and read back

The second goes on beside the trainer, so its shares overlap with the first and each other:

generating  at least one group has tokens to come
scoring     at least one finished group has no reward yet
publishing  the last trained version has not reached the engines
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from connectors.arrow import decode_group
from connectors.kafka.client import read_all
from connectors.records import HEADER_KIND, Announcement, Evaluation, PolicyRecord, decode_as
from connectors.run_dir import RunDir
from deploy.log import opened
from deploy.run_folder import load_run
from trainer.step_log import chain, read_steps

Spans = list[tuple[float, float]]
TRAINER = {
    "waiting": "wait",
    "forward": "logprobs",
    "update": "update",
    "snapshot": "snapshot",
    "checkpoint": "checkpoint",
}
"""What a step's time is called here, and in a manifest's metrics (`seconds/NAME`)."""


def main(folder: str) -> None:
    run_dir = RunDir(folder)
    config = load_run(run_dir)
    with opened(config, run_dir) as cluster:
        partitions = range(config.kafka.partitions)
        policy = read_all(cluster, cluster.topic("policy"), [0])
        rollouts = read_all(cluster, cluster.topic("rollouts"), partitions)
        trajectories = read_all(cluster, cluster.topic("trajectories"), partitions)
        evaluations = read_all(cluster, cluster.topic("evaluations"), [0])
        manifests = chain(read_steps(cluster))
    announced: dict[int, float] = {}
    for record in policy:
        said: PolicyRecord = decode_as(record.value, PolicyRecord)
        if isinstance(said, Announcement):
            announced.setdefault(said.version.number, record.timestamp_ms / 1000)

    generating, finished = [], {}
    for record in rollouts:
        if record.headers.get(HEADER_KIND) == "group":
            rows = decode_group(record.value).trajectories
            finished[record.key] = max(row.finished_at for row in rows)
            generating.append((rows[0].created_at, finished[record.key]))
    scoring = [
        (finished[record.key], record.timestamp_ms / 1000)
        for record in trajectories
        if record.key in finished
    ]
    publishing = [
        (m.finished_at, announced[m.step]) for m in manifests if m.step in announced
    ]  # a version overtaken while it waited is never announced

    pairs = [(a, b) for a, b in pairwise(manifests) if a.epoch == b.epoch]
    seconds = np.array([b.finished_at - a.finished_at for a, b in pairs])
    total = float(seconds.sum())
    print(f"{folder}: {len(seconds)} steps, of which the first is not counted, {total:.0f} s")
    print(f"a step: median {np.median(seconds):.1f} s, longest {seconds.max():.1f} s")
    rest = total
    for shown, name in TRAINER.items():
        spent = sum(b.metrics.get(f"seconds/{name}", 0.0) for _, b in pairs)
        rest -= spent
        print(f"{shown:<11} {spent / total:6.1%}")
    print(f"{'the rest':<11} {rest / total:6.1%}\nbeside it")
    window = [(a.finished_at, b.finished_at) for a, b in pairs]
    for shown, spans in (
        ("generating", generating), ("scoring", scoring), ("publishing", publishing),
    ):  # fmt: skip
        print(f"{shown:<11} {covered(spans, window) / total:6.1%}")
    for record in evaluations:
        evaluation: Evaluation = decode_as(record.value, Evaluation)
        print(
            f"version {evaluation.version.number:<4} held-out reward {evaluation.reward:.3f} "
            f"({evaluation.num_prompts} prompts)"
        )


def covered(spans: Spans, window: Spans) -> float:
    """Seconds of `window` (disjoint spans) in which at least one of `spans` is going on."""
    merged = union(spans)
    return sum(
        max(0.0, min(end, stop) - max(begin, start))
        for begin, end in merged
        for start, stop in window
    )


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same time, as disjoint spans in order."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


if __name__ == "__main__":
    main(sys.argv[1])
