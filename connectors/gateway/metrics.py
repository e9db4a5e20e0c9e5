"""The gateway's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_PREFIX = "headwater_gateway_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    def __init__(
        self, *, waiting: Callable[[], float], running: Callable[[], float],
        sessions: Callable[[], float],
    ) -> None:  # fmt: skip
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(_PREFIX + name, text, labels, registry=registry)

        self.requests = counter("requests", "Requests answered.", "route", "status")
        self.refused = counter("refused", "Requests refused or failed.", "reason")
        self.tokens = counter("tokens", "Tokens of answered calls.", "kind")
        self.disconnects = counter("disconnects", "Clients gone before they had all of an answer.")
        self.retries = counter("retries_joined", "Requests that got an earlier one's answer.")
        self.recorded = counter("records", "Records handed to the log's writer.", "kind")
        self.unrecorded = counter("unrecorded", "Calls that the journal could not take.")
        self.redacted = counter("redacted", "Calls recorded without ids, for what they spell.")
        self.seconds = Histogram(
            _PREFIX + "seconds", "From a call's arrival to its answer's end.",
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip
        for name, text, value in (
            ("waiting_records", "Records that the log has not acknowledged.", waiting),
            ("running", "Answers on their way.", running),
            ("sessions", "Sessions whose ids are at hand.", sessions),
        ):
            Gauge(_PREFIX + name, text, registry=registry).set_function(value)
