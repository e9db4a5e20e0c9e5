"""The trainer role: recover, then take, train, record, publish, checkpoint, for ever.

    feed.take() ──▶ execute ──▶ manifest to `steps`, read back ──▶ publisher (background)
         ▲                                   │                          │ engines hold it
         │                                   └──▶ saver (background)    ▼
         └────────────────── grants on `policy` ◀── feed.published(version, digest)

A step counts once its manifest is read back; only then are its weights published and checkpointed,
so a fenced trainer publishes nothing. The loop waits in `take` alone: publishing and granting go on
beside it in threads of their own, whose deaths surface here.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Final, Protocol

import msgspec

from connectors.config import Config, Trainer
from connectors.kafka.client import Cluster
from connectors.kafka.locate import cluster as locate
from connectors.records import Manifest, Version
from connectors.run_dir import RunDir
from connectors.signals import stop_on_signals
from connectors.weights import Snapshot
from trainer import actions, gang, stall
from trainer.ages import recorded, staleness
from trainer.alerts import AlertWatch
from trainer.checkpoint import CheckpointStore, run_store
from trainer.checkpoint_meta import CheckpointMeta
from trainer.credit import no_signal
from trainer.diagnostics import step_metrics
from trainer.engine import TrainingEngine
from trainer.execute import execute, settings, untrainable
from trainer.feed import Feed
from trainer.feed_state import FeedState
from trainer.publish import Publisher
from trainer.recovery import Recovered, fold, max_group_size, recover
from trainer.saving import Fence, Saver
from trainer.schedule import rate
from trainer.staleness import allowance_of, configured_policy, granted_per_step
from trainer.step_input import StepInput
from trainer.step_log import Chain, StepLog
from trainer.tensorboard import Curves
from trainer.traffic import labels_of
from trainer.trim import Trimmer

log = logging.getLogger(__name__)

TAKE_S: Final = 0.5
"""How long the loop waits in `take` before it looks for a request to stop."""


def train(config: Config, run_dir: RunDir, stop: threading.Event | None = None) -> None:
    """Runs the trainer until `trainer.num_steps` or SIGTERM (which ends it after the step at hand).
    ConfigError, Fenced, ReexecutionDiffers, CheckpointFailed, BrokerUnavailable end it."""
    policy = configured_policy(config)
    stop = stop or stop_on_signals(threading.Event())
    cluster = locate(config, run_dir)
    store = run_store(config, run_dir)
    store.clean()
    run_dir.register("trainer")
    stall.keep(run_dir, None)  # of an earlier trainer: this one may execute many steps first
    with ExitStack() as open_parts:
        engine = open_parts.enter_context(gang.engine(config, cluster, run_dir))
        steps = open_parts.enter_context(closing(StepLog(cluster)))
        recovered = recover(config, cluster, engine, store, steps)
        stall.keep(run_dir, None)  # of one that was still at work
        # Folded; the manifests of weeks need not stay in memory while it trains.
        recovered = replace(
            recovered, state=fold(config, cluster, policy, recovered), chain=Chain()
        )
        log.info("epoch %d continues after step %d", recovered.epoch, recovered.step)
        feed = Feed(
            cluster,
            policy,
            state=recovered.state,
            epoch=recovered.epoch,
            batch_size=granted_per_step(config),
            group_size=max_group_size(config),
            allowance=allowance_of(config, cluster),
            untrainable=lambda group: untrainable(
                group, config.trainer, engine.vocabulary_size, engine.max_tokens
            ),
            no_signal=lambda group: no_signal(group, config.trainer),
            engines=lambda: run_dir.engine_urls(config),
            stalled=lambda text: stall.keep(run_dir, text),
        )
        open_parts.callback(feed.close)
        publisher = Publisher(
            lambda: run_dir.engine_urls(config),
            epoch=recovered.epoch,
            timeout_s=config.trainer.publish_timeout_s,
            on_published=lambda version, digest, seconds: feed.published(version, digest),
            through=config.trainer.publish_through,
        )
        open_parts.callback(publisher.close)
        run_loop(config, run_dir, cluster, engine, steps, recovered, feed, publisher, store, stop)


class Steps(Protocol):
    """Where steps come from."""

    def take(self, timeout_s: float) -> StepInput | None:
        """The next one; None when there is none within that time."""


class Receiver(Protocol):
    """Who gets the weights."""

    @property
    def last_seconds(self) -> float:
        """That the last version took."""

    def spare(self) -> Snapshot | None:
        """Buffers for the next snapshot, None while there are none to reuse."""

    def submit(
        self, snapshot: Snapshot, version: Version, master_changed: bool | None = None
    ) -> None:
        """Makes it what is to be held; returns at once."""

    def check(self) -> None:
        """Raises what went wrong in the background."""

    def wait_published(self, version: Version, timeout_s: float) -> bool:
        """Whether it, or a newer one, is held in time."""


def run_loop(
    config: Config,
    run_dir: RunDir,
    cluster: Cluster,
    engine: TrainingEngine,
    steps: StepLog,
    recovered: Recovered,
    source: Steps,
    receiver: Receiver,
    store: CheckpointStore,
    stop: threading.Event,
) -> None:
    """Trains from where `recovered` is, its state the ledger after that step, until the last step
    or `stop`."""
    with ExitStack() as open_parts:
        curves = open_parts.enter_context(closing(Curves(run_dir.tensorboard, recovered.step)))
        fence, trim = Fence(cluster, recovered.epoch), lambda: None
        if config.checkpoint.trim_log:
            keep, shadow = config.checkpoint.keep, config.trainer.source is not None
            trimmer = Trimmer(cluster, store, keep, shadow=shadow)
            trim = open_parts.enter_context(closing(trimmer)).wake
        saver = Saver(store, engine, may_retire=fence.is_current, on_saved=trim)
        open_parts.callback(saver.close)
        Loop(config, engine, steps, source, receiver, saver, curves, recovered).run(stop)


class Loop:
    """The state between two steps: the version and digest the engine holds."""

    def __init__(
        self,
        config: Config,
        engine: TrainingEngine,
        steps: StepLog,
        feed: Steps,
        publisher: Receiver,
        saver: Saver,
        curves: Curves,
        recovered: Recovered,
    ) -> None:
        self._config = config
        self._engine = engine
        self._steps = steps
        self._feed = feed
        self._publisher = publisher
        self._saver = saver
        self._curves = curves
        self._alerts = AlertWatch(config.trainer.gap_alert)
        self._epoch = recovered.epoch
        self._step = recovered.step
        self._version = recovered.version
        self._digest = recovered.digest
        # The ledger after the last step, while no checkpoint holds it.
        self._unsaved = recovered.state if recovered.rebuilt else None
        self._pause_s = 0.0  # of a checkpoint since the last manifest

    def run(self, stop: threading.Event) -> None:
        """Trains until the last step or `stop`; then the last step is checkpointed and, if an
        engine answers in time, published."""
        if self._unsaved is not None:
            self._checkpoint(self._unsaved)
        self._publisher.submit(self._engine.snapshot(), self._version)
        while self._step < self._config.trainer.num_steps and not stop.is_set():
            started = time.perf_counter()
            taken = self._wait_for_step(stop)
            if taken is not None:
                self._train(taken, time.perf_counter() - started)
        if self._unsaved is not None:
            self._checkpoint(self._unsaved)
        self._saver.wait()
        if not stop.is_set():
            self._publisher.wait_published(self._version, self._config.trainer.publish_timeout_s)

    def _wait_for_step(self, stop: threading.Event) -> StepInput | None:
        while not stop.is_set():
            self._engine.check()
            self._publisher.check()
            self._saver.check()
            if (taken := self._feed.take(TAKE_S)) is not None:
                return taken
        return None

    def _train(self, taken: StepInput, waited_s: float) -> None:
        config = self._config
        if (taken.step, taken.version) != (self._step + 1, self._version):
            raise RuntimeError(
                f"the feed gives step {taken.step} at {taken.version}; the engine is after step "
                f"{self._step} at {self._version}"
            )
        seed = step_seed(config.run.seed, taken.step)
        trainer = at_step(config.trainer, taken.step)
        done = execute(
            self._engine,
            taken.groups,
            trainer,
            seed,
            records=taken.records,
            ages=taken.ages,
            weights=taken.weights,
            labels=labels_of(taken.settings),
        )
        trained_at = time.perf_counter()
        snapshot = self._engine.snapshot(into=self._publisher.spare())
        snapshot_s = time.perf_counter() - trained_at
        version = Version(self._version.incarnation, taken.step)
        told, tokens = step_metrics(taken.groups, taken.ages, taken.weights)
        manifest = Manifest(
            step=taken.step,
            epoch=self._epoch,
            version=version,
            records=taken.records,
            micro_batches=done.micro_batches,
            ranks=done.ranks,
            seed=seed,
            digest_before=self._digest,
            digest=snapshot.digest,
            skipped=done.skipped,
            dropped=taken.dropped,
            environment=self._engine.environment(),
            settings={
                **settings(trainer, config.sampling.temperature),
                **recorded(taken.ages),
                **taken.settings,
            },
            metrics={**done.metrics, **told, **self._metrics(taken, waited_s, snapshot_s)},
            staleness=staleness(tokens),
            finished_at=time.time(),
        )
        self._pause_s = 0.0
        self._steps.append(manifest)
        if done.skipped is not None:
            log.warning("step %d changed nothing: %s", taken.step, done.skipped)
        self._alerts.look(taken.step, manifest.metrics)
        self._step, self._version, self._digest = taken.step, version, snapshot.digest
        self._publisher.submit(snapshot, version, master_changed=done.master_changed)
        self._curves.write(manifest)
        self._unsaved = taken.snapshot
        if taken.step % config.checkpoint.every_steps == 0:
            self._checkpoint(taken.snapshot)

    def _metrics(self, taken: StepInput, waited_s: float, snapshot_s: float) -> dict[str, float]:
        """Of what was done around the step. A checkpoint's pause is in those of the step after it,
        the time its writing took beside training in those of the steps after that."""
        return {
            **({} if taken.mean_length is None else {"length/arrived": taken.mean_length}),
            **actions.metrics(taken.actions),
            **{f"staleness/waits/{reason}": 1.0 for reason in taken.waits},
            **{f"seconds/wait/{reason}": seconds for reason, seconds in taken.waits.items()},
            "seconds/wait": waited_s,
            "seconds/snapshot": snapshot_s,
            "seconds/checkpoint": self._pause_s,
            "seconds/checkpoint_write": self._saver.write_s,
            "seconds/publish": self._publisher.last_seconds,
            "groups": float(len(taken.groups)),
        }

    def _checkpoint(self, state: FeedState) -> None:
        meta = CheckpointMeta(
            step=self._step,
            version=self._version,
            digest=self._digest,
            epoch=self._epoch,
            feed=state,
        )
        self._saver.save(self._step, msgspec.json.encode(meta))
        self._pause_s = self._saver.pause_s
        self._unsaved = None


def at_step(trainer: Trainer, step: int) -> Trainer:
    """The settings of one step: the learning rate is what the schedule says."""
    of_step = rate(
        step,
        num_steps=trainer.num_steps,
        peak=trainer.learning_rate,
        schedule=trainer.learning_rate_schedule,
        warmup_steps=trainer.warmup_steps,
        min_ratio=trainer.min_learning_rate_ratio,
    )
    return trainer.model_copy(update={"learning_rate": of_step})


def step_seed(run_seed: int, step: int) -> int:
    """Seed of torch's generator for one step: distinct a step, below 2^31."""
    return (run_seed * 1_000_003 + step) % (1 << 31)
