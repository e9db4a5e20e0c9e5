"""Mean staleness of a run against a closed form.

The run. Engines keep C samples in flight: a prompt's samples start one by one as slots come free,
so prompts are granted far enough ahead of the slots. Finished groups enter a queue of q batches of
B samples, which evicts its oldest group when it overflows. The trainer, whenever it is idle and a
batch is there, takes the oldest batch; trained weights are held at once. Groups are weighed alike
and a group's staleness is the version it trains at less the one of its first prefill.

The form. Let rho be rollout over train throughput. Engines finish C / E[length] samples in the time
of a token, and a step ends with every B of them where the rollout is the bottleneck (rho < 1), with
every B * rho where the trainer is: B * max(1, rho) samples a step. A group is in flight as long as
its longest sample, M * E[length] tokens' time, during which C * M / (B * max(1, rho)) steps end.

What is added after its end, in steps, since versions are counted whole:
* rho < 1. A batch closes at time k (in units of the time that B samples take), trains at version k
  and until k + rho, when version k + 1 is held. A group that started at s then has the version
  floor(s - rho) + 1, which is s - rho + 1/2 in the mean over s. One that ends at u trains at
  ceil(u), which is u + 1/2 in the mean over u. The difference is (u - s) + rho.
* rho > 1. Step k begins at time k (in units of train time) at version k; the queue is full then. It
  takes the oldest B of the last q * B finished, which come in at rho * B a step: they wait from
  (q - 1) / rho to q / rho steps, (2q - 1) / (2 rho) in the mean. A group that started at s has the
  version floor(s), which is s - 1/2 in the mean. The sum is (2q - 1) / (2 rho) + 1/2
  = (2q + rho - 1) / (2 rho).

Both are of a fluid, from which the settings keep two things away. Where rho is near 1, the scatter
of the time that a batch takes to fill makes now the engines, now the trainer the bottleneck, and
the form jumps there from 1 to q. Lengths that are multiples of one number end in bursts, at the
same seconds for ever; those of the two modes have no common divisor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from deploy.simulate.lengths import Bimodal, Lengths, Lognormal, PowerLaw, Uniform
from deploy.simulate.workload import Workload
from deploy.simulate.world import simulate
from operators.staleness.stateless import Stateless
from operators.staleness.types import Arrived, Choice, Event, Granted, Ledger

GROUPS = 16
GROUP_SIZE = 4
TOKEN_S = 0.01
NUM_STEPS = 80
NUM_BEFORE = 20
"""Steps, until queue and engines are as they stay."""


class EvictingQueue(Stateless):
    """Keeps `num_running` groups running or waiting for slots, `capacity` finished ones. Its state
    is how many run; `ages`: of the groups of each step."""

    name = "evicting-queue"

    def __init__(self, num_running: int, capacity: int) -> None:
        self.num_running = num_running
        self.capacity = capacity
        self.ages: dict[int, list[int]] = {}

    def start(self) -> Any:
        return 0

    def observe(self, state: Any, event: Event) -> Any:
        return state + isinstance(event, Granted) - isinstance(event, Arrived)

    def credits(self, state: Any, ledger: Ledger) -> int:
        return self.num_running - int(state)

    def choose(self, state: Any, ledger: Ledger) -> Choice:
        queue = ledger.arrivals
        if ledger.steps_ahead == 0 and len(queue) >= ledger.batch_size:  # the trainer is idle
            batch = queue[: ledger.batch_size]
            self.ages[ledger.version.number] = [ledger.age(group) for group in batch]
            return Choice(commit=tuple(group.group_id for group in batch))
        evicted = queue[: max(0, len(queue) - self.capacity)]
        return Choice(drop=tuple(group.group_id for group in evicted))


@dataclass(frozen=True)
class Setting:
    lengths: Lengths
    num_in_flight: int  # C, samples
    rho: float
    capacity: int  # q, batches

    def workload(self) -> Workload:
        batch_s = GROUPS * GROUP_SIZE * self.lengths.mean() * TOKEN_S / self.num_in_flight
        return Workload(
            name="closed form",
            batch_size=GROUPS,
            group_size=GROUP_SIZE,
            lengths=self.lengths,
            num_engines=1,
            num_slots=self.num_in_flight,
            token_s=TOKEN_S,
            train_s=batch_s * self.rho,
        )

    def expected(self) -> float:
        drawn = self.lengths.sample(np.random.default_rng(99), 400_000).reshape(-1, GROUP_SIZE)
        longest = float(drawn.max(axis=1).mean() / drawn.mean())  # M
        batch = GROUPS * GROUP_SIZE
        in_flight = self.num_in_flight * longest / (batch * max(1.0, self.rho))
        q, rho = self.capacity, self.rho
        return in_flight + (rho if rho < 1 else (2 * q + rho - 1) / (2 * rho))

    def measured(self, seed: int) -> float:
        # C * M / GROUP_SIZE groups are in flight in the mean: the others wait for slots
        num_running = self.num_in_flight * 3 // GROUP_SIZE
        policy = EvictingQueue(num_running, self.capacity * GROUPS)
        outcome = simulate(self.workload(), policy, num_steps=NUM_STEPS, seed=seed)
        assert outcome.stalled is None
        ages = [age for step, of in policy.ages.items() if step >= NUM_BEFORE for age in of]
        return sum(ages) / len(ages)


UNIFORM = Uniform(least=200, most=1800)
LOGNORMAL = Lognormal(mu=6.0, sigma=0.8, most=8000)
BIMODAL = Bimodal(short=331, long=1487, share_long=0.3)
POWER_LAW = PowerLaw(least=300, alpha=2.5, most=6000)
SETTINGS = [
    Setting(UNIFORM, 64, 0.3, 1),
    Setting(UNIFORM, 128, 0.6, 2),
    Setting(UNIFORM, 256, 0.8, 1),
    Setting(LOGNORMAL, 64, 0.5, 2),
    Setting(LOGNORMAL, 128, 0.8, 2),
    Setting(BIMODAL, 96, 0.5, 2),
    Setting(POWER_LAW, 96, 0.7, 1),
    Setting(UNIFORM, 128, 1.3, 1),
    Setting(UNIFORM, 128, 1.5, 3),
    Setting(UNIFORM, 256, 2.0, 2),
    Setting(LOGNORMAL, 128, 1.25, 2),
    Setting(LOGNORMAL, 192, 2.0, 4),
    Setting(LOGNORMAL, 192, 2.5, 1),
    Setting(BIMODAL, 128, 1.6, 2),
    Setting(POWER_LAW, 128, 1.4, 2),
]


def test_mean_staleness_agrees_with_the_closed_form() -> None:
    rows = [(setting, setting.expected(), setting.measured(seed=11)) for setting in SETTINGS]
    for setting, expected, measured in rows:
        print(
            f"{type(setting.lengths).__name__:>10} C={setting.num_in_flight:<4} "
            f"rho={setting.rho:<5} q={setting.capacity}  "
            f"expected {expected:6.3f}  measured {measured:6.3f}  {measured - expected:+.3f}"
        )
    assert [measured for _, _, measured in rows] == [
        pytest.approx(expected, abs=0.15) for _, expected, _ in rows
    ]
