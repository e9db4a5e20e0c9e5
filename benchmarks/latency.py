"""Where a group's time goes, read from a run's log: percentiles of each leg in milliseconds.

    python benchmarks/latency.py runs/quickstart

granted     announcement in the log -> the rollout worker starts on the prompt
generated   -> its last trajectory is finished
written     -> its record in `rollouts`
scored      -> its record in `trajectories`
trained     last record of a step -> that step's manifest
announced   manifest -> its version announced (engines hold the weights)

Time stamps are the writers' own clocks: on several machines they must agree.
"""

from __future__ import annotations

import sys
from collections import defaultdict

import numpy as np

from connectors.arrow import decode_group
from connectors.kafka.client import read_all
from connectors.records import HEADER_KIND, Announcement, Origin, PolicyRecord, decode_as
from connectors.run_dir import RunDir
from deploy.log import opened
from deploy.run_folder import load_run
from trainer.step_log import chain, read_steps


def main(folder: str) -> None:
    run_dir = RunDir(folder)
    config = load_run(run_dir)
    with opened(config, run_dir) as cluster:
        partitions = range(config.kafka.partitions)
        policy = read_all(cluster, cluster.topic("policy"), [0])
        rollouts = read_all(cluster, cluster.topic("rollouts"), partitions)
        trajectories = read_all(cluster, cluster.topic("trajectories"), partitions)
        manifests = chain(read_steps(cluster))
    granted_ms: dict[str, float] = {}
    announced_ms: dict[int, float] = {}
    limits = [0] * config.kafka.partitions
    for record in policy:
        said = decode_as(record.value, PolicyRecord)
        if not isinstance(said, Announcement):
            continue
        announced_ms.setdefault(said.version.number, record.timestamp_ms)
        for partition, limit in enumerate(said.limits):
            for offset in range(limits[partition], limit):
                group_id = str(Origin(cluster.topic("prompts"), partition, offset))
                granted_ms[group_id] = record.timestamp_ms
            limits[partition] = max(limits[partition], limit)

    legs: dict[str, list[float]] = defaultdict(list)
    written_ms = {}
    for record in rollouts:
        group_id = (record.key or b"").decode()
        written_ms[group_id] = record.timestamp_ms
        if record.headers.get(HEADER_KIND) != "group" or group_id not in granted_ms:
            continue
        rows = decode_group(record.value).trajectories
        finished_ms = 1000 * max(row.finished_at for row in rows)
        legs["granted"].append(1000 * rows[0].created_at - granted_ms[group_id])
        legs["generated"].append(finished_ms - 1000 * rows[0].created_at)
        legs["written"].append(record.timestamp_ms - finished_ms)
    scored_ms = {(record.key or b"").decode(): record.timestamp_ms for record in trajectories}
    legs["scored"] = [ms - written_ms[g] for g, ms in scored_ms.items() if g in written_ms]
    for manifest in manifests:
        finished_ms = 1000 * manifest.finished_at
        last = max(scored_ms[r.group_id] for r in manifest.records)
        legs["trained"].append(finished_ms - last)
        if manifest.step in announced_ms:
            legs["announced"].append(announced_ms[manifest.step] - finished_ms)

    print(f"{folder}: {len(manifests)} steps of {config.trainer.groups_per_step} groups")
    print(f"{'leg':<10} {'p10':>8} {'p50':>8} {'p90':>8} {'p99':>8} ms   count")
    for leg, values in legs.items():
        shown = " ".join(f"{value:8.0f}" for value in np.percentile(values, [10, 50, 90, 99]))
        print(f"{leg:<10} {shown}      {len(values)}")


if __name__ == "__main__":
    main(sys.argv[1])
