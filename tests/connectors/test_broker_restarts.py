"""Every client of ours at work while its broker is killed, resets connections or stands still."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from connectors.broker import users
from connectors.kafka.client import Cluster, Producer, Reader, read_all
from connectors.kafka.feeder import HEADER_FEED, Fed, Feeder
from connectors.kafka.sink import LogSink, Outgoing
from connectors.kafka.source import LogSource, StopFlag
from connectors.kafka.tail import PolicyTail
from connectors.kafka.topics import ensure_topics, partition_counts
from connectors.prompt_lines import PromptFile
from connectors.records import Announcement, Manifest, Version, encode
from deploy.history import Follower
from tests.broker_process import BrokerProcess
from trainer.step_log import StepLog, chain, read_steps

UNAVAILABLE_S = 60.0  # more than any outage here, also on a busy machine
DEADLINE_S = 100.0

Work = Callable[[Cluster], Iterator[None]]
"""Yields after each piece of work, and checks what it reads."""


def producing(cluster: Cluster) -> Iterator[None]:
    producer, topic, sent = Producer(cluster), cluster.topic("rollouts"), 0
    while True:
        for _ in range(10):
            producer.send(topic, 0, b"%d" % sent)
            sent += 1
        assert producer.flush() == list(range(sent - 10, sent))
        yield


def polling(cluster: Cluster) -> Iterator[None]:
    reader, num_read = Reader(cluster, cluster.topic("rollouts"), {0: 0}), 0
    while True:
        found = reader.poll(0.1)
        assert [r.value for r in found] == [b"%d" % (num_read + i) for i in range(len(found))]
        num_read += len(found)
        assert reader.positions() == {0: num_read}
        if found:
            yield


def reading_at_and_asking_ends(cluster: Cluster) -> Iterator[None]:
    reader = Reader(cluster, cluster.topic("rollouts"), {0: 0})
    while True:
        end, start = reader.ends()[0], reader.starts()[0]
        for offset in {start, end // 2, end - 1} if end else ():
            assert reader.read_at(0, offset).value == b"%d" % offset
        yield


def following(cluster: Cluster) -> Iterator[None]:
    follower, num_read = Follower(cluster, "rollouts", [0]), 0
    while True:
        for record in follower.news():
            assert record.value == b"%d" % num_read
            num_read += 1
        yield


def administering(cluster: Cluster) -> Iterator[None]:
    num_made = 0
    while True:
        ensure_topics(cluster, {f"made-{num_made}": 2})
        assert partition_counts(cluster)[f"made-{num_made}"] == 2
        num_made += 1
        yield


def opening(cluster: Cluster) -> Iterator[None]:
    while True:
        with closing(Reader(cluster, cluster.topic("rollouts"), {0: 0})) as reader:
            reader.starts()
        with closing(Producer(cluster)) as producer:
            producer.append(cluster.topic("opened"), 0, b"")
        yield


def announcing_and_obeying(cluster: Cluster) -> Iterator[None]:
    producer, tail, number = Producer(cluster), PolicyTail(cluster), 0
    while True:
        _announce(producer, cluster, number)
        assert [spoken.version.number for _, spoken in tail.catch_up()] == [number]
        number += 1
        yield


def logging_steps(cluster: Cluster) -> Iterator[None]:
    own = replace(cluster, namespace="trained.")
    ensure_topics(own, {"steps": 1, "policy": 1})
    log, step = StepLog(own), 0
    epoch = log.begin(resumed_step=0)
    while True:
        step += 1
        assert log.append(_manifest(step, epoch)) == step
        assert [m.step for m in chain(read_steps(own))] == list(range(1, step + 1))
        yield


def flowing(cluster: Cluster) -> Iterator[None]:
    """bytewax's calls to our source and our sink."""
    source = LogSource(cluster, "rollouts", granted=False, stop=StopFlag())
    sink = LogSink(cluster, "trajectories", "reward")
    taken, given = source.build_part("in", "0", None), sink.build_part("out", "00000", None)
    num_written = 0
    while True:
        items = [item for _, item in taken.next_batch()]
        given.write_batch([Outgoing(key=str(item.origin.offset), value=b"") for item in items])
        num_written += len(items)
        assert taken.snapshot()[0] == given.snapshot()[0] == num_written
        if items:
            yield


def feeding(cluster: Cluster) -> Iterator[None]:
    own = replace(cluster, namespace="fed.")
    ensure_topics(own, {"prompts": 1, "policy": 1})
    file = Path(__file__).parents[2] / "examples" / "my_reward" / "prompts.jsonl"
    task = Fed(name="sums", lines=PromptFile(file), share=1.0, repeat=True)
    feeder, producer, granted = Feeder(own, [task], ahead=8), Producer(own), 0
    while True:
        assert feeder.top_up()
        granted += 5
        _announce(producer, own, granted)
        yield


