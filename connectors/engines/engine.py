"""An engine: requests in, completions out, over a decoder whose weights change while it runs.

    generate, stream ─▶ queue (per sample) ─▶ decoder's batch ─▶ completion ─▶ kept for `attach`
                          waits for: a place, a whole version, min_version

Everything here runs on one asyncio loop. A request whose client is gone goes on, since the client
may attach again, for `orphan_s` at most.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from connectors.engines.following import follow
from connectors.engines.host import this_host
from connectors.engines.jobs import FinishedJobs, Job
from connectors.engines.parts import Decoder, Weights
from connectors.engines.sequence import Sequence
from connectors.engines.told import part_from
from connectors.engines.types import (
    Completion,
    EngineError,
    EngineState,
    EngineUnavailable,
    GenerateRequest,
    Part,
    RequestRefused,
    VersionGone,
)
from connectors.records import FinishReason, Version

ORPHAN_S = 600.0
KEEP_S = 600.0
KEEP_COUNT = 4096
MAX_SAMPLES = 4096  # of one request


class DecodingEngine:
    """`on_fatal` is called once, with the reason, when the decoder died: nothing will end any more
    and the process should."""

    def __init__(
        self,
        decoder: Decoder,
        weights: Weights,
        *,
        max_running: int,
        orphan_s: float = ORPHAN_S,
        finished: FinishedJobs | None = None,
    ) -> None:
        self._decoder = decoder
        self._weights = weights
        self._max_running = max_running
        self._orphan_s = orphan_s
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._finished = finished or FinishedJobs(max_count=KEEP_COUNT, keep_s=KEEP_S)
        self._running: dict[Sequence, tuple[Job, int]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.fatal: str | None = None

    def start(self, on_fatal: Callable[[str], None]) -> None:
        """On the loop everything else will run on."""

        def died(reason: str) -> None:
            if self.fatal is None:
                self.fatal = reason
                on_fatal(reason)

        self._loop = asyncio.get_running_loop()
        self._weights.on_version = self._version_changed
        self._decoder.listen(
            on_finished=lambda sequence: self._sample_ended(sequence, None),
            on_failed=lambda sequence: self._sample_ended(sequence, "error"),
            on_fatal=died,
        )

    def close(self) -> None:
        """Requests that are still here end with EngineUnavailable."""
        for job in list(self._jobs.values()):
            self._fail(job, EngineUnavailable("the engine is stopping"))

    # ------------------------------------------------------------------------------ the protocol
    async def generate(self, request: GenerateRequest) -> tuple[Completion, ...]:
        known = self._known(request)
        if isinstance(known, tuple):
            return known
        return await self._wait(known or self._begin(request))

    async def stream(
        self, request: GenerateRequest, told: Callable[[Part], Awaitable[None]]
    ) -> tuple[Completion, ...]:
        """Like `generate`, after `told` got all tokens, also of work that began before: in parts as
        they come, each as large as what came while the one before was told."""
        known = self._known(request)
        if isinstance(known, tuple):
            for sample, done in enumerate(known):
                if (part := part_from(0, sample, done)) is not None:
                    await told(part)
            return known
        job = known or self._begin(request)
        with self._attended(job):
            return await follow(job, told)

    async def attach(self, request_id: str) -> tuple[Completion, ...] | None:
        job = self._jobs.get(request_id)
        if job is not None:
            completions = await self._wait(job)
            # Cancelled while we waited: to whoever attached it is as good as unknown.
            return completions if self._finished.find(request_id) else None
        kept = self._finished.find(request_id)
        return None if kept is None else kept[1]

    async def cancel(self, request_id: str) -> tuple[Completion, ...]:
        self._finished.forget(request_id)
        job = self._jobs.get(request_id)
        return () if job is None else self._cancel(job)

    async def state(self) -> EngineState:
        return self.state_now()

    def state_now(self) -> EngineState:
        return EngineState(
            version=self._weights.version,
            digest=self._weights.digest,
            epoch=self._weights.epoch,
            num_running=len(self._running),
            num_queued=sum(len(job.waiting) for job in self._jobs.values()),
            kv_use=self._decoder.kv_use,
            num_tokens=self._decoder.num_tokens,
            host=this_host(),
            device=self._decoder.device.type,
            num_ranks=self._weights.num_ranks,
            info={
                "kind": self._decoder.kind,
                "context_tokens": self._decoder.context_tokens,
                "vocab_size": self._decoder.vocab_size,
                "max_running": self._max_running,
                "update_seconds": self._weights.update_seconds,
            },
        )

    # ---------------------------------------------------------------------------------- requests
    def _known(self, request: GenerateRequest) -> Job | tuple[Completion, ...] | None:
        """What is already there for a request sent again: its work or its result, unless that may
        be older than `min_version` allows."""
        request_id = request.request_id
        job = self._jobs.get(request_id)
        kept = self._finished.find(request_id)
        before = job.request if job is not None else kept[0] if kept is not None else None
        if before is None:
            return None
        if _work(before) != _work(request):
            raise RequestRefused(f"request id {request_id!r} was used for another request")
        least = request.min_version
        if least is not None and (before.min_version is None or before.min_version < least):
            self._finished.forget(request_id)
            if job is not None:
                self._cancel(job)
            return None
        return job if job is not None else kept[1] if kept is not None else None

    def _begin(self, request: GenerateRequest) -> Job:
        max_tokens = self._check(request)
        loop = asyncio.get_running_loop()
        seed = request.sampling.seed
        samples = [
            Sequence(
                prompt_ids=request.token_ids,
                sampling=request.sampling,
                seed=seed + k if seed is not None else secrets.randbits(62),
                max_tokens=max_tokens,
            )
            for k in range(request.num_samples)
        ]
        job = Job(request, samples, loop.create_future())
        job.waiting.extend(samples)
        self._jobs[request.request_id] = job
        if request.deadline_s is not None:
            job.timers.append(loop.call_later(request.deadline_s, self._cancel, job))
        self._admit()
        return job

    def _check(self, request: GenerateRequest) -> int:
        """The number of tokens there is room for; RequestRefused when the request makes no
        sense."""
        sampling, prompt = request.sampling, request.token_ids
        context = self._decoder.context_tokens
        if not prompt:
            raise RequestRefused("the prompt is empty")
        if len(prompt) >= context:
            raise RequestRefused(
                f"too long: the prompt has {len(prompt)} tokens, "
                f"the context is {context} and one more is needed"
            )
        size = self._decoder.vocab_size
        wrong = next((i for i in prompt if not 0 <= i < size), None)
        if wrong is not None:
            raise RequestRefused(f"token id {wrong} is outside the vocabulary of {size}")
        if not 1 <= request.num_samples <= MAX_SAMPLES:
            raise RequestRefused(
                f"num_samples must be from 1 to {MAX_SAMPLES}, got {request.num_samples}"
            )
        if sampling.max_tokens < 1:
            raise RequestRefused(f"max_tokens must be at least 1, got {sampling.max_tokens}")
        if not 0 <= sampling.temperature < float("inf"):
            raise RequestRefused(f"temperature must be 0 or more, got {sampling.temperature}")
        if not 0 < sampling.top_p <= 1:
            raise RequestRefused(f"top_p must be in (0, 1], got {sampling.top_p}")
        refused = self._decoder.refuses(sampling)
        if refused is not None:
            raise RequestRefused(refused)
        return min(sampling.max_tokens, context - len(prompt))

    async def _wait(self, job: Job) -> tuple[Completion, ...]:
        with self._attended(job):
            # Shielded: one client that leaves must not end what others wait for.
            return await asyncio.shield(job.result)

    @contextmanager
    def _attended(self, job: Job) -> Iterator[None]:
        """Somebody waits for the job inside; once nobody does, it lasts `orphan_s` more."""
        job.num_waiters += 1
        try:
            yield
        finally:
            job.num_waiters -= 1
            if job.num_waiters == 0 and not job.result.done():
                loop = asyncio.get_running_loop()
                job.timers.append(loop.call_later(self._orphan_s, self._cancel_orphan, job))

    def _cancel_orphan(self, job: Job) -> None:
        if job.num_waiters == 0:
            self._cancel(job)

    def _version_changed(self) -> None:
        """On a weights thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admit)

    def _admit(self) -> None:
        """Moves samples from the queue, oldest request first, into free places of the batch."""
        version = self._weights.version
        for job in list(self._jobs.values()):
            if job.has_missed(version):
                self._fail(job, _gone(job, version))
            if not job.waiting or not job.may_start_at(version):
                continue
            while job.waiting:
                if len(self._running) >= self._max_running:
                    return
                sequence = job.waiting.popleft()
                self._running[sequence] = (job, job.samples.index(sequence))
                self._decoder.add(sequence)

    def _sample_ended(self, sequence: Sequence, reason: FinishReason | None) -> None:
        entry = self._running.pop(sequence, None)
        if entry is not None:
            job, sample = entry
            if job.complete(sample, sequence.complete(reason)):
                self._finish(job)
        self._admit()

    def _finish(self, job: Job) -> None:
        if job.has_missed(version := self._weights.version):
            self._fail(job, _gone(job, version))
            return
        self._drop(job)
        if not job.result.done():
            job.result.set_result(job.ordered())
        self._finished.keep(job.request, job.ordered())

    def _cancel(self, job: Job) -> tuple[Completion, ...]:
        """Ends a job now; its unfinished samples become cancelled completions."""
        if not job.result.done():
            self._drop(job)
            for sample, sequence in enumerate(job.samples):
                if sample not in job.completions:
                    job.complete(sample, sequence.complete("cancelled"))
            job.result.set_result(job.ordered())
            self._admit()
        return job.ordered()

    def _fail(self, job: Job, error: EngineError) -> None:
        self._drop(job)
        if not job.result.done():
            job.result.set_exception(error)
            job.result.exception()  # nobody may be waiting

    def _drop(self, job: Job) -> None:
        """Takes the job's samples out of queue and batch."""
        self._jobs.pop(job.request.request_id, None)
        job.waiting.clear()
        for timer in job.timers:
            timer.cancel()
        for sequence in job.samples:
            if self._running.pop(sequence, None) is not None:
                self._decoder.remove(sequence)


def _gone(job: Job, version: Version | None) -> VersionGone:
    return VersionGone(f"holds {version}: {job.request.max_version} is past")


def _work(request: GenerateRequest) -> tuple[object, ...]:
    """What a request asks to be computed, apart from when."""
    return (request.token_ids, request.num_samples, request.sampling)
