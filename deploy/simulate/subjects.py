"""Which policies are simulated: from `--policy`, `--bound` and `--lookahead` to policy objects.

    deadline,nemo-windowed,deadline(bound=8,lookahead=2)

A name takes its framework's own parameters in parentheses. `--bound` and `--lookahead` set, of each
policy that has one, the parameter that means it, where the parentheses do not; where the bound
follows from several, to the value that gives it beside the others.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from connectors.config import ConfigError
from operators.staleness import policy_for
from operators.staleness.preset import RunShape
from operators.staleness.types import StalenessPolicy

COMPARED: Final = (
    "sync", "one-step-off", "nemo-in-order", "nemo-weight-fifo", "nemo-windowed",
    "nemo-ready-first", "verl-drop", "deadline",
)  # fmt: skip
"""Where nothing names a policy: one of each kind, at the same bound."""
COMPARED_BOUND: Final = 4

Parameters = Mapping[str, Any]


class Bounding(NamedTuple):
    """The parameter that means the bound, and what is set for a bound of n beside the other
    parameters in a run of that shape. ValueError where nothing gives that bound."""

    parameter: str
    chosen: Callable[[int, Parameters, RunShape], Parameters]


def _plain(parameter: str, *, more: int = 0) -> Bounding:
    return Bounding(parameter, lambda n, others, shape: {parameter: n + more})


def _waiting(n: int, others: Parameters, shape: RunShape) -> Parameters:
    """A threshold T bounds at T + w - 2 if w and T - 1 are at least 1; at w = 0 any bounds at 0."""
    without: Any = policy_for("verl-wait", shape, **others)
    w = without.num_warmup_batches
    if n < w or n > w == 0:
        rule = f"at least num_warmup_batches, here {w}" if w else "0 where num_warmup_batches is 0"
        raise ValueError(f"verl-wait: the bound is {rule}, got {n}")
    return {"max_off_policy_threshold": n + 2 - w}


def _window(n: int, others: Parameters, shape: RunShape) -> Parameters:
    """The widest window W that keeps a bound of S + ceil((W - 1) / B); S is at most its default."""
    policy_for("windowed-fifo", shape, **others)  # refuses an S that cannot be
    ahead = others.get("target_offpolicy_steps", min(3, n))
    if ahead > n:
        raise ValueError(
            f"windowed-fifo: target_offpolicy_steps must be at most the bound {n}, got {ahead}"
        )
    return {"target_offpolicy_steps": ahead, "window_size": (n - ahead) * shape.batch_size + 1}


BOUNDS: Final[Mapping[str, Bounding]] = {
    "areal": _plain("max_head_offpolicyness"),
    "deadline": _plain("bound"),
    "n-step-off": _plain("n"),
    "nemo-in-order": _plain("max_lookahead_versions"),
    "nemo-ready-first": _plain("max_staleness_versions"),
    "nemo-weight-fifo": _plain("max_staleness_versions"),
    "nemo-windowed": _plain("max_staleness_versions"),
    "openrlhf": _plain("async_queue_size"),
    "prime-rl": _plain("max_off_policy_steps"),
    "psrl-roc": _plain("staleness"),
    "roll": _plain("async_generation_ratio"),
    "skyrl": _plain("max_staleness_steps"),
    "trl": _plain("max_staleness"),
    "verl-drop": _plain("max_off_policy_threshold", more=1),  # its span counts the step itself
    "verl-wait": Bounding("max_off_policy_threshold", _waiting),
    "windowed-fifo": Bounding("window_size", _window),
}
"""A nominal bound where the policy is not strict."""
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
    parameters: Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """`label` has the parameters of `--policy` and those of the configuration that were not
    overridden; `parameters` are all that somebody gave, by `--bound` and `--lookahead` too."""

    label: str
    policy: StalenessPolicy[Any]
    parameters: Parameters


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
    _check_flags([name for name, _ in named], bound, lookahead)
    return tuple(
        _subject(name, given, shape, bound, lookahead, configured) for name, given in named
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


def label(name: str, parameters: Parameters) -> str:
    said = ",".join(f"{key}={_written(value)}" for key, value in parameters.items())
    return f"{name}({said})" if said else name


def _subject(
    name: str,
    given: Parameters,
    shape: RunShape,
    bound: int | None,
    lookahead: int | None,
    configured: Configured | None,
) -> Subject:
    known: Parameters = {}
    if configured is not None and configured.name == name:
        known = configured.parameters
    parameters = dict(known)
    if lookahead is not None and name in LOOKAHEADS:
        parameters[LOOKAHEADS[name]] = lookahead
    parameters.update(given)
    try:
        if bound is not None and name in BOUNDS and BOUNDS[name].parameter not in given:
            parameters.pop(BOUNDS[name].parameter, None)
            parameters.update(BOUNDS[name].chosen(bound, parameters, shape))
        policy = policy_for(name, shape, **parameters)
    except ValueError as error:
        raise ConfigError(f"--policy: {error}") from error
    said = {
        key: value
        for key, value in parameters.items()
        if key in given or (key in known and known[key] == value)
    }
    return Subject(label=label(name, said), policy=policy, parameters=parameters)


def _check_flags(names: Sequence[str], bound: int | None, lookahead: int | None) -> None:
    for flag, value, known in (("bound", bound, BOUNDS), ("lookahead", lookahead, LOOKAHEADS)):
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
