"""What a step's metrics say is wrong with a run, one line each.

A step's metrics enter, those of the last manifest in `headwater status`; lines leave that begin
with what they are about and name likely causes, the likeliest first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Final

log = logging.getLogger(__name__)

LEAST_EFFECTIVE: Final = 0.1
"""Share of the tokens that the loss's weights must leave effective."""


def alerts(metrics: Mapping[str, float], gap_alert: float) -> tuple[str, ...]:
    """`gap_alert`: the share of tokens whose probability may differ by more than 10 % between the
    engine that sampled them and the trainer (`trainer.gap_alert`)."""
    return tuple(_found(metrics, gap_alert))


def subject(alert: str) -> str:
    """What an alert is about: the same from step to step, though its numbers change."""
    return alert.partition(":")[0]


class AlertWatch:
    """Logs an alert when it begins and when it is over."""

    def __init__(self, gap_alert: float) -> None:
        self._gap_alert = gap_alert
        self._lasting: set[str] = set()

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """The next step's."""
        now = {subject(alert): alert for alert in alerts(metrics, self._gap_alert)}
        for name, alert in now.items():
            if name not in self._lasting:
                log.warning("step %d: ALERT: %s", step, alert)
        for name in sorted(self._lasting - now.keys()):
            log.info("step %d: the alert is over: %s", step, name)
        self._lasting = set(now)


def _found(metrics: Mapping[str, float], gap_alert: float) -> Iterator[str]:
    fresh = metrics.get("gap/fresh/share_above_10pct")
    if fresh is not None and fresh > gap_alert:
        yield (
            f"gap: {fresh:.0%} of the {metrics['gap/fresh/tokens']:.0f} tokens that the trained "
            "version itself sampled are more than 10% more or less probable in the trainer: engine "
            "and trainer compute differently (temperature or top-p applied to the log-probs, dtype "
            "or attention kernels, a quantised engine, or weights that are not the version's: "
            "compare the digests)"
        )
    elif (share := metrics.get("gap/share_above_10pct", 0.0)) > gap_alert:
        others = "none was sampled by the trained version" if fresh is None else "its own are not"
        yield (
            f"gap: {share:.0%} of the tokens are more than 10% more or less probable in the "
            f"trained version, and {others}: the policy moved since (lower the staleness bound, "
            "the look-ahead or the learning rate, or let a correction weigh them)"
            + (", or engine and trainer compute differently" if fresh is None else "")
        )
    if metrics.get("advantage/zero_share", 0.0) == 1.0:
        yield (
            "signal: every advantage in the step is 0, so rewards taught nothing (prompts too easy "
            "or too hard, a reward that does not tell answers apart, or a temperature too low; "
            "trainer.filter_groups waits for others)"
        )
    if (share := metrics.get("loss/effective_share", 1.0)) < LEAST_EFFECTIVE:
        yield (
            f"weights: the loss rests on few tokens, as if {share:.0%} of them were trained: the "
            "policy is far from the one that sampled (lower the staleness bound, the look-ahead or "
            "the learning rate), or the correction's and rejection's limits are too tight"
        )
