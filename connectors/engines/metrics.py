"""An engine's Prometheus metrics, read from the engine when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from connectors.engines.types import EngineState


@dataclass(slots=True)
class Durations:
    """How often something happened and how long it took, in seconds."""

    count: int = 0
    total: float = 0.0
    last: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.last = seconds


class EngineMetrics:
    """A prometheus_client collector over `state` and the weight swaps' durations."""

    def __init__(
        self, state: Callable[[], EngineState], update: Durations, pause: Durations
    ) -> None:
        self._state, self._update, self._pause = state, update, pause

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        version = state.version
        yield _gauge("running", "Sequences decoded together now.", state.num_running)
        yield _gauge("queued", "Samples waiting for a place or a version.", state.num_queued)
        yield _gauge("kv_use", "Share of the KV cache in use.", state.kv_use)
        yield _gauge("trainer_epoch", "Highest trainer epoch met.", state.epoch)
        yield _gauge(
            "version", "Policy version held, -1 without one.", version.number if version else -1
        )
        yield CounterMetricFamily(
            "headwater_engine_tokens", "Tokens generated.", value=state.num_tokens
        )
        for name, text, durations in (
            ("update", "From the order to receive weights to their use.", self._update),
            ("pause", "Decoding stopped for a weight swap.", self._pause),
        ):
            yield SummaryMetricFamily(
                f"headwater_engine_{name}_seconds",
                text,
                count_value=durations.count,
                sum_value=durations.total,
            )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"headwater_engine_{name}", text, value=value)
