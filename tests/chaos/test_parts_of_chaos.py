"""The chaos suite's own parts: its schedules, its proxy, what it does to files, its table."""

from __future__ import annotations

import random
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from connectors.broker.log import Log
from connectors.kafka.client import Cluster, Producer, read_all
from connectors.kafka.topics import ensure_topics
from tests.broker_process import BrokerProcess
from tests.chaos.__main__ import read, table
from tests.chaos.faults import newest_segment, tear_tail
from tests.chaos.proxy import Proxy
from tests.chaos.run import Result
from tests.chaos.schedule import KINDS, NETWORK, SHORT, schedule
from tests.small_run import until

FULL = [schedule(seed) for seed in range(50)]


def test_a_seed_always_gives_the_same_schedule_and_another_one_another() -> None:
    assert [schedule(seed) for seed in range(50)] == FULL
    assert len({plan.events for plan in FULL}) == 50


def test_every_full_schedule_kills_every_role_and_at_least_ten_times() -> None:
    for plan in FULL:
        kills = [event.victims for event in plan.events if event.kind == "kill"]
        assert {victim for victims in kills for victim in victims} == set(plan.roles)
        assert sum(map(len, kills)) >= 10
        assert sum(len(victims) == 2 for victims in kills) == 3
        assert all(len(set(victims)) == len(victims) for victims in kills)


def test_fifty_full_and_five_short_schedules_have_every_kind_of_event() -> None:
    assert {event.kind for plan in FULL for event in plan.events} == set(KINDS)
    short = [schedule(seed, short=True) for seed in range(len(SHORT))]
    assert {event.kind for plan in short for event in plan.events} == set(KINDS)


def test_the_network_is_only_hurt_where_a_proxy_stands() -> None:
    for plan in [*FULL, *(schedule(seed, short=True) for seed in range(5))]:
        assert plan.proxied or not {event.kind for event in plan.events} & set(NETWORK)


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(4096):
            self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """In front of a server that says everything again."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        through = Proxy(server.server_address[1])
        yield through
        through.close()
        server.shutdown()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=20)


def test_a_proxy_carries_both_ways_until_it_drops_its_connections(proxy: Proxy) -> None:
    with connect(proxy) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        proxy.drop()
        assert is_cut(client)
    with connect(proxy) as client:
        client.sendall(b"two")
        assert client.recv(10) == b"two"


def test_a_proxy_that_refuses_cuts_new_connections_and_leaves_old_ones(proxy: Proxy) -> None:
    with connect(proxy) as old:
        old.sendall(b"old")
        assert old.recv(10) == b"old"
        proxy.refuse()
        with connect(proxy) as new:
            assert is_cut(new)
        old.sendall(b"still")
        assert old.recv(10) == b"still"
    proxy.restore()
    with connect(proxy) as client:
        client.sendall(b"again")
        assert client.recv(10) == b"again"


@pytest.mark.parametrize("direction", ["to server", "to client"])
def test_a_stalled_direction_carries_nothing_until_it_is_restored(
    proxy: Proxy, direction: str
) -> None:
    with connect(proxy) as client:
        client.sendall(b"one")
        assert client.recv(10) == b"one"
        proxy.stall(direction)  # type: ignore[arg-type]
        client.sendall(b"two")
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(10)
        proxy.restore()
        client.settimeout(20)
        assert client.recv(10) == b"two"


def test_a_delayed_piece_comes_later(proxy: Proxy) -> None:
    with connect(proxy) as client:
        proxy.delay(0.2)
        started = time.monotonic()
        client.sendall(b"late")
        assert client.recv(10) == b"late"
        assert time.monotonic() - started >= 0.4  # there and back


def is_cut(client: socket.socket) -> bool:
    try:
        return client.recv(10) == b""
    except ConnectionError:
        return True


def test_a_kafka_client_stays_behind_the_proxy_it_was_given(own_broker: BrokerProcess) -> None:
    proxy = Proxy(own_broker.port, kafka=True)
    cluster = Cluster(bootstrap_servers=f"127.0.0.1:{proxy.port}", unavailable_s=20)
    topic = cluster.topic("t")
    ensure_topics(cluster, {"t": 1})
    with closing(Producer(cluster)) as producer:
        assert producer.append(topic, 0, b"small") == 0
        proxy.refuse()
        proxy.drop()
        producer.send(topic, 0, b"large" * 100_000)
        time.sleep(0.5)
        assert Path(own_broker.data_dir, "topics", topic, "0").exists()
        proxy.restore()
        assert producer.flush() == [1]
    assert [r.value for r in read_all(cluster, topic, [0])] == [b"small", b"large" * 100_000]
    proxy.close()


@pytest.mark.parametrize("how", ["garbage", "half a batch"])
def test_a_torn_tail_is_behind_the_last_record_and_cut_off(
    own_broker: BrokerProcess, own_cluster: Cluster, how: str
) -> None:
    topic = own_cluster.topic("t")
    ensure_topics(own_cluster, {"t": 2})
    with closing(Producer(own_cluster)) as producer:
        for value in (b"one", b"two"):
            producer.append(topic, 1, value)
    own_broker.kill9()
    segment = newest_segment(own_broker.data_dir, topic)
    assert segment is not None
    before = segment.stat().st_size
    tear_tail(segment, how, random.Random(3))
    assert segment.stat().st_size > before
    log = Log(segment.parent)
    assert log.repair is not None
    assert (log.repair.position, log.end_offset) == (before, 2)
    own_broker.start()
    until(lambda: len(read_all(own_cluster, topic, [1])) == 2, "both records")


def test_the_last_result_of_a_seed_counts_and_a_failure_is_told_below_the_table(
    tmp_path: Path,
) -> None:
    file = tmp_path / "results.jsonl"
    assert read(file) == {}
    results = [Result(seed=1, failure="no step"), Result(seed=2, kills=11), Result(seed=1, kills=9)]
    file.write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in results[:2]))
    assert table(read(file).values())[-2:] == ["seed 1 failed: no step", "1 of 2 runs ok"]
    with file.open("ab") as added:
        added.write(msgspec.json.encode(results[2]))
    assert {seed: r.kills for seed, r in read(file).items()} == {1: 9, 2: 11}
    assert table(read(file).values())[-1] == "2 of 2 runs ok"
