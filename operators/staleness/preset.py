"""What a preset takes: its parameters, their rules, and what of them a run decides.

`Parameter`s (connectors.parameters) are checked one by one; a rule over several is `build`'s, which
raises ValueError with the rule and the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from connectors.parameters import Parameter
from operators.staleness.types import StalenessPolicy

MOST: Final = 10**12
"""Of any number: no run comes near, and products of a few stay within floats."""
MOST_COUNT: Final = 10**6
"""Of groups, trajectories or requests at once."""
MOST_STEPS: Final = 10**4
"""Of what counts steps, versions or batches ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunShape:
    """What a run decides for its policy: groups a step, trajectories a group, trajectories that
    all engines generate at once, engines."""

    batch_size: int
    group_size: int
    num_slots: int
    num_engines: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """build       from all parameters, by keyword
    parameters  by name, with the framework's own names and defaults
    from_run    parameters that a run gives when its configuration leaves them out
    fixed       those of `from_run` that may not differ from what the run gives: the framework's own
                name for the run's batch size
    """

    build: Callable[..., StalenessPolicy[Any]]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    from_run: Mapping[str, Callable[[RunShape], Any]] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
