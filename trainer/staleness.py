"""The staleness policy that a configuration names."""

from __future__ import annotations

from typing import Any

from connectors.config import Config, ConfigError
from operators.staleness import policy as named_policy
from operators.staleness.types import StalenessPolicy


def configured_policy(config: Config) -> StalenessPolicy[Any]:
    """The policy `[staleness]` names; ConfigError otherwise. `n-step-off` takes n from
    `parameters.n`, else from `lookahead`."""
    section = config.staleness
    parameters = dict(section.parameters)
    if section.policy == "n-step-off":
        parameters.setdefault("n", section.lookahead)
    try:
        policy = named_policy(section.policy, **parameters)
    except ValueError as error:
        raise ConfigError(f"staleness: {error}") from error
    if section.bound not in (None, policy.bound):
        raise ConfigError(
            f"staleness.bound: {policy.name} bounds every token at {policy.bound}, got "
            f"{section.bound} (change the policy or its parameters, or leave bound out)"
        )
    return policy
