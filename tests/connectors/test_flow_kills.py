"""A dataflow process killed again and again: each granted offset's output is written once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from bytewax.recovery import init_db_dir

from connectors.kafka.client import Cluster, Producer, Reader, Record, read_all
from connectors.kafka.topics import ensure_topics
from connectors.records import Announcement, Begin, Version, encode, parse_group_id
from tests.broker_process import BrokerProcess

ROOT = Path(__file__).parents[2]
PARTITIONS = 2


class Worker:
    """The flow program, restarted on the same recovery folder."""

    def __init__(self, cluster: Cluster, recovery: Path) -> None:
        recovery.mkdir()
        init_db_dir(recovery, 1)
        program = str(Path(__file__).with_name("flow_program.py"))
        self._command = [sys.executable, "-P", program, cluster.bootstrap_servers, str(recovery)]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(self._command, env=environment)

    def kill9(self) -> None:
        assert self.process.poll() is None, "the worker ended by itself"
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


def announce(producer: Producer, cluster: Cluster, number: int, limit: int) -> None:
    record = Announcement(
        epoch=0, version=Version(0, number), digest="0" * 16, limits=(limit,) * PARTITIONS
    )
    producer.append(cluster.topic("policy"), 0, encode(record))


def prepare(cluster: Cluster, num_prompts: int) -> Producer:
    ensure_topics(cluster, {"prompts": PARTITIONS, "rollouts": PARTITIONS, "policy": 1})
    producer = Producer(cluster)
    begin = Begin(epoch=0, writer="test", resumed_step=0, started_at=0.0)
    producer.append(cluster.topic("policy"), 0, encode(begin))
    for i in range(num_prompts):
        producer.send(cluster.topic("prompts"), i % PARTITIONS, b"prompt %d" % i)
    producer.flush()
    return producer


def outputs_until(
    reader: Reader, found: list[Record], count: int, idle: Callable[[], None]
) -> None:
    deadline = time.monotonic() + 150  # on a busy machine every restart takes seconds
    while len(found) < count:
        found += reader.poll(0.05)
        idle()
        assert time.monotonic() < deadline, f"only {len(found)} of {count} outputs came"


def check_exactly_once(cluster: Cluster, num_prompts: int, step: int) -> None:
    """Every prompt has one output, in its own partition, made at the version that granted it."""
    records = read_all(cluster, cluster.topic("rollouts"), range(PARTITIONS))
    keys = [(record.key or b"").decode() for record in records]
    expected = {
        f"{cluster.topic('prompts')}/{i % PARTITIONS}/{i // PARTITIONS}" for i in range(num_prompts)
    }
    assert sorted(keys) == sorted(expected)
    for record, key in zip(records, keys, strict=True):
        origin = parse_group_id(key)
        assert origin.partition == record.partition
        assert f"at 0.{origin.offset // step} ".encode() in record.value
        prompt = origin.offset * PARTITIONS + origin.partition
        assert record.value.startswith(b"prompt %d by " % prompt)


@pytest.mark.parametrize("seed", [0])
def test_kills_of_the_worker_and_the_broker_neither_lose_nor_double_an_output(
    own_broker: BrokerProcess, own_cluster: Cluster, tmp_path: Path, seed: int
) -> None:
    num_prompts, step, rng = 300, 10, random.Random(seed)
    producer = prepare(own_cluster, num_prompts)
    reader = Reader(own_cluster, own_cluster.topic("rollouts"), dict.fromkeys(range(PARTITIONS), 0))
    worker = Worker(own_cluster, tmp_path / "recovery")
    found: list[Record] = []
    limit = 0

    def grant_more() -> None:
        nonlocal limit
        if limit * PARTITIONS < num_prompts and limit * PARTITIONS - len(found) < 60:
            announce(producer, own_cluster, limit // step, limit + step)
            limit += step

    try:
        # In pairs: the second kill finds outputs of the first run not generated again
        firsts = sorted(rng.sample(range(10, num_prompts - 60, 40), 3))
        kills = [count for first in firsts for count in (first, first + 15)]
        for number, count in enumerate(kills):
            outputs_until(reader, found, count, grant_more)
            worker.kill9()
            if number == 2:
                own_broker.restart()
            worker.start()
            if number == 3:
                outputs_until(reader, found, count + 1, grant_more)
                own_broker.restart()  # under a running worker
        outputs_until(reader, found, num_prompts, grant_more)
        assert worker.terminate() == 0
    finally:
        worker.process.kill()
        worker.process.wait()
    check_exactly_once(own_cluster, num_prompts, step)


def test_sigterm_exits_cleanly_and_the_next_run_does_the_rest(
    own_cluster: Cluster, tmp_path: Path
) -> None:
    num_prompts, step = 240, 40  # work takes up to 0.6 s: the signal finds it in flight
    producer = prepare(own_cluster, num_prompts)
    reader = Reader(own_cluster, own_cluster.topic("rollouts"), dict.fromkeys(range(PARTITIONS), 0))
    worker = Worker(own_cluster, tmp_path / "recovery")
    found: list[Record] = []
    try:
        for number in range(3):
            announce(producer, own_cluster, number, (number + 1) * step)
            outputs_until(reader, found, number * step * PARTITIONS + 5, lambda: None)
            assert worker.terminate() == 0
            worker.start()
        outputs_until(reader, found, num_prompts, lambda: None)
        assert worker.terminate() == 0
    finally:
        worker.process.kill()
        worker.process.wait()
    check_exactly_once(own_cluster, num_prompts, step)
