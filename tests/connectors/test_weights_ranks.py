"""Engines of several ranks in one group, and what the group runs over."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
import torch

from connectors.records import Version
from connectors.weights import Ack, JoinRequest, Peer, Snapshot, WeightsSender, plan, shapes_of
from connectors.weights.broadcasts import Broadcasts, backend, ranks
from connectors.weights.calls import Answers, ask
from connectors.weights.wire import Unreachable, UpdateAborted, UpdateRequest, WeightsError
from tests.connectors.weights_engine import model
from tests.connectors.weights_process import EngineProcess

SIZE = (256, 2)
LAYOUT = plan(shapes_of(model(*SIZE, 0).named_parameters()), torch.float32, bucket_bytes=1 << 18)
TIMEOUT_S = 5.0
epochs = itertools.count(1)


def snapshot_of(seed: int) -> Snapshot:
    return Snapshot.take(model(*SIZE, seed).named_parameters(), LAYOUT)


# ---------------------------------------------------------------------------------- the arithmetic
def test_each_engine_gets_ranks_of_its_own_after_the_senders() -> None:
    peers = [Peer("a", num_ranks=2), Peer("b"), Peer("c", num_ranks=3)]

    assert [list(of) for of in ranks(peers)] == [[1, 2], [3], [4, 5, 6]]


def on(device: str) -> Snapshot:
    """`meta` stands for a GPU where only the kind of device matters."""
    return Snapshot(LAYOUT, LAYOUT.empty(device), "")


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(("cuda", "cuda"), "nccl"), (("cuda", "cpu"), "gloo"), (("cpu",), "gloo")],
)
def test_the_group_runs_over_nccl_only_if_all_its_bytes_lie_on_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], expected: str
) -> None:
    peers = [Peer(f"e{index}", device=device) for index, device in enumerate(devices)]
    snapshot = on("meta")

    assert backend(snapshot, peers) == "gloo", "the snapshot lies on no GPU"
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert backend(snapshot, peers) == expected


class PlayedBroadcasts(Broadcasts):
    """Every group over NCCL fails for everyone, every other succeeds."""

    def __init__(self, on_cpu: Snapshot) -> None:
        super().__init__(TIMEOUT_S, threading.Event(), lambda _: on_cpu)
        self.attempts: list[tuple[str, Snapshot]] = []

    def _attempt(
        self, snapshot: Snapshot, version: Version, epoch: int, peers: tuple[Peer, ...], over: str
    ) -> Answers:
        self.attempts.append((over, snapshot))
        if over == "nccl":
            return {peer.url: UpdateAborted("two ranks on one GPU") for peer in peers}
        return {peer.url: Ack(version=version, digest=snapshot.digest) for peer in peers}


def test_what_fails_for_all_over_nccl_is_tried_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    on_gpu, on_cpu = on("meta"), on("cpu")
    broadcasts = PlayedBroadcasts(on_cpu)

    answers = broadcasts.publish(on_gpu, Version(0, 1), 1, [Peer("a", device="cuda")])

    assert broadcasts.attempts == [("nccl", on_gpu), ("gloo", on_cpu)]
    assert answers == {"a": Ack(version=Version(0, 1), digest="")}


# ------------------------------------------------------------------------------ ranks as processes
class RankedEngine:
    """One engine whose ranks are processes: what it is sent goes to each, with its own rank."""

    def __init__(self, members: list[EngineProcess]) -> None:
        self.members = members
        self.joined: list[JoinRequest] = []
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = engine.forward(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.peer = Peer(url, host="another", num_ranks=len(members))

    def forward(self, path: str, body: bytes) -> tuple[int, bytes]:
        requests: list[msgspec.Struct]
        if path.endswith("join"):
            request = msgspec.json.decode(body, type=JoinRequest)
            self.joined.append(request)
            requests = [
                msgspec.structs.replace(request, rank=request.rank + index)
                for index in range(len(self.members))
            ]
        else:
            requests = [msgspec.json.decode(body, type=UpdateRequest)] * len(self.members)
        with ThreadPoolExecutor(len(self.members)) as pool:
            sent = [
                pool.submit(ask, member.url, "POST", path, request, dict, 2 * TIMEOUT_S)
                for member, request in zip(self.members, requests, strict=True)
            ]
        answers = [call.exception() or call.result() for call in sent]
        failed = next((a for a in answers if isinstance(a, WeightsError)), None)
        if failed is not None:
            return failed.status, failed.body()
        return 200, msgspec.json.encode(answers[0])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EngineProcess]]:
    torch.set_num_threads(1)
    made = [EngineProcess(*SIZE, seed=seed) for seed in (1, 2, 3)]
    yield made
    for process in made:
        process.kill9()


@pytest.fixture
def ranked(processes: list[EngineProcess]) -> Iterator[RankedEngine]:
    for process in processes:
        if process.exited:
            process.restart()
    engine = RankedEngine(processes[:2])
    yield engine
    engine.close()


@pytest.fixture
def single(processes: list[EngineProcess], ranked: RankedEngine) -> EngineProcess:
    return processes[2]


def test_every_rank_of_an_engine_takes_part_in_the_broadcast(
    ranked: RankedEngine, single: EngineProcess
) -> None:
    sender, epoch = WeightsSender(TIMEOUT_S, "group"), next(epochs)
    for number in (1, 2):
        snapshot = snapshot_of(10 + number)
        answers = sender.publish(snapshot, Version(0, number), epoch, [ranked.peer, single.peer])

        ack = Ack(version=Version(0, number), digest=snapshot.digest)
        assert answers == {ranked.peer.url: ack, single.url: ack}
        for process in (*ranked.members, single):
            assert process.state().digest == snapshot.digest
    sender.close()
    (asked,) = ranked.joined
    assert (asked.rank, asked.num_ranks, asked.world) == (1, 2, 4)


def test_an_engine_that_lost_one_of_its_ranks_does_not_keep_another_from_the_version(
    ranked: RankedEngine, single: EngineProcess
) -> None:
    sender, epoch = WeightsSender(TIMEOUT_S, "group"), next(epochs)
    peers = [ranked.peer, single.peer]
    sender.publish(snapshot_of(20), Version(0, 1), epoch, peers)
    ranked.members[1].kill9()

    snapshot = snapshot_of(21)
    answers = sender.publish(snapshot, Version(0, 2), epoch, peers)
    sender.close()

    assert isinstance(answers[ranked.peer.url], Unreachable)
    assert answers[single.url] == Ack(version=Version(0, 2), digest=snapshot.digest)
    assert single.state().digest == snapshot.digest
