"""Members of consumer groups, of both clients, in this process or in one that may be killed.

    python -m tests.connectors.broker_members CLIENT BOOTSTRAP GROUP TOPIC

obeys one command a line on stdin, and answers each with one line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import confluent_kafka
import kafka
import kafka.errors

from connectors.broker.errors import ErrorCode
from tests.connectors.broker_clients import DEADLINE_S, Rejected

SESSION_S = 6.0  # the shortest that brokers allow
HEARTBEAT_MS = 200
POLL_S = 0.3

Numbers = dict[int, list[int]]
"""Values, which are numbers here, by partition."""


class Member(Protocol):
    def poll(self) -> Numbers:
        """What has come within POLL_S. Joins and rebalances happen in it."""

    def assigned(self) -> list[int]:
        """Partitions, in order."""

    def commit(self, partition: int, offset: int) -> None:
        """Rejected, with Kafka's code where the client gives it."""

    def close(self) -> None:
        """Leaves the group; a static member only stops."""


class KafkaPythonMember:
    def __init__(
        self, bootstrap: str, group: str, topic: str, instance_id: str | None = None
    ) -> None:
        self._topic = topic
        self._consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            group_instance_id=instance_id,
            session_timeout_ms=int(SESSION_S * 1000),
            heartbeat_interval_ms=HEARTBEAT_MS,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            reconnect_backoff_max_ms=200,
        )
        # So that its first assignment knows them: kafka-python 3.0.12 never ends a join that it
        # begins for new partitions while a short poll gives up on it.
        self._consumer.partitions_for_topic(topic)

    def poll(self) -> Numbers:
        polled = self._consumer.poll(timeout_ms=int(POLL_S * 1000))
        return {
            where.partition: [int(r.value) for r in records] for where, records in polled.items()
        }

    def assigned(self) -> list[int]:
        return sorted(where.partition for where in self._consumer.assignment())

    def commit(self, partition: int, offset: int) -> None:
        where = kafka.TopicPartition(self._topic, partition)
        try:
            self._consumer.commit({where: kafka.OffsetAndMetadata(offset, "", -1)})
        except kafka.errors.CommitFailedError as error:  # for several reasons, and names none
            raise Rejected(ErrorCode.UNKNOWN_MEMBER_ID) from error
        except kafka.errors.BrokerResponseError as error:
            raise Rejected(error.errno) from error

    def close(self) -> None:
        self._consumer.close()


class ConfluentMember:
    def __init__(
        self, bootstrap: str, group: str, topic: str, instance_id: str | None = None
    ) -> None:
        self._topic = topic
        settings = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "session.timeout.ms": int(SESSION_S * 1000),
            "heartbeat.interval.ms": HEARTBEAT_MS,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
        if instance_id is not None:
            settings["group.instance.id"] = instance_id
        self._consumer = confluent_kafka.Consumer(settings)
        self._consumer.subscribe([topic])

    def poll(self) -> Numbers:
        polled: Numbers = {}
        for message in self._consumer.consume(1000, POLL_S):
            if message.error() is None:
                polled.setdefault(message.partition(), []).append(int(message.value()))
        return polled

    def assigned(self) -> list[int]:
        return sorted(where.partition for where in self._consumer.assignment())

    def commit(self, partition: int, offset: int) -> None:
        where = confluent_kafka.TopicPartition(self._topic, partition, offset)
        try:
            (committed,) = self._consumer.commit(offsets=[where], asynchronous=False)
        except confluent_kafka.KafkaException as error:
            raise Rejected(error.args[0].code()) from error
        if committed.error is not None:
            raise Rejected(committed.error.code())

    def close(self) -> None:
        self._consumer.close()


MEMBERS: dict[str, type[KafkaPythonMember] | type[ConfluentMember]] = {
    "kafka-python": KafkaPythonMember,
    "confluent": ConfluentMember,
}


class MemberProcess:
    """A member in a process of its own."""

    def __init__(self, name: str, bootstrap: str, group: str, topic: str) -> None:
        command = [sys.executable, "-P", "-m", "tests.connectors.broker_members"]
        self._process = subprocess.Popen(
            [*command, name, bootstrap, group, topic],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _tell(self, *command: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def poll(self) -> Numbers:
        return {int(partition): numbers for partition, numbers in self._tell("poll").items()}

    def assigned(self) -> list[int]:
        assigned: list[int] = self._tell("assigned")
        return assigned

    def commit(self, partition: int, offset: int) -> None:
        code = self._tell("commit", partition, offset)
        if code:
            raise Rejected(code)

    def pause(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """It dies without a word."""
        self._process.kill()
        self._process.communicate()


def poll_all(members: Sequence[Member]) -> list[Numbers]:
    """One poll of each, at once: kafka-python joins anew when a join ended between its polls."""
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(lambda member: member.poll(), members))


def poll_until(members: Sequence[Member], is_so: Callable[[], bool]) -> None:
    """Polls the members until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < deadline, [member.assigned() for member in members]
        poll_all(members)


def _obey(member: Member, command: list[Any]) -> Any:
    match command:
        case ["poll"]:
            return member.poll()
        case ["assigned"]:
            return member.assigned()
        case ["commit", partition, offset]:
            try:
                member.commit(partition, offset)
            except Rejected as rejected:
                return rejected.code
            return int(ErrorCode.NONE)
    raise ValueError(command)


def main() -> None:
    name, *what = sys.argv[1:]
    member = MEMBERS[name](*what)
    for line in sys.stdin:
        print(json.dumps(_obey(member, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
