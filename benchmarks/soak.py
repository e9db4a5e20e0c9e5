"""Whether the embedded broker stands up to hours of load: its memory stays flat, nothing is lost.

    python -P -m benchmarks.soak --minutes 60

One producer sends 2,000 records of 1 KB a second, another 20 of 1 MB that do not compress; a reader
follows each. Every record carries its partition's sequence number and a checksum. Retention is on,
so the disk holds some minutes of it. All of them are processes of their own, as in a run.

behind      records due by the clock that were not sent yet
lag         records acknowledged and not read yet
memory      of the broker: resident, in MiB
lost        sequence numbers that never came; doubled: that came again; damaged: checksum wrong

It ends with a line of JSON, and with 1 if a record was lost, doubled or damaged, if less than 95%
of the load came about, or if the broker's memory in the last quarter is more than a tenth (and
16 MiB) above that in the first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import psutil

from connectors.kafka.client import Cluster, Producer, Reader, Record
from tests.broker_process import BrokerProcess
from tests.connectors.broker_clients import KafkaPython

PARTITIONS = 4
CONFIGS = {
    "max.message.bytes": str(2 << 20),
    "segment.bytes": str(32 << 20),
    "retention.ms": "120000",
}
TICK_S = 0.05
SAMPLE_S = 2.0
DRAIN_S = 60.0
STAMP = struct.Struct(">qI")  # sequence number, checksum of the rest
MIB = 1 << 20


@dataclass(frozen=True)
class Load:
    topic: str
    a_second: int
    num_bytes: int


LOADS = [Load("soak.small", 2000, 1000), Load("soak.large", 20, 1_000_000)]


@dataclass
class Counts:
    """Shared between processes; each field has one writer."""

    sent: Any
    behind: Any
    received: Any
    lost: Any
    doubled: Any
    damaged: Any

    @classmethod
    def new(cls, context: Any) -> Counts:
        return cls(*(context.Value("q", 0, lock=False) for _ in range(6)))


def produce(cluster: Cluster, load: Load, counts: Counts, stop: Event) -> None:
    producer = Producer(cluster, compression=None)
    noise = os.urandom(load.num_bytes + 4096)
    sequences = [0] * PARTITIONS
    begun = time.monotonic()
    while not stop.is_set():
        due = int((time.monotonic() - begun) * load.a_second)
        counts.behind.value = due - counts.sent.value
        due = min(due, counts.sent.value + load.a_second)  # who fell behind catches up by and by
        for number in range(counts.sent.value, due):
            partition = number % PARTITIONS
            payload = noise[number % 4096 :][: load.num_bytes - STAMP.size]
            stamp = STAMP.pack(sequences[partition], zlib.crc32(payload))
            producer.send(load.topic, partition, stamp + payload)
            sequences[partition] += 1
        producer.flush()
        counts.sent.value = due
        stop.wait(TICK_S)
    producer.close()


def follow(cluster: Cluster, load: Load, counts: Counts, stop: Event) -> None:
    """Until told to stop and everything has come, or does not come."""
    reader = Reader(cluster, load.topic, dict.fromkeys(range(PARTITIONS), 0))
    following = [0] * PARTITIONS
    while not stop.is_set():
        check(reader.poll(0.2), following, counts)
    deadline = time.monotonic() + DRAIN_S
    while lag(counts) and time.monotonic() < deadline:
        check(reader.poll(0.2), following, counts)
    reader.close()


def check(found: list[Record], following: list[int], counts: Counts) -> None:
    for record in found:
        sequence, checksum = STAMP.unpack_from(record.value)
        expected = following[record.partition]
        counts.damaged.value += zlib.crc32(record.value[STAMP.size :]) != checksum
        counts.doubled.value += sequence < expected
        counts.lost.value += max(0, sequence - expected)
        following[record.partition] = max(expected, sequence + 1)
        counts.received.value += 1


@contextmanager
def clients(cluster: Cluster, all_counts: list[Counts], context: Any) -> Iterator[list[Any]]:
    """Everybody at work; at the end the producers stop first, then the readers."""
    stops = {produce: context.Event(), follow: context.Event()}
    processes = {
        role: [
            context.Process(target=role, args=(cluster, load, counts, stop), daemon=True)
            for load, counts in zip(LOADS, all_counts, strict=True)
        ]
        for role, stop in stops.items()
    }
    everybody = [process for each in processes.values() for process in each]
    for process in everybody:
        process.start()
    try:
        yield everybody
        for role, stop in stops.items():
            stop.set()
            for process in processes[role]:
                process.join(2 * DRAIN_S)
    finally:
        for process in everybody:
            process.kill()


def lag(counts: Counts) -> int:
    return max(0, counts.sent.value - counts.received.value)


@dataclass(frozen=True)
class Sample:
    rss_mib: float
    num_files: int
    disk_mib: float


def sample(broker: BrokerProcess) -> Sample:
    process = psutil.Process(broker.pid)
    disk_bytes = 0
    for file in broker.data_dir.rglob("*.log"):
        try:
            disk_bytes += file.stat().st_size
        except FileNotFoundError:
            continue  # retention was faster
    return Sample(process.memory_info().rss / MIB, process.num_fds(), disk_bytes / MIB)


def watch(
    broker: BrokerProcess, processes: list[Any], all_counts: list[Counts], s: float
) -> list[Sample]:
    """A sample each SAMPLE_S, and a line each minute."""
    samples: list[Sample] = []
    begun = shown = time.monotonic()
    print(
        "minute      small      large   behind      lag   memory MiB   files   disk MiB", flush=True
    )
    while time.monotonic() - begun < s:
        time.sleep(SAMPLE_S)
        dead = [process for process in processes if process.exitcode is not None]
        if dead or not broker.alive:
            raise SystemExit(f"soak: a process has ended: {dead or 'the broker'}")
        samples.append(sample(broker))
        if time.monotonic() - shown >= 60.0 or time.monotonic() - begun >= s:
            shown = time.monotonic()
            small, large = (counts.received.value for counts in all_counts)
            behind = sum(counts.behind.value for counts in all_counts)
            lags = sum(lag(counts) for counts in all_counts)
            rss_mib = statistics.mean(each.rss_mib for each in samples[-30:])
            print(
                f"{(shown - begun) / 60:6.1f} {small:10} {large:10} {behind:8} {lags:8}"
                f" {rss_mib:12.1f} {samples[-1].num_files:7} {samples[-1].disk_mib:10.0f}",
                flush=True,
            )
    return samples


def summary(samples: list[Sample], all_counts: list[Counts], minutes: float) -> dict[str, Any]:
    quarter = max(1, len(samples) // 4)
    first, last = (
        statistics.mean(each.rss_mib for each in part)
        for part in (samples[:quarter], samples[-quarter:])
    )
    half = [each.rss_mib for each in samples[len(samples) // 2 :]]
    slope, _ = statistics.linear_regression(range(len(half)), half)
    lost = sum(counts.lost.value + lag(counts) for counts in all_counts)
    doubled, damaged = (
        sum(getattr(counts, name).value for counts in all_counts) for name in ("doubled", "damaged")
    )
    rates = [counts.received.value / (60 * minutes) for counts in all_counts]
    flat = last - first <= max(16.0, first / 10)
    loaded = all(rate > 0.95 * load.a_second for rate, load in zip(rates, LOADS, strict=True))
    return {
        "minutes": minutes,
        "small": all_counts[0].received.value,
        "large": all_counts[1].received.value,
        "small_a_second": round(rates[0], 1),
        "large_a_second": round(rates[1], 2),
        "behind": sum(counts.behind.value for counts in all_counts),
        "lost": lost,
        "doubled": doubled,
        "damaged": damaged,
        "rss_mib_first_quarter": round(first, 1),
        "rss_mib_last_quarter": round(last, 1),
        "rss_kib_a_minute_second_half": round(slope * 60 / SAMPLE_S * 1024),
        "most_files": max(each.num_files for each in samples),
        "most_disk_mib": round(max(each.disk_mib for each in samples)),
        "passed": flat and loaded and not (lost or doubled or damaged),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--folder", help="for the broker's data; a temporary one by default")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    all_counts = [Counts.new(context) for _ in LOADS]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        broker = BrokerProcess(Path(folder) / "broker")
        try:
            for load in LOADS:
                KafkaPython(broker.bootstrap).create(load.topic, PARTITIONS, CONFIGS)
            cluster = Cluster(bootstrap_servers=broker.bootstrap, max_message_bytes=2 << 20)
            with clients(cluster, all_counts, context) as processes:
                samples = watch(broker, processes, all_counts, 60 * arguments.minutes)
        finally:
            broker.stop()
        sys.stderr.write(broker.log_file.read_text())
    found = summary(samples, all_counts, arguments.minutes)
    print(json.dumps(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
