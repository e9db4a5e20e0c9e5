"""The staleness policy that a configuration names and what of a step it has, beside live traffic;
what a manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from connectors.config import Config, ConfigError, Staleness
from connectors.kafka.client import Cluster
from operators.staleness import policy_for
from operators.staleness.deadline import Deadline
from operators.staleness.n_step_off import NStepOff
from operators.staleness.preset import RunShape
from operators.staleness.types import StalenessPolicy
from trainer.traffic import Allowance, topics_of

_NAME: Final = "staleness_policy"
_BOUND: Final = "staleness_bound"


def configured_policy(config: Config) -> StalenessPolicy[Any]:
    """The policy `[staleness]` names; ConfigError otherwise."""
    section = config.staleness
    parameters = configured_parameters(section)
    try:
        policy = policy_for(section.policy, shape_of(config), **parameters)
    except ValueError as error:
        raise ConfigError(f"staleness: {error}") from error
    if section.bound is not None and not isinstance(policy, Deadline):
        _check_bound(section.bound, policy)
    if config.nearline is not None and isinstance(policy, Deadline):
        _check_weights(policy)
    return policy


def _check_weights(policy: Deadline) -> None:
    if policy.at_deadline in ("mask", "reweight"):
        raise ConfigError(
            f"staleness.at_deadline: {policy.at_deadline!r} weighs a step's tokens by the version "
            "that wrote them, and live traffic, which has a bound of its own (nearline.bound), "
            "would be weighed with the others: with [nearline] take 'wait' or 'drop'"
        )


def shape_of(config: Config) -> RunShape:
    """What the run decides for its policy; of tasks with different group sizes the largest. A
    policy that is asked nothing takes one group a step."""
    num_engines = len(config.engine.urls) or config.engine.count
    return RunShape(
        batch_size=max(1, granted_per_step(config)),
        group_size=max(task.group_size for task in config.tasks.values()),
        num_slots=num_engines * config.engine.max_running,
        num_engines=num_engines,
    )


def granted_per_step(config: Config) -> int:
    """Groups of a step that the policy grants and chooses; the others are live traffic's."""
    num_groups = config.trainer.groups_per_step
    return num_groups - (config.nearline.places(num_groups) if config.nearline else 0)


def allowance_of(config: Config, cluster: Cluster) -> Allowance | None:
    """What live traffic has of each step; None without `[nearline]`."""
    if config.nearline is None:
        return None
    labels = [task.feedback for task in config.tasks.values()]
    return Allowance(
        num_places=config.nearline.places(config.trainer.groups_per_step),
        bound=config.nearline.bound,
        topics=topics_of(cluster),
        labels=(min(label.low for label in labels), max(label.high for label in labels)),
    )


def configured_parameters(section: Staleness) -> dict[str, Any]:
    """Those that the section gives the policy, its own fields among them; ConfigError for a field
    that the policy does not know."""
    given = {"lookahead": section.lookahead, "at_deadline": section.at_deadline}
    if section.policy == "deadline":
        return _of_deadline({"bound": section.bound, **given}, section.parameters)
    parameters = dict(section.parameters)
    if section.policy == "n-step-off":
        ahead = given.pop("lookahead")
        if "n" not in parameters and ahead is None:
            raise ConfigError("staleness: n-step-off needs lookahead, its n")
        if ahead is not None and parameters.setdefault("n", ahead) != ahead:
            raise ConfigError(
                f"staleness.lookahead: is the n of n-step-off, got {ahead} and "
                f"parameters.n = {parameters['n']}"
            )
    for key, value in given.items():
        if value is not None:
            raise ConfigError(
                f"staleness.{key}: {section.policy} has none, got {value!r} (leave it out; what "
                f"{section.policy} takes goes into parameters)"
            )
    return parameters


def _of_deadline(fields: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in fields.items():
        if value is not None and parameters.get(key, value) != value:
            raise ConfigError(
                f"staleness.{key}: is given twice, as {value!r} and as parameters.{key} = "
                f"{parameters[key]!r}"
            )
    return {**parameters, **{k: value for k, value in fields.items() if value is not None}}


def _check_bound(bound: int, policy: StalenessPolicy[Any]) -> None:
    if bound == policy.bound:
        return
    rule = "bounds nothing" if policy.bound is None else f"bounds every token at {policy.bound}"
    raise ConfigError(
        f"staleness.bound: {policy.name} {rule}, got {bound} (change the policy or its parameters, "
        "or leave bound out)"
    )


def lookahead_of(policy: StalenessPolicy[Any]) -> int | Literal["auto"] | None:
    """How many steps ahead it grants, None where it does not say."""
    if isinstance(policy, Deadline):
        return policy.lookahead
    return policy.n if isinstance(policy, NStepOff) else None


def reserves(policy: StalenessPolicy[Any]) -> bool:
    """Whether each group it grants keeps a place in time until it ends, so that none is ever open
    beyond the bound; other strict policies let groups get too old and drop them."""
    if isinstance(policy, Deadline):
        return policy.at_deadline == "wait"
    return isinstance(policy, NStepOff)


def policy_settings(policy: StalenessPolicy[Any]) -> dict[str, float | str]:
    """What the settings of a manifest say: its name and, of a strict one, its bound."""
    bound = {} if policy.bound is None else {_BOUND: policy.bound}
    return {_NAME: policy.name, **bound}


def bound_of(settings: Mapping[str, float | str], policy: StalenessPolicy[Any]) -> int | None:
    """The bound under which a step with these settings was trained; where they do not say it, that
    of `policy`."""
    if _NAME not in settings:
        return policy.bound
    return int(settings[_BOUND]) if _BOUND in settings else None
