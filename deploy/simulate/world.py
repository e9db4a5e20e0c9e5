"""A run in virtual time.

    prompts ──▶ rollouts on engines ──▶ feed (ledger, the policy itself) ──▶ trainer
                    ▲        ▲ grants, cancels      │                           │
                    │        └──────────────────────┘                           │
                    └───────────────────── versions ◀───────────────────────────┘

`simulate` promises: the same workload, policy and seed give the same outcome; every policy is shown
the same prompts; a run in which nothing can happen any more, or which goes round without ever
filling a step, ends and says where it stood.
"""

from __future__ import annotations

import math
from typing import Any, Final

from deploy.simulate.clock import NEVER, Clock
from deploy.simulate.feed import Feed, GivenUp, Step
from deploy.simulate.outcome import SHOWN_STEPS, Outcome, Timeline
from deploy.simulate.rollouts import Rollout, Rollouts, prompts
from deploy.simulate.tally import Tally
from deploy.simulate.trainer import Trainer
from deploy.simulate.workload import Workload
from operators.staleness.types import EngineLoad, StalenessPolicy

POLL_S: Final = 5.0
"""How often engines are asked for their load, for a policy that may heed it."""
NUM_IDLE_POLLS: Final = 1000
"""Polls of idle engines, after which a policy that heeds them is not waited for any longer."""


def simulate(
    workload: Workload, policy: StalenessPolicy[Any], *, num_steps: int, seed: int
) -> Outcome:
    """The run from nothing in flight until `num_steps` steps are trained or it stalls."""
    return World(workload, policy, seed).run(num_steps)


class World:
    """Holds the parts together: what one does that concerns another passes here."""

    def __init__(self, workload: Workload, policy: StalenessPolicy[Any], seed: int) -> None:
        self._workload = workload
        self._clock = Clock()
        self._tally = Tally()
        self._prompts = prompts(workload, seed)
        self._groups: dict[str, Rollout] = {}  # granted, neither trained nor closed
        self._feed = Feed(policy, workload, start=self._start, give_up=self._give_up)
        self._rollouts = Rollouts(workload, self._clock, scored=self._scored, capped=self._time_cap)
        self._fleet = self._rollouts.fleet
        self._trainer = Trainer(
            workload, self._clock, take=self._feed.take, train=self._train, hold=self._hold
        )
        self._next_poll = NEVER if policy.auditable else 0.0
        self._num_idle_polls = 0

    def run(self, num_steps: int) -> Outcome:
        stalled = None
        self._hold(0)
        while self._trainer.num_trained < num_steps and stalled is None:
            self._feed.settle()
            while self._trainer.begin():
                self._feed.settle()
            self._fleet.notes_use = self._trainer.num_trained < SHOWN_STEPS
            self._fleet.note_use()
            if self._feed.is_fruitless():
                stalled = self._report("groups end untrained, and no step fills")
            elif not self._advance():
                stalled = self._report("nothing can happen any more")
        return self._outcome(stalled)

    def _advance(self) -> bool:
        """To what happens next; False when nothing does."""
        due_at = self._clock.next_at()
        if self._fleet.run(until=min(due_at, self._next_poll)):
            self._num_idle_polls = 0
        elif due_at < self._next_poll:
            self._num_idle_polls = 0
            self._clock.happen()
        elif self._next_poll == NEVER:
            return False
        else:
            heeded = self._poll()
            idle = due_at == NEVER and self._fleet.num_running == 0
            self._num_idle_polls = self._num_idle_polls + 1 if idle else 0
            return not idle or (heeded and self._num_idle_polls < NUM_IDLE_POLLS)
        return True

    def _poll(self) -> bool:
        """Whether the policy heeds the engines' load."""
        self._clock.now = self._next_poll
        self._next_poll += POLL_S
        return self._feed.load(
            EngineLoad(
                self._fleet.num_running,
                self._fleet.num_queued,
                self._fleet.kv_use(),
                self._fleet.take_num_preempted(),
            )
        )

    # -------------------------------------------------------------------------------- groups
    def _start(self, group_id: str) -> None:
        self._groups[group_id] = self._rollouts.start(group_id, next(self._prompts))

    def _give_up(self, group_id: str, how: GivenUp) -> None:
        rollout = self._groups.pop(group_id)
        num_tokens = self._rollouts.stop(rollout)
        if how == "dropped":
            self._tally.dropped += num_tokens
        else:
            self._tally.cancelled += num_tokens
        if how == "requeued":
            self._groups[group_id] = self._rollouts.start(group_id, rollout.prompt)

    def _scored(self, rollout: Rollout) -> None:
        if rollout.prompt.fails:
            self._tally.failed += self._rollouts.stop(self._groups.pop(rollout.group_id))
            self._feed.close(rollout.group_id, "reward_failed")
        else:
            self._feed.arrive(rollout.group_id, rollout.oldest, max(rollout.tokens))

    def _time_cap(self, rollout: Rollout) -> None:
        self._tally.cancelled += self._rollouts.stop(self._groups.pop(rollout.group_id))
        self._feed.close(rollout.group_id, "time_cap")

    def _train(self, step: Step) -> int:
        return sum(
            self._tally.train(self._groups.pop(group_id), step.version, step.mask_before)
            for group_id in step.group_ids
        )

    def _hold(self, version: int) -> None:
        self._tally.cancelled += self._fleet.hold(version)
        self._feed.announce(version)

    # ------------------------------------------------------------------------------- outcome
    def _report(self, why: str) -> str:
        name, seconds = self._feed.policy.name, self._clock.now
        return f"{name} stalled after {seconds:.0f} s: {why}\n{self._feed.report()}"

    def _outcome(self, stalled: str | None) -> Outcome:
        tally, workload, now = self._tally, self._workload, self._clock.now
        steps, seconds = self._trainer.steps(), now or math.inf
        num_trajectories = max(1, tally.num_groups * workload.group_size)
        mean_length = (tally.trained + tally.masked) / num_trajectories
        return Outcome(
            name=self._feed.policy.name,
            bound=self._feed.policy.bound,
            num_steps=len(steps),
            seconds=now,
            steps_per_hour=3600 * len(steps) / seconds,
            trained_tokens_per_s=tally.trained / seconds,
            trainer_wait_share=self._trainer.waited_s() / seconds,
            slot_use=self._fleet.busy_s() / seconds / workload.num_slots,
            staleness=tally.staleness(),
            dropped_tokens=tally.dropped,
            masked_tokens=tally.masked,
            cancelled_tokens=tally.cancelled,
            failed_tokens=tally.failed,
            trained_length_ratio=mean_length / workload.lengths.mean(),
            closed=self._feed.closed,
            stalled=stalled,
            timeline=Timeline(
                steps=steps,
                slot_use=tuple((at, num / workload.num_slots) for at, num in self._fleet.used),
            ),
        )
