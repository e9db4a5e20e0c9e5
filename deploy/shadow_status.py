"""Where a shadow trainer stands: what it trained and passed over of its run.

It grants nothing and publishes nothing, so most of what `status` says of a run has no meaning here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from connectors.config import Config, Source
from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from deploy.base import StepRecords
from deploy.health import roles_of
from deploy.history import fork_text, lineage_of
from trainer.checkpoint import run_store
from trainer.checkpoint_meta import kept_on_chain
from trainer.feed_state import Counts
from trainer.step_log import Chain


def shadow_status(
    config: Config, run_dir: RunDir, cluster: Cluster, source: Source
) -> dict[str, Any]:
    """The `status` object of a shadow. What was passed over is only in checkpoints: it is counted
    up to step `passed_over_until`."""
    chain = Chain()
    for offset, record in StepRecords.now(cluster):
        chain.observe(offset, record)
    kept = kept_on_chain(run_store(config, run_dir), chain)
    counts, at = (kept[-1].feed.counts, kept[-1].step) if kept else (Counts(), 0)
    later = [m for m in chain.manifests if m.step > at]
    return {
        "run": config.run.name,
        "shadow_of": source.run,
        "trajectories": source.namespace,
        "step": chain.step,
        "num_steps": config.trainer.num_steps,
        "version": msgspec.structs.asdict(chain.version),
        "digest": chain.digest_at(chain.step),
        "groups": {
            "trained": counts.trained + sum(len(m.records) for m in later),
            "passed_over": counts.closed,
        },
        "passed_over_until": at,
        "passed_over_by_reason": counts.closed_by_reason,
        "reward": {
            "last": chain.manifests[-1].metrics.get("reward/mean") if chain.manifests else None
        },
        "lineage": lineage_of(chain.lineage),
        "roles": roles_of(config, run_dir),
    }


def shadow_lines(status: Mapping[str, Any]) -> list[str]:
    """The status object for reading."""
    groups, reward = status["groups"], status["reward"]["last"]
    why = "".join(f", {reason} {n}" for reason, n in status["passed_over_by_reason"].items())
    lines = [
        f"run        {status['run']}, a shadow of {status['shadow_of']} (status of that shows the "
        "run)",
        f"trains on  {status['trajectories']}trajectories",
        f"step       {status['step']} of {status['num_steps']}, digest "
        f"{status['digest'] or 'none'}",
        f"groups     {groups['trained']} trained, {groups['passed_over']} passed over (until step "
        f"{status['passed_over_until']}{why})",
        f"reward     {'-' if reward is None else f'{reward:.4g}'} in the last step",
    ]
    lines += [f"incarnation {fork_text(fork)}" for fork in status["lineage"]]
    lines += [f"  {role['name']:<12} {role['state']}" for role in status["roles"]]
    return lines
