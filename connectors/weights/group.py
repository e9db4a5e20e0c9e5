"""A process group of the weights channel: built by hand on a store, never torch's default group
(the trainer's framework owns that one), gone as a whole after any failure.

The sender is rank 0 and serves the store. An update begins with a broadcast of one element, so that
a member knows whether it was called off before the first byte. Every wait here ends by its
deadline, or at once when `cancelled()` says so: what libraries may do beyond that is left behind in
daemon threads.
"""

from __future__ import annotations

import atexit
import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

T = TypeVar("T")

POLL_S = 0.001  # how soon a finished broadcast, a signal or a cancellation is noticed
GRACE_S = 60.0  # NCCL's own time-out, which ends the process, lies this far behind ours
EXIT_S = 2.0


class GroupBroken(RuntimeError):
    """A member left, stopped or never came: form another group."""


def poll(done: Callable[[], bool], deadline: float, cancelled: Callable[[], bool]) -> None:
    """Waits until done(); GroupBroken at the monotonic `deadline` or when cancelled."""
    while not done():
        if cancelled():
            raise GroupBroken("called off")
        if time.monotonic() > deadline:
            raise GroupBroken("timed out")
        time.sleep(POLL_S)


def within(work: Callable[[], T], deadline: float, cancelled: Callable[[], bool]) -> T:
    """The result of blocking `work`, on a thread that is left behind at the deadline or when
    cancelled. GroupBroken for any of its errors."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # the libraries raise RuntimeError, ValueError and their own
            errors.append(error)

    thread = _beside(run)
    poll(lambda: not thread.is_alive(), deadline, cancelled)
    if errors:
        raise GroupBroken(_first_line(errors[0])) from errors[0]
    return results[0]


def _first_line(error: Exception) -> str:
    """What happened, without gloo's advice and C++ stack."""
    return str(error).split("\n")[0].split(". This is typically")[0]


def _beside(work: Callable[[], None]) -> threading.Thread:
    """A daemon thread for what a library may make hang; given a moment when the process exits, as
    one that wakes up inside library code while the interpreter ends takes the process down."""
    if not _left_behind:
        atexit.register(_finish)
    thread = threading.Thread(target=work, daemon=True, name="weights-group")
    _left_behind[:] = [t for t in _left_behind if t.is_alive()] + [thread]
    thread.start()
    return thread


_left_behind: list[threading.Thread] = []


def _finish() -> None:
    deadline = time.monotonic() + EXIT_S
    for thread in _left_behind:
        thread.join(max(0.0, deadline - time.monotonic()))


def local_address(hosts: Sequence[str]) -> str:
    """The address of this machine that all `hosts` reach: loopback when they are."""
    distant = [host for host in hosts if not _is_loopback(host)]
    if not distant:
        return "127.0.0.1"
    family, _, _, _, address = socket.getaddrinfo(distant[0], 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # of a datagram socket: picks the route, sends nothing
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def serve_store(address: str, timeout_s: float) -> TCPStore:
    """A store served by this process on a free port of `address` only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """Another process's store."""
    return TCPStore(
        host, port, timeout=timedelta(seconds=timeout_s), is_master=False, wait_for_workers=False
    )


class Group:
    """One formed group. After GroupBroken it is closed and its buffers may still be written to by
    work left behind: drop them."""

    def __init__(
        self,
        store: TCPStore,
        name: str,
        rank: int,
        world: int,
        *,
        backend: str,
        address: str,
        timeout_s: float,
        device: torch.device,
    ) -> None:
        """Blocks until every rank is connected; RuntimeError when one does not come in timeout_s.
        `address` is the local interface gloo listens on; NCCL chooses its own. `device` is where
        NCCL's tensors lie."""
        self.name = name
        self.rank = rank
        self.timeout_s = timeout_s
        self._store = store
        self.device = torch.device("cpu") if backend == "gloo" else device
        prefixed = PrefixStore(name, store)
        self._process_group: Any
        if backend == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=timeout_s)
            self._process_group = ProcessGroupGloo(prefixed, rank, world, options)
        elif backend == "nccl":
            self._process_group = _nccl(prefixed, rank, world, timeout_s, device)
        else:
            raise ValueError(f"the weights channel's backend is gloo or nccl, not {backend!r}")

    def signal_ready(self, serial: int) -> None:
        """A member says that it waits for broadcast `serial`."""
        self._store.set(ready_key(self.name, serial, self.rank), "1")

    def broadcast(
        self, tensors: Sequence[Tensor], deadline: float, cancelled: Callable[[], bool],
        received: Callable[[int], None] = lambda index: None,
    ) -> None:  # fmt: skip
        """Sends (rank 0) or receives each flat tensor in order; `received(i)` runs when tensor i is
        whole, while later ones are under way. GroupBroken closes the group."""
        whole = self.stream(tensors, deadline, cancelled, ahead=len(tensors))
        for index, _ in enumerate(whole):
            received(index)

    def stream(
        self,
        tensors: Iterable[Tensor],
        deadline: float,
        cancelled: Callable[[], bool],
        ahead: int = 1,
    ) -> Iterator[Tensor]:
        """As `broadcast`, yielding each tensor when it is whole. `tensors` may be made on demand:
        only `ahead` of them are under way meanwhile. Leaving early closes the group."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        process_group = self._process_group
        if process_group is None:
            raise GroupBroken("closed")
        source = iter(tensors)
        works: deque[tuple[Tensor, Any]] = deque()
        whole = False
        try:
            while True:
                while len(works) <= ahead and (tensor := next(source, None)) is not None:
                    works.append((tensor, process_group.broadcast([tensor], options)))
                if not works:
                    break
                tensor, work = works.popleft()
                poll(work.is_completed, deadline, cancelled)
                work.wait()
                yield tensor
            whole = True
        except GroupBroken:
            raise
        except RuntimeError as error:
            raise GroupBroken(_first_line(error)) from error
        finally:
            if not whole:
                # The connections close, and the other members hear of it, with the last reference.
                process_group = work = None
                works.clear()
                self.close()

    def close(self) -> None:
        """Members that wait for this one are told by the broken connection."""
        last = [self._process_group]
        self._process_group = None
        if last[0] is not None:
            last[0].abort()
            # The last reference's end may wait for work that hangs.
            _beside(last.clear)


def ready_key(group: str, serial: int, rank: int) -> str:
    return f"{group}/ready/{serial}/{rank}"


def here_key(group: str, rank: int) -> str:
    """Set by a member that is about to connect."""
    return f"{group}/here/{rank}"


def _nccl(store: PrefixStore, rank: int, world: int, timeout_s: float, device: torch.device) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # absent from torch's CPU builds

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s + GRACE_S)  # the watchdog ends the process then
    with torch.cuda.device(device):  # a thread's own; this one may be fresh
        made = ProcessGroupNCCL(store, rank, world, options)
        made.eager_connect_single_device(device)
    return made