def _announce(producer: Producer, cluster: Cluster, number: int) -> None:
    spoken = Announcement(epoch=0, version=Version(0, number), digest="0" * 16, limits=(number,))
    producer.append(cluster.topic("policy"), 0, encode(spoken))


def _manifest(step: int, epoch: int) -> Manifest:
    return Manifest(
        step=step,
        epoch=epoch,
        version=Version(0, step),
        records=(),
        micro_batches=(),
        seed=0,
        digest_before=f"d{step - 1}",
        digest=f"d{step}",
    )


WORKS: tuple[Work, ...] = (
    producing,
    polling,
    reading_at_and_asking_ends,
    following,
    administering,
    opening,
    announcing_and_obeying,
    logging_steps,
    flowing,
    feeding,
)


class Crew:
    """Every work in a thread of its own: a client is of one thread."""

    def __init__(self, cluster: Cluster) -> None:
        self.num_done = {work.__name__: 0 for work in WORKS}
        self.errors: dict[str, BaseException] = {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(w, cluster)) for w in WORKS]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Work, cluster: Cluster) -> None:
        try:
            for _ in work(cluster):
                self.num_done[work.__name__] += 1
                if self._stop.wait(0.02):  # ten of them share two cores with the broker
                    return
        except BaseException as error:
            self.errors[work.__name__] = error

    def all_get_on(self) -> None:
        """Every work gets three more pieces done."""
        wanted = {name: done + 3 for name, done in self.num_done.items()}
        deadline = time.monotonic() + DEADLINE_S
        while late := [name for name, done in self.num_done.items() if done < wanted[name]]:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, f"do not get on: {late}"
            time.sleep(0.02)

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in self._threads)


def killed(broker: BrokerProcess) -> None:
    """Comes back at once, dies again when clients have just found it, and is away for a while."""
    for away_s in (0.0, 0.1, 2.0):
        broker.kill9()
        time.sleep(away_s)  # the outage itself
        broker.start()


def stopped(broker: BrokerProcess) -> None:
    broker.pause()
    time.sleep(3.0)
    broker.resume()


def killed_while_stopped(broker: BrokerProcess) -> None:
    """What clients sent meanwhile lies in its sockets, and dies with it."""
    broker.pause()
    time.sleep(0.5)
    broker.kill9()
    with socket.create_server(("127.0.0.1", broker.port)) as resetting:
        resetting.settimeout(0.2)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            try:
                connection, _ = resetting.accept()
            except TimeoutError:
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
    broker.start()


@pytest.mark.parametrize(
    ("outage", "secured"),
    [
        (killed, False),
        (stopped, False),
        (killed_while_stopped, True),
        pytest.param(killed, True, marks=pytest.mark.slow),
        pytest.param(stopped, True, marks=pytest.mark.slow),
        pytest.param(killed_while_stopped, False, marks=pytest.mark.slow),
    ],
)
def test_every_client_rides_it_out_and_nothing_is_lost_or_doubled(
    tmp_path: Path, outage: Callable[[BrokerProcess], None], secured: bool
) -> None:
    arguments, security = _security(tmp_path) if secured else ([], {})
    broker = BrokerProcess(tmp_path / "data", arguments=arguments)
    cluster = Cluster(
        bootstrap_servers=broker.bootstrap, security=security, unavailable_s=UNAVAILABLE_S
    )
    try:
        names = ("rollouts", "trajectories", "opened", "policy")
        ensure_topics(cluster, dict.fromkeys(names, 1))
        crew = Crew(cluster)
        try:
            crew.all_get_on()
            outage(broker)
            crew.all_get_on()
        finally:
            crew.finish()
        _check_everything_is_there_once(cluster, crew)
    finally:
        broker.stop()


def _check_everything_is_there_once(cluster: Cluster, crew: Crew) -> None:
    produced = [r.value for r in read_all(cluster, cluster.topic("rollouts"), [0])]
    assert produced == [b"%d" % i for i in range(10 * crew.num_done["producing"])]
    written = [r.key for r in read_all(cluster, cluster.topic("trajectories"), [0])]
    assert written == [b"%d" % i for i in range(len(written))]
    assert len(read_all(cluster, cluster.topic("opened"), [0])) == crew.num_done["opening"]
    fed = read_all(cluster, "fed.prompts", [0])
    assert [int(r.headers[HEADER_FEED]) for r in fed] == list(range(len(fed)))


def _security(folder: Path) -> tuple[list[str], dict[str, str | bool]]:
    """Arguments of a broker, settings of its clients."""
    ca = trustme.CA()
    ca.cert_pem.write_to_path(folder / "ca.pem")
    ca.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    users.add(folder / "users.json", "ann", "pencil")
    settings: dict[str, str | bool] = {
        "security_protocol": "SASL_SSL",
        "ssl_cafile": str(folder / "ca.pem"),
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "ann",
        "sasl_plain_password": "pencil",
    }
    served = ["--tls-cert", str(folder / "server.pem"), "--users", str(folder / "users.json")]
    return served, settings
