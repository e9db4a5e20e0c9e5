"""The connections of kafka-python's clients, two faults of making them mended.

A client renews its metadata in a loop of its own, which any error but kafka-python's ends for
good: that of a connection, say, which a killed broker resets before TLS has begun. And a TLS
handshake has no time-out. Either leaves a client that never finds the broker again.
"""

from __future__ import annotations

import time
from typing import Any

from kafka import errors as kafka_errors
from kafka.net.compat import KafkaNetClient
from kafka.net.manager import KafkaConnectionManager
from kafka.net.selector import NetworkSelector


class _Connections(KafkaConnectionManager):  # type: ignore[misc]
    async def _build_transport(self, node: Any, timeout_at: float | None = None) -> Any:
        made = self.call_soon(super()._build_transport, node, timeout_at)
        left_ms = None if timeout_at is None else max(0.0, timeout_at - time.monotonic()) * 1000
        try:
            return await self.wait_for(made, left_ms)
        except OSError as error:
            raise kafka_errors.KafkaConnectionError(f"connection lost: {error}") from error


def client(**settings: Any) -> Any:
    """What the clients take as `kafka_client`."""
    net = NetworkSelector(**settings)
    return KafkaNetClient(net=net, manager=_Connections(net, **settings), **settings)
