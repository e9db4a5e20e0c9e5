"""A shadow trainer: a function of the recorded log, whatever is killed and however it arrives."""

from __future__ import annotations

import signal
from pathlib import Path

from connectors.kafka.client import Cluster
from connectors.records import Manifest
from tests.trainer.recorded_log import (
    record_run,
    shadow_config,
    start_shadow,
)
from trainer.step_log import chain, read_steps

NUM_STEPS = 30
KILLS = (("recorded", 2), ("trained", 2), ("saved", 1), ("loaded", 1), ("saving", 1))
"""After which time of what each trainer is killed."""
WAIT_S = 240.0


def manifests(own: Cluster) -> list[Manifest]:
    return chain(read_steps(own))


def trained(own: Cluster) -> list[tuple[tuple[str, ...], str]]:
    """Groups and digest of each step."""
    return [(tuple(r.group_id for r in m.records), m.digest) for m in manifests(own)]


def test_a_trainer_killed_any_number_of_times_ends_in_the_digest_of_the_unkilled_one(
    cluster: Cluster, tmp_path: Path, tiny_model_path: Path
) -> None:
    """The log is fixed and its partitions are merged deterministically. One trains undisturbed, one
    is killed with -9 again and again, one gets its records in other pieces."""
    per_partition = NUM_STEPS + 2  # two partitions, two groups a step; three groups are passed over
    log = record_run(cluster, per_partition).cluster
    shadows = {
        name: shadow_config(log, tmp_path / name, tiny_model_path, name=name)
        for name in ("whole", "killed", "paused")
    }
    whole = start_shadow(*shadows["whole"])
    paused = start_shadow(*shadows["paused"], paused=True)
    for crash in KILLS:
        killed = start_shadow(*shadows["killed"], crash=crash)
        killed.join(WAIT_S)
        assert killed.exitcode == -signal.SIGKILL, crash
    last = start_shadow(*shadows["killed"])
    for ended in (whole, last, paused):
        ended.join(WAIT_S)
        assert ended.exitcode == 0
    runs = {name: trained(own) for name, (_, own) in shadows.items()}
    assert len(runs["whole"]) == NUM_STEPS
    assert len({digest for _, digest in runs["whole"]}) == NUM_STEPS
    assert runs["killed"] == runs["whole"]
    assert runs["paused"] == runs["whole"]
