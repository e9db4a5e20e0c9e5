"""What all sections of a configuration share."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line: where, the rule, the value got."""


MOST_TOKENS: Final = 10_000_000
"""Of a sequence: no model has a longer context."""
MOST_STEPS: Final = 10**9
YEAR_S: Final = 365 * 24 * 3600


class Section(BaseModel):
    """Strict: a flag or a string is no number. An integer is one, where a float is asked for."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
