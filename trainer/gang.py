"""The other ranks, as rank 0 has them: it starts their processes, tells them what to do, and hears
when one is gone.

    tell(call)      ──pipe──▶ every rank, in order; tell_each: each what is its own
    write(folder)   ──pipe──▶ every rank, beside the calls; ──▶ each says that its files are there
    watch (thread)  ◀──pipe── Ready, Written, Failed, or the end of a rank

Ranks meet in a store that rank 0 serves, and train through collectives of their own; the pipes
carry only what is to be done. A rank that is gone is told by the next call, by `check`, and by the
collective that waits for it. If rank 0 itself is gone, so are the others, at once.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from signal import Signals
from typing import Final

from torch._C._distributed_c10d import TCPStore

from connectors.config import Config
from connectors.kafka.client import Cluster
from connectors.run_dir import RunDir
from connectors.weights.group import serve_store
from trainer import rank_line
from trainer.engine import TrainingEngine
from trainer.process_group import World
from trainer.rank import MEET_S
from trainer.rank_line import Failed, Start, Told, Write, Written
from trainer.shares import Call, Close

log = logging.getLogger(__name__)

ADDRESS: Final = "HEADWATER_TRAINER_ADDRESS"
"""The variable with the address on which the ranks meet; loopback without it."""
DEVICES: Final = "CUDA_VISIBLE_DEVICES"
SETTLE_S: Final = 0.3
"""After one rank is gone its peers fail of that, and nobody knows yet which was the first."""
NOTICE_S: Final = 3.0
"""How long an error of rank 0 may come before the end of the rank that it is an error of."""
WRITE_S: Final = 600.0
"""The least time that a rank has for its files of a checkpoint."""
WRITE_RATIO: Final = 10.0
"""How many times as long as rank 0 it may take."""
CLOSE_S: Final = 20.0
"""How long a rank may take to end after Close."""
SURFACE_S: Final = 60.0
"""When a rank is gone and rank 0 did not come by to hear of it, it is in a collective that never
ends."""
TAIL_LINES: Final = 3
TAIL_BYTES: Final = 8192
"""Of a log, in which they are looked for."""


class RankDied(RuntimeError):
    """Another rank of the trainer is gone. The message says which, how it ended, what it said."""


@contextmanager
def engine(
    config: Config, cluster: Cluster, run_dir: RunDir, role: str = "trainer"
) -> Iterator[TrainingEngine]:
    """The engine a configuration asks for, holding the initial model, with as many ranks as it
    asks for: this process is rank 0, RUN/logs/ROLE-rank-K.log the log of another one. `cluster`:
    where the records are that steps train on. RankDied when another rank is gone."""
    if config.trainer.num_ranks == 1:
        with closing(TrainingEngine.of(config)) as alone:
            yield alone
        return
    gang = Gang(config, cluster, lambda rank: run_dir.log_file(f"{role}-rank-{rank}"))
    with closing(gang), gang.watched():
        gang.wait_ready()
        world = World(num_ranks=gang.num_ranks, store=gang.store)
        with closing(TrainingEngine.of(config, world, gang)) as first, gang.watched():
            yield first


class _Rank:
    """One of the others."""

    def __init__(self, process: subprocess.Popen[bytes], pipe: Connection, log_file: Path) -> None:
        self.process, self.pipe, self.log_file = process, pipe, log_file
        self.is_ready = False
        self.failure: str | None = None
        self._sends = threading.Lock()

    def send(self, told: Told) -> None:
        """Nothing is sent to one that is gone: the thread that watches says so."""
        with self._sends, suppress(OSError):
            self.pipe.send_bytes(rank_line.encode(told))

    @property
    def was_killed(self) -> bool:
        return (self.process.returncode or 0) < 0


class Gang:
    """Ranks 1 to `num_ranks` - 1 of a trainer. `log_file(K)`: where rank K's output is appended;
    `program`: the module that a rank runs."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        log_file: Callable[[int], Path],
        *,
        program: str = "trainer.worker",
    ) -> None:
        """Starts the processes, which end when the calling thread does, and returns at once."""
        address = os.environ.get(ADDRESS, "127.0.0.1")
        if address == "127.0.0.1" and sys.platform == "linux":
            # Without it gloo listens where the host's name points.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.store: TCPStore = serve_store(address, MEET_S)
        self.num_ranks = config.trainer.num_ranks
        self._ranks: dict[int, _Rank] = {}
        self._news = threading.Condition()
        self._gone: list[int] = []  # ranks, in the order in which their ends were seen
        self._written: dict[tuple[int, str], str | None] = {}
        self._is_closing = self._is_killed = False
        self._last_resort: threading.Timer | None = None
        for rank in range(1, self.num_ranks):
            self._ranks[rank] = self._start(rank, log_file(rank), program, config, cluster, address)
        self._watcher = threading.Thread(target=self._watch, name="gang", daemon=True)
        self._watcher.start()

    def _start(
        self,
        rank: int,
        log_file: Path,
        program: str,
        config: Config,
        cluster: Cluster,
        address: str,
    ) -> _Rank:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        here, there = Pipe()
        device = _device(rank, config.trainer.num_gpus)
        with log_file.open("ab") as output, closing(there):
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", program, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[there.fileno()],
                env={**os.environ, "PYTHONUNBUFFERED": "1", DEVICES: device},
            )
        started = _Rank(process, here, log_file)
        started.send(
            Start(
                rank=rank,
                num_ranks=self.num_ranks,
                store=(address, self.store.port),
                config=config.model_dump_json(),
                base_dir=config.base_dir,
                cluster=cluster,
            )
        )
        return started

    # ------------------------------------------------------------------------------- what is told
    def wait_ready(self) -> None:
        """Until all are about to meet. RankDied; RuntimeError when they are not in MEET_S."""
        with self._news:
            is_over = self._news.wait_for(
                lambda: self._gone or all(rank.is_ready for rank in self._ranks.values()), MEET_S
            )
        self.check()
        if not is_over:
            raise RuntimeError(f"not all ranks came up in {MEET_S:.0f} s")

    def tell(self, call: Call) -> None:
        """Makes the other ranks do it, after what they were told before. RankDied."""
        self._is_closing |= isinstance(call, Close)
        self.tell_each(dict.fromkeys(self._ranks, call))

    def tell_each(self, calls: Mapping[int, Call]) -> None:
        """As `tell`, each rank what is its own."""
        if self._is_killed:
            return
        self.check()
        for rank, call in calls.items():
            self._ranks[rank].send(call)

    def check(self) -> None:
        """RankDied when one is gone."""
        if self._gone and not self._is_killed:
            self._heard()
            raise self._death()

    def write(self, folder: Path) -> Callable[[], None]:
        """Makes the other ranks write what they captured last into `folder`, beside whatever they
        are told meanwhile; what is returned waits for them. That raises RankDied, and RuntimeError
        for one that could not, or did not in WRITE_S and WRITE_RATIO times what the caller took
        before it waited."""
        started = time.monotonic()
        for rank in self._ranks.values():
            rank.send(Write(str(folder)))
        wanted = [(rank, str(folder)) for rank in self._ranks]

        def wait_written() -> None:
            limit_s = max(WRITE_S, WRITE_RATIO * (time.monotonic() - started))
            with self._news:
                self._news.wait_for(
                    lambda: self._gone or all(key in self._written for key in wanted), limit_s
                )
                found = {key: self._written.pop(key) for key in wanted if key in self._written}
            for key in wanted:
                if key not in found and self._gone:
                    raise self._death()
                if key not in found:
                    raise RuntimeError(f"rank {key[0]} has not written in {limit_s:.0f} s")
                if found[key] is not None:
                    raise RuntimeError(f"rank {key[0]}: {found[key]}")

        return wait_written

    # ------------------------------------------------------------------------------------ the end
    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, an error that the end of a rank explains becomes RankDied. After any error the
        ranks are killed: they may wait for this one in a collective."""
        try:
            yield
        except BaseException as error:
            died = self._behind(error)
            self.kill()
            if died is not None:
                raise died from error
            raise

    def close(self) -> None:
        """Ends the ranks, in order if nothing went wrong; none is left."""
        if not self._is_closing and not self._gone:
            self.tell(Close())
        self._is_closing = True
        deadline = time.monotonic() + CLOSE_S
        for number, rank in self._ranks.items():
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("rank %d does not end: killed", number)
                rank.process.kill()
        self.kill()

    def kill(self) -> None:
        """Ends them at once; from now on nobody is told anything."""
        self._is_closing = self._is_killed = True
        for rank in self._ranks.values():
            rank.process.kill()
        self._watcher.join()
        self._heard()

    def _behind(self, error: BaseException) -> RankDied | None:
        if not isinstance(error, RuntimeError) or isinstance(error, RankDied):
            return None
        of_libraries = type(error).__module__.partition(".")[0] in ("builtins", "torch")
        patience_s = NOTICE_S if of_libraries else 0.0
        with self._news:
            is_gone = self._news.wait_for(lambda: self._gone, patience_s)
        if not is_gone or self._is_killed:
            return None
        self._heard()
        return self._death()

    def _death(self) -> RankDied:
        """Of the rank that was the first, as far as can be known."""
        with self._news:
            self._news.wait_for(
                lambda: any(self._ranks[k].was_killed for k in self._gone), SETTLE_S
            )
            number = min(self._gone, key=lambda k: not self._ranks[k].was_killed)
        rank = self._ranks[number]
        what = f"rank {number} of the trainer "
        if rank.failure is not None:
            return RankDied(f"{what}failed: {rank.failure} (log: {rank.log_file})")
        code = rank.process.returncode
        ending = f"was ended by {Signals(-code).name}" if code < 0 else f"ended with {code}"
        said = " | ".join(_tail(rank.log_file)) or "nothing"
        return RankDied(f"{what}{ending}; the last it said is: {said} (log: {rank.log_file})")

    def _heard(self) -> None:
        if self._last_resort is not None:
            self._last_resort.cancel()

    # ---------------------------------------------------------------------------------- its thread
    def _watch(self) -> None:
        pipes = {rank.pipe: number for number, rank in self._ranks.items()}
        while pipes:
            for pipe in wait_for_any(list(pipes)):
                assert isinstance(pipe, Connection)
                number = pipes[pipe]
                try:
                    said = rank_line.decode_said(pipe.recv_bytes())
                except (EOFError, OSError):
                    del pipes[pipe]
                    self._end(number)
                    continue
                with self._news:
                    match said:
                        case Written(folder, error):
                            self._written[number, folder] = error
                        case Failed(error):
                            self._ranks[number].failure = error
                        case _:
                            self._ranks[number].is_ready = True
                    self._news.notify_all()

    def _end(self, number: int) -> None:
        code = self._ranks[number].process.wait()
        with self._news:
            if self._is_closing:
                if code and not self._is_killed:
                    log.warning("rank %d ended with %d when it was closed", number, code)
                return
            self._gone.append(number)
            self._news.notify_all()
            if len(self._gone) == 1:
                self._last_resort = threading.Timer(SURFACE_S, self._give_up)
                self._last_resort.daemon = True
                self._last_resort.start()

    def _give_up(self) -> None:
        log.critical("%s", self._death())
        logging.shutdown()
        os._exit(1)


def _device(rank: int, num_gpus: float) -> str:
    """What CUDA_VISIBLE_DEVICES names to a rank: one of those this process sees."""
    named = os.environ.get(DEVICES)
    if not num_gpus or named == "":
        return ""
    return str(rank) if named is None else named.split(",")[rank]


def _tail(log_file: Path) -> Sequence[str]:
    """The last lines that say something."""
    with suppress(OSError), log_file.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip()][-TAIL_LINES:]
    return []
