"""The recorder: what is written reaches the log once, in order, whatever is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.files import Locked
from connectors.gateway.journal import Journal
from connectors.gateway.recorder import Outbound, Recorder
from connectors.kafka.client import BrokerUnavailable, Cluster, Reader
from connectors.kafka.topics import ensure_topics
from tests.broker_process import BrokerProcess

DEADLINE_S = 60.0
TOPICS = {"agent-traffic": 2, "feedback": 2, "dead-letters": 2}


def outbound(number: int, *, partition: int | None = None, size: int = 10) -> Outbound:
    return Outbound(
        topic="agent-traffic",
        partition=number % 2 if partition is None else partition,
        key="session",
        id=f"call-{number}",
        value=f"{number}".encode().ljust(size),
    )


def ids(cluster: Cluster, topic: str = "agent-traffic") -> list[list[str]]:
    """Of each partition, in order."""
    reader = Reader(cluster, cluster.topic(topic), {0: 0, 1: 0})
    found: list[list[str]] = [[], []]
    for record in reader.read_to(reader.ends()):
        found[record.partition].append(record.headers["id"])
    reader.close()
    return found


def names(numbers: range) -> list[str]:
    return [f"call-{n}" for n in numbers]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def test_what_is_written_is_in_the_log_in_order(cluster: Cluster, tmp_path: Path) -> None:
    ensure_topics(cluster, TOPICS)
    recorder = Recorder(lambda: cluster, tmp_path, writer="gateway")
    for number in range(1200):
        recorder.write(outbound(number))
    assert recorder.wait_empty(DEADLINE_S)
    recorder.close()
    assert ids(cluster) == [names(range(0, 1200, 2)), names(range(1, 1200, 2))]


def test_writing_waits_for_no_broker_and_nothing_is_lost_or_doubled_when_it_comes_back(
    own_broker: BrokerProcess, own_cluster: Cluster, tmp_path: Path
) -> None:
    cluster = Cluster(bootstrap_servers=own_cluster.bootstrap_servers, unavailable_s=2.0)
    ensure_topics(cluster, TOPICS)
    recorder = Recorder(lambda: cluster, tmp_path / "journal", writer="gateway")
    for number in range(3000):
        if number == 1000:
            own_broker.kill9()
        if number == 2000:
            own_broker.restart()
        recorder.write(outbound(number))
        if number % 100 == 0:
            time.sleep(0.02)
    assert recorder.wait_empty(DEADLINE_S)
    recorder.close()
    assert ids(cluster) == [names(range(0, 3000, 2)), names(range(1, 3000, 2))]


WRITER = """
import sys
from pathlib import Path
from connectors.gateway.recorder import Recorder
from connectors.kafka.client import Cluster
from tests.connectors.test_recorder import outbound
log = Cluster(bootstrap_servers=sys.argv[1])
recorder = Recorder(lambda: log, Path(sys.argv[2]), writer="gateway")
for number in range(int(sys.argv[3]), 100_000):
    recorder.write(outbound(number))
    print(number, flush=True)
"""


def test_what_a_killed_process_had_written_is_in_the_log_once(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    ensure_topics(own_cluster, TOPICS)
    told = 0
    for _ in range(3):
        arguments = [own_cluster.bootstrap_servers, str(tmp_path / "journal"), str(told)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", WRITER, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ".", "PATH": "/usr/bin:/bin"},
        )
        assert process.stdout is not None
        for line in process.stdout:
            told = int(line) + 1
            if told % 700 == 699:
                process.kill()
                break
        told = max([told, *(int(line) + 1 for line in process.stdout if line.endswith("\n"))])
        process.wait()
    recorder = Recorder(lambda: own_cluster, tmp_path / "journal", writer="gateway")
    recorder.write(outbound(told))
    assert recorder.wait_empty(DEADLINE_S)
    recorder.close()
    # One more may have been journalled than the killed process could tell of: it comes again here.
    even, odd = ids(own_cluster)
    assert even == names(range(0, told + 1, 2))
    assert odd == names(range(1, told + 1, 2))


def test_a_record_that_the_log_does_not_take_is_a_dead_letter_and_stops_no_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    small = Cluster(
        bootstrap_servers=cluster.bootstrap_servers,
        namespace=cluster.namespace,
        max_message_bytes=100_000,
    )
    ensure_topics(small, TOPICS)
    recorder = Recorder(lambda: small, tmp_path, writer="gateway")
    for number, size in ((0, 10), (2, 200_000), (4, 10)):
        recorder.write(outbound(number, size=size))
    assert recorder.wait_empty(DEADLINE_S)
    recorder.close()
    assert ids(small)[0] == ["call-0", "call-4"]
    assert ids(small, "dead-letters")[0] == ["call-2"]


def test_a_log_that_cannot_be_found_yet_is_waited_for(cluster: Cluster, tmp_path: Path) -> None:
    found: list[Cluster] = []

    def locate() -> Cluster:
        if not found:
            raise BrokerUnavailable("not yet")
        return found[0]

    recorder = Recorder(locate, tmp_path, writer="gateway")
    recorder.write(outbound(0))
    assert not recorder.wait_empty(0.7)
    ensure_topics(cluster, TOPICS)
    found.append(cluster)
    assert recorder.wait_empty(DEADLINE_S)
    recorder.close()


def test_one_process_at_a_time_has_a_journal(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(Locked):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.binary(max_size=40), min_size=1, max_size=12),
    cut=st.integers(0, 400),
    acked=st.integers(0, 5),
)
def test_of_a_torn_journal_every_whole_record_is_left(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], cut: int, acked: int
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    journal = Journal(folder)
    for data in records:
        journal.append(data)
    acked = min(acked, len(records))
    if acked:
        assert journal.read(acked) == records[:acked]
        journal.ack(acked, {"t/0": 1})
    journal.close()
    file = folder / "00000000.log"
    kept = max(file.stat().st_size - cut, sum(8 + len(data) for data in records[:acked]))
    with file.open("r+b") as torn:
        torn.truncate(kept)
    whole, size = acked, sum(8 + len(data) for data in records[:acked])
    while whole < len(records) and size + 8 + len(records[whole]) <= kept:
        size += 8 + len(records[whole])
        whole += 1
    journal = Journal(folder)
    journal.append(b"new")
    assert journal.num_waiting == whole - acked + 1
    assert journal.read(100) == [*records[acked:whole], b"new"]
    journal.close()


def test_segments_that_are_acknowledged_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.gateway.journal.SEGMENT_BYTES", 100)
    journal = Journal(tmp_path)
    data = [f"record {n}".encode() for n in range(50)]
    for one in data:
        journal.append(one)
    found: list[bytes] = []
    while some := journal.read(7):
        found += some
        journal.ack(len(some), {})
    assert (found, journal.num_waiting) == (data, 0)
    assert len(list(tmp_path.glob("*.log"))) <= 2
    journal.close()
