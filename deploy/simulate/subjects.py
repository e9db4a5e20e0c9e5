"""Which policies are simulated: from `--policy`, `--bound` and `--lookahead` to policy objects.

    deadline,nemo-windowed,deadline(bound=8,lookahead=2)

A name takes its framework's own parameters in parentheses. `--bound` and `--lookahead` set, of each
policy that has one, the parameter that means it, where the parentheses do not.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from connectors.config import ConfigError
from operators.staleness import policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import StalenessPolicy
from trainer.staleness import LOOKAHEAD

COMPARED: Final = (
    "sync", "one-step-off", "nemo-in-order", "nemo-weight-fifo", "nemo-windowed",
    "nemo-ready-first", "verl-drop", "deadline",
)  # fmt: skip
"""Where nothing names a policy: one of each kind, at the same bound."""
COMPARED_BOUND: Final = 4

BOUNDS: Final[Mapping[str, tuple[str, Callable[[int], int]]]] = {
    "areal": ("max_head_offpolicyness", lambda n: n),
    "deadline": ("bound", lambda n: n),
    "n-step-off": ("n", lambda n: n),
    "nemo-in-order": ("max_lookahead_versions", lambda n: n),
    "nemo-ready-first": ("max_staleness_versions", lambda n: n),
    "nemo-weight-fifo": ("max_staleness_versions", lambda n: n),
    "nemo-windowed": ("max_staleness_versions", lambda n: n),
    "openrlhf": ("async_queue_size", lambda n: n),
    "prime-rl": ("max_off_policy_steps", lambda n: n),
    "psrl-roc": ("staleness", lambda n: n),
    "roll": ("async_generation_ratio", lambda n: n),
    "skyrl": ("max_staleness_steps", lambda n: n),
    "trl": ("max_staleness", lambda n: n),
    "verl-drop": ("max_off_policy_threshold", lambda n: n + 1),
    "verl-wait": ("max_off_policy_threshold", lambda n: n + 1),
}
"""The parameter that means the bound, and its value for a bound of n; a nominal bound where the
policy is not strict. The bound of `windowed-fifo` follows from two (`_windowed_fifo`)."""
LOOKAHEADS: Final = {
    "deadline": "lookahead",
    "n-step-off": "n",
    "nemo-in-order": "max_lookahead_versions",
    "windowed-fifo": "target_offpolicy_steps",
}
"""Of `n-step-off` and `nemo-in-order` it is the bound, too, which `--bound` sets if it is given."""

_NAMED: Final = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\(([^()]*)\))?\s*(?:,|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What `[staleness]` of a configuration says."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """`label` tells apart what has the same name; `parameters` are those that somebody gave."""

    label: str
    policy: StalenessPolicy[Any]
    parameters: Mapping[str, Any]


def subjects(
    spec: str | None,
    shape: RunShape,
    *,
    bound: int | None = None,
    lookahead: int | None = None,
    configured: Configured | None = None,
) -> tuple[Subject, ...]:
    """The policies to simulate: those of `spec`, else the configured one, else COMPARED. A policy
    of the configured one's name starts from its parameters. ConfigError, with the rule and the
    value, for what cannot be."""
    if spec is not None:
        named = parse(spec)
    elif configured is not None:
        named = [(configured.name, {})]
    else:
        named = [(name, {}) for name in COMPARED]
        bound = COMPARED_BOUND if bound is None else bound
        lookahead = min(bound, LOOKAHEAD) if lookahead is None else lookahead
    _check_flags([name for name, _ in named], bound, lookahead)
    return tuple(
        _subject(name, given, shape, _from_flags(name, shape, bound, lookahead), configured)
        for name, given in named
    )


def parse(spec: str) -> list[tuple[str, dict[str, Any]]]:
    """(name, parameters) of each policy in `spec`; values are TOML's, bare text is a string and
    `none` is None."""
    found: list[tuple[str, dict[str, Any]]] = []
    at = 0
    while at < len(spec) or not found:
        match = _NAMED.match(spec, at)
        if match is None:
            raise ConfigError(
                f"--policy: {spec[at:]!r} is no policy: names with commas between, parameters in "
                "parentheses, e.g. 'sync,deadline(bound=4,lookahead=2)'"
            )
        found.append((match[1], _parameters(match[1], match[2] or "")))
        at = match.end()
    twice = next((entry for i, entry in enumerate(found) if entry in found[:i]), None)
    if twice is not None:
        raise ConfigError(f"--policy: {label(*twice)} is there twice")
    return found


def label(name: str, parameters: Mapping[str, Any]) -> str:
    said = ",".join(f"{key}={_written(value)}" for key, value in parameters.items())
    return f"{name}({said})" if said else name


def _subject(
    name: str,
    given: Mapping[str, Any],
    shape: RunShape,
    flags: Mapping[str, Any],
    configured: Configured | None,
) -> Subject:
    base = configured.parameters if configured is not None and configured.name == name else {}
    parameters = {**base, **flags, **given}
    if name == "deadline" and isinstance(bound := parameters.get("bound"), int):
        parameters.setdefault("lookahead", min(LOOKAHEAD, bound))
    try:
        policy = policy_for(name, shape, **parameters)
    except ValueError as error:
        raise ConfigError(f"--policy: {error}") from error
    return Subject(label=label(name, given), policy=policy, parameters=parameters)


def _from_flags(
    name: str, shape: RunShape, bound: int | None, lookahead: int | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if lookahead is not None and name in LOOKAHEADS:
        found[LOOKAHEADS[name]] = lookahead
    if bound is not None and name in BOUNDS:
        parameter, own = BOUNDS[name]
        found[parameter] = own(bound)
    if bound is not None and name == "windowed-fifo":
        return _windowed_fifo(shape, bound, lookahead)
    return found


def _windowed_fifo(shape: RunShape, bound: int, lookahead: int | None) -> dict[str, Any]:
    """The widest window that keeps a bound of S + ceil((W - 1) / B), S at most its own default."""
    ahead = min(3, bound) if lookahead is None else lookahead
    if ahead > bound:
        raise ConfigError(
            f"--policy: windowed-fifo: lookahead must be at most the bound {bound}, got {ahead}"
        )
    window = (bound - ahead) * shape.batch_size + 1
    return {"target_offpolicy_steps": ahead, "window_size": window}


def _check_flags(names: Sequence[str], bound: int | None, lookahead: int | None) -> None:
    bounded = {*BOUNDS, "windowed-fifo"}
    for flag, value, known in (("bound", bound, bounded), ("lookahead", lookahead, LOOKAHEADS)):
        if value is not None and not any(name in known for name in names):
            raise ConfigError(
                f"--{flag} {value}: {', '.join(names)} {'has' if len(names) == 1 else 'have'} no "
                f"{flag} to set; known: {', '.join(sorted(known))}"
            )


def _parameters(name: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(f"--policy: {name}: {part!r} is not parameter=value")
        if key in found:
            raise ConfigError(f"--policy: {name}: {key} is there twice")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    if text in ("none", "None", "null"):
        return None
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _written(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
