"""`engine.options`: each kind of engine has its own."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError

from connectors.config import Config, ConfigError, Section

S = TypeVar("S", bound=Section)


def parse_options(config: Config, kind: type[S]) -> S:
    """The options as `kind`; ConfigError names the wrong key, the rule and the value got."""
    try:
        return kind(**config.engine.options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        known = ", ".join(kind.model_fields)
        raise ConfigError(
            f"engine.options.{where}: {first['msg'].lower()}, got {first['input']!r}; "
            f"known here: {known}"
        ) from error
