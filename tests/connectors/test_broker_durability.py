"""The broker dies, is refused a start, or runs out of disk: nothing acknowledged is lost."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import confluent_kafka
import kafka
import pytest

from connectors.broker import server
from connectors.broker.errors import DirectoryLocked, ErrorCode
from tests.broker_process import BrokerProcess
from tests.connectors.broker_clients import KafkaPython, Sent
from tests.connectors.broker_wire import Connection, batch, records

NUM_KILLS = 2
EXIT_ENVIRONMENT = 3


class Load:
    """An idempotent producer of numbered records, in a thread, until `finish` or its block ends."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.bootstrap = bootstrap
        self.topic = topic
        self.acknowledged: list[int] = []
        self.errors: list[object] = []
        self.num_sent = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join(90)

    def _run(self) -> None:
        self._open()
        while not self._stop.is_set():
            self._send(self.num_sent, b"%08d" % self.num_sent + b"x" * 300)
            self.num_sent += 1
            if self.num_sent % 20 == 0:
                time.sleep(0.004)  # sets the load, waits for nothing
        self._close(20.0)

    def finish(self) -> None:
        self._stop.set()
        self._thread.join(90)
        assert not self._thread.is_alive()

    def wait_for_acknowledgements(self, num_more: int) -> None:
        target = len(self.acknowledged) + num_more
        deadline = time.monotonic() + 60
        while len(self.acknowledged) < target:
            assert time.monotonic() < deadline, f"errors: {self.errors[:3]}"
            time.sleep(0.01)


class KafkaPythonLoad(Load):
    def _open(self) -> None:
        self._producer = kafka.KafkaProducer(
            bootstrap_servers=self.bootstrap, enable_idempotence=True, reconnect_backoff_max_ms=200
        )

    def _close(self, timeout_s: float) -> None:
        try:
            self._producer.flush(timeout_s)
        finally:
            self._producer.close(timeout=1)

    def _send(self, number: int, value: bytes) -> None:
        future = self._producer.send(self.topic, value, partition=0)
        future.add_callback(lambda _: self.acknowledged.append(number))
        future.add_errback(self.errors.append)


class ConfluentLoad(Load):
    def _open(self) -> None:
        self._producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "reconnect.backoff.max.ms": 200,
                "queue.buffering.max.messages": 1_000_000,
                "log_level": 0,
            }
        )

    def _close(self, timeout_s: float) -> None:
        self._producer.flush(timeout_s)

    def _send(self, number: int, value: bytes) -> None:
        def delivered(error: object, _: object) -> None:
            if error is None:
                self.acknowledged.append(number)
            else:
                self.errors.append(error)

        self._producer.produce(self.topic, value, partition=0, on_delivery=delivered)
        self._producer.poll(0)


def stored_numbers(bootstrap: str, topic: str) -> list[int]:
    found: list[int] = []
    with Connection(bootstrap) as connection:
        while True:
            (answer,) = connection.fetch({(topic, 0): len(found)}, partition_max_bytes=1 << 20)
            if not answer.records:
                return found
            wanted = [(o, v) for o, v in records(answer.records) if o >= len(found)]
            found += [int(value[:8]) for _, value in wanted]


@pytest.mark.parametrize("fsync", ["never", "always"])
@pytest.mark.parametrize("load", [KafkaPythonLoad, ConfluentLoad])
def test_idempotent_producers_ride_out_kill_9_without_loss_or_repeats(tmp_path, load, fsync):
    broker = BrokerProcess(tmp_path / "data", fsync=fsync)
    try:
        KafkaPython(broker.bootstrap).create("load")
        with load(broker.bootstrap, "load") as running:
            for _ in range(NUM_KILLS):
                running.wait_for_acknowledgements(200)
                broker.pause()  # so that more is under way when it dies
                time.sleep(0.05)
                broker.kill9()
                broker.start()
            running.wait_for_acknowledgements(200)
            running.finish()
        assert running.errors == []
        assert sorted(running.acknowledged) == list(range(running.num_sent))
        assert stored_numbers(broker.bootstrap, "load") == list(range(running.num_sent))
    finally:
        broker.stop()


def test_topics_their_configs_and_starts_survive_kill_9(own_broker):
    client = KafkaPython(own_broker.bootstrap)
    client.create("kept", 3, {"max.message.bytes": "5000"})
    client.create("deleted")
    client.produce("kept", [Sent(b"%d" % n) for n in range(10)], partition=2)
    client.delete_records("kept", 4, partition=2)
    client.delete("deleted")
    own_broker.restart()
    assert client.topics() == {"kept": 3}
    assert client.configs("kept")["max.message.bytes"] == "5000"
    assert client.ends("kept", 2) == (4, 10)


def test_a_retry_across_the_restart_is_recognised_and_a_gap_is_refused(own_broker):
    KafkaPython(own_broker.bootstrap).create("retried")
    sent = [batch([b"a", b"b"], producer_id=9, epoch=0, sequence=s) for s in (0, 2, 4)]
    with Connection(own_broker.bootstrap) as connection:
        offsets = [connection.produce("retried", data).base_offset for data in sent]
    own_broker.restart()
    with Connection(own_broker.bootstrap) as connection:
        assert [connection.produce("retried", data).base_offset for data in sent] == offsets
        gap = connection.produce("retried", batch([b"c"], producer_id=9, epoch=0, sequence=8))
        assert gap.error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        unknown = connection.produce("retried", batch([b"d"], producer_id=10, epoch=0, sequence=8))
        assert (unknown.error_code, unknown.base_offset) == (ErrorCode.NONE, 6)


