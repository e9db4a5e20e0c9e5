"""What the gateway writes: calls and ends to `agent-traffic`, feedback to `feedback`.

A call's id says the partition of its session and, by a digest, whose it is, so that feedback which
names only the call finds its way, also through a gateway that started later.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from connectors.gateway.errors import Refused
from connectors.gateway.metrics import Metrics
from connectors.gateway.recorder import Outbound, Recorder
from connectors.gateway.redaction import Redaction
from connectors.gateway.sessions import scoped
from connectors.records import encode
from connectors.traffic import Call, End, Feedback, partition_of

log = logging.getLogger(__name__)

_CALL_ID: Final = re.compile(r"chatcmpl-(\d{1,6})-[0-9a-f]{24}([0-9a-f]{8})")


class TrafficLog:
    """`num_partitions`: of either topic."""

    def __init__(
        self, recorder: Recorder, redaction: Redaction, metrics: Metrics, num_partitions: int
    ) -> None:
        self._recorder, self._redaction, self._metrics = recorder, redaction, metrics
        self._num_partitions = num_partitions

    def new_call_id(self, owner: str, session: str) -> str:
        partition = self._partition(session)
        return f"chatcmpl-{partition}-{secrets.token_hex(12)}{_tag(owner)}"

    def write_call(self, call: Call, written: str) -> None:
        """`written`: its prompt as the model got it. A call that the journal cannot take is served
        without being recorded, and counted."""
        clean = self._redaction.call(call, written)
        if clean.behaviour != call.behaviour:
            self._metrics.redacted.inc()
        try:
            self._write_traffic("call", call.session, call.id, clean)
        except OSError as error:
            log.error("call %s is not recorded: %s", call.id, error)
            self._metrics.unrecorded.inc()

    def write_end(self, end: End) -> None:
        self._write_traffic("end", end.session, f"end-{secrets.token_hex(12)}", end)

    def write_feedback(self, owner: str, facts: Sequence[Feedback]) -> None:
        """`facts` as the client names things: all of them, or none. Refused (404) when a call is
        none of the owner's."""
        placed = [(self._place(owner, fact), fact) for fact in facts]
        for partition, fact in placed:
            session = scoped(owner, fact.session) if fact.session else ""
            clean = replace(fact, session=session, comment=self._redaction.text(fact.comment))
            key = session or str(fact.call)
            self._write("feedback", "feedback", partition, key, f"{fact.id}/{key}", clean)

    def _place(self, owner: str, fact: Feedback) -> int:
        """The partition: of the session, which is also that of its calls."""
        found = None if fact.call is None else _CALL_ID.fullmatch(fact.call)
        if fact.session:
            partition = self._partition(scoped(owner, fact.session))
        else:
            partition = -1 if found is None else int(found[1])
        is_known = 0 <= partition < self._num_partitions and (
            fact.call is None
            or (found is not None and found[2] == _tag(owner) and int(found[1]) == partition)
        )
        if not is_known:
            message = f"No call of yours has the id '{fact.call}'"
            raise Refused(404, message, code="call_not_found", param="call")
        return partition

    def _partition(self, session: str) -> int:
        return partition_of(session, self._num_partitions)

    def _write_traffic(self, kind: str, session: str, record_id: str, record: Call | End) -> None:
        partition = self._partition(session)
        self._write(kind, "agent-traffic", partition, session, record_id, record)

    def _write(
        self, kind: str, topic: str, partition: int, key: str, record_id: str, record: Any
    ) -> None:
        """OSError when the journal takes no more."""
        value = encode(record)
        self._recorder.write(
            Outbound(topic=topic, partition=partition, key=key, id=record_id, value=value)
        )
        self._metrics.recorded.labels(kind).inc()


def _tag(owner: str) -> str:
    return hashlib.blake2b(owner.encode(), digest_size=4, person=b"owner").hexdigest()
