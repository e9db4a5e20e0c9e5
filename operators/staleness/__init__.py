"""Staleness policies by name: `policy("n-step-off", n=1)`.

What a policy is and promises: `operators.staleness.types`. Each family has a file; its `PRESETS`
say what it takes (`operators.staleness.preset`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connectors.parameters import REQUIRED, check, nearest
from operators.staleness import (
    areal,
    deadline,
    dressage,
    n_step_off,
    nemo,
    openrlhf,
    over_generate,
    prime_rl,
    psrl,
    roll,
    skyrl,
    slime,
    trl,
    verl,
    windowed_fifo,
)
from operators.staleness.preset import Preset, RunShape
from operators.staleness.types import StalenessPolicy

FAMILIES = (
    areal,
    deadline,
    dressage,
    n_step_off,
    nemo,
    openrlhf,
    over_generate,
    prime_rl,
    psrl,
    roll,
    skyrl,
    slime,
    trl,
    verl,
    windowed_fifo,
)

PRESETS: Mapping[str, Preset] = {
    name: preset for family in FAMILIES for name, preset in family.PRESETS.items()
}


def policy(name: str, /, **parameters: Any) -> StalenessPolicy[Any]:
    """The policy of that name; what is left out has the framework's own default. ValueError, one
    line, for an unknown name or parameter (with the nearest known one), a missing parameter, or
    values that break a rule (with the rule)."""
    preset = _preset(name)
    chosen = {key: parameters.get(key, p.default) for key, p in preset.parameters.items()}
    try:
        check(preset.parameters, parameters)
        missing = [key for key, value in chosen.items() if value is REQUIRED]
        if missing:
            raise ValueError(f"parameter {missing[0]!r} is missing")
        return preset.build(**chosen)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def policy_for(name: str, shape: RunShape, /, **parameters: Any) -> StalenessPolicy[Any]:
    """The policy of that name for a run of that shape, which gives what `parameters` leave out
    before the framework's defaults do. Raises as `policy`, also for a parameter that contradicts
    the run."""
    preset = _preset(name)
    given = {key: of_run(shape) for key, of_run in preset.from_run.items()}
    for key in preset.fixed:
        if parameters.get(key, given[key]) != given[key]:
            raise ValueError(f"{name}: {key} is {given[key]} in this run, got {parameters[key]!r}")
    return policy(name, **{**given, **parameters})


def _preset(name: str) -> Preset:
    preset = PRESETS.get(name)
    if preset is None:
        raise ValueError(f"unknown staleness policy {name!r}{nearest(name, PRESETS)}")
    return preset