@pytest.fixture
def stopped(own_broker: BrokerProcess) -> tuple[BrokerProcess, Path]:
    """A broker that ended in good order with records 0 to 9, a batch each; and their file."""
    client = KafkaPython(own_broker.bootstrap)
    client.create("t")
    with Connection(own_broker.bootstrap) as connection:
        for number in range(10):
            connection.produce("t", batch([b"%08d" % number]))
    assert own_broker.stop() == 0
    (file,) = (own_broker.data_dir / "topics" / "t" / "0").glob("*.log")
    return own_broker, file


def test_a_torn_tail_is_cut_off_with_a_word_about_it(stopped):
    broker, file = stopped
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    broker.start()
    assert stored_numbers(broker.bootstrap, "t") == list(range(9))
    size = len(whole) // 10
    told = f"{file}: cut off a write that was interrupted: {size - 3} bytes from byte {9 * size}"
    assert told in broker.log_file.read_text()


def refused_start(*arguments: str) -> str:
    """The one line that a broker leaves behind when it cannot start."""
    command = [sys.executable, "-P", "-m", "connectors.broker", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == EXIT_ENVIRONMENT, ended.stderr
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    return ended.stderr


def test_a_flipped_bit_before_intact_records_is_named_and_nothing_is_dropped(stopped):
    broker, file = stopped
    content = bytearray(file.read_bytes())
    size = len(content) // 10
    content[5 * size + size - 4] ^= 0x10
    file.write_bytes(content)
    line = refused_start("--data-dir", str(broker.data_dir))
    assert f"{file}: damaged at byte {5 * size} (offset 5)" in line
    assert file.read_bytes() == content


def test_a_topic_whose_description_is_gone_is_named(stopped):
    broker, file = stopped
    (file.parent.parent / "topic.json").unlink()
    assert str(file.parent.parent / "topic.json") in refused_start(
        "--data-dir", str(broker.data_dir)
    )


def test_a_second_broker_on_the_directory_is_refused_and_harms_nothing(own_broker):
    line = refused_start("--data-dir", str(own_broker.data_dir))
    assert f"{own_broker.data_dir}: is in use by the broker with pid {own_broker.pid}" in line
    KafkaPython(own_broker.bootstrap).create("still-served")
    with pytest.raises(DirectoryLocked):
        server.serve(own_broker.data_dir)


def test_a_taken_port_is_refused(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused_start("--data-dir", str(tmp_path / "data"), "--port", str(port))
    assert f"port {port} of 127.0.0.1 is taken" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data-dir", "/proc/nowhere"], "/proc/nowhere: cannot be used"),
        (["--data-dir", "{folder}", "--host", "203.0.113.9"], "cannot listen on 203.0.113.9"),
        (["--data-dir", "{folder}", "--host", "no such host"], "no such host: is no address"),
    ],
)
def test_other_reasons_not_to_start_are_one_line(tmp_path, arguments, said):
    assert said in refused_start(*(a.format(folder=tmp_path / "data") for a in arguments))


def test_a_full_disk_fails_producing_and_loses_nothing(own_broker):
    """The broker's files may not grow beyond a limit for a while, which fails like a full disk."""
    client = KafkaPython(own_broker.bootstrap)
    client.create("t")
    with Connection(own_broker.bootstrap) as connection:
        assert connection.produce("t", batch([b"a" * 5000])).base_offset == 0
        resource.prlimit(own_broker.pid, resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))
        refused = connection.produce("t", batch([b"b" * 5000]))
        assert (refused.error_code, refused.base_offset) == (ErrorCode.KAFKA_STORAGE_ERROR, -1)
        # It serves on: readers read, and what fits is written.
        assert records(connection.fetch({("t", 0): 0})[0].records) == [(0, b"a" * 5000)]
        assert connection.produce("t", batch([b"c"])).base_offset == 1
        assert connection.produce("t", batch([b"d" * 5000])).error_code
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(own_broker.pid, resource.RLIMIT_FSIZE, unlimited)
        assert connection.produce("t", batch([b"e" * 5000])).base_offset == 2
    own_broker.restart()
    with Connection(own_broker.bootstrap) as connection:
        kept = [value for _, value in records(connection.fetch({("t", 0): 0})[0].records)]
    assert kept == [b"a" * 5000, b"c", b"e" * 5000]
    assert "cut off" not in own_broker.log_file.read_text()


@pytest.mark.parametrize("load", [KafkaPythonLoad, ConfluentLoad])
def test_idempotent_producers_ride_out_a_full_disk(own_broker, load):
    KafkaPython(own_broker.bootstrap).create("load")
    with load(own_broker.bootstrap, "load") as running:
        running.wait_for_acknowledgements(200)
        # Less than the log has by now, more than the notices take.
        resource.prlimit(own_broker.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        deadline = time.monotonic() + 30
        while "cannot write" not in own_broker.log_file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(own_broker.pid, resource.RLIMIT_FSIZE, unlimited)
        running.wait_for_acknowledgements(200)
        running.finish()
    assert running.errors == []
    assert stored_numbers(own_broker.bootstrap, "load") == list(range(running.num_sent))


def test_sigterm_ends_waiting_fetches_and_the_process(own_broker):
    KafkaPython(own_broker.bootstrap).create("t")
    with Connection(own_broker.bootstrap) as waiting, Connection(own_broker.bootstrap):
        waiting.produce("t", batch([b"x"]))
        ended = threading.Event()

        def wait() -> None:
            (answer,) = waiting.fetch({("t", 0): 1}, min_bytes=1, max_wait_ms=120_000)
            assert answer.records == b""
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)  # lets it reach the broker; either way it must end
        assert own_broker.stop() == 0
        thread.join(30)
        assert ended.is_set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_in_good_order(own_broker, number):
    os.kill(own_broker.pid, number)
    assert own_broker.wait() == 0
    assert own_broker.log_file.read_text() == ""
