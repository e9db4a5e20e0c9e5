"""The early version filter: drops groups that are too old to be trained before they cost more.

Only the feed decides what is trained; this spares it, and the scorers, groups it announced it would
refuse."""

from __future__ import annotations

from connectors.records import Group, Version


def is_stale(group: Group, drop_before: Version | None) -> bool:
    """True when a token of the group is older than `drop_before`. None drops nothing."""
    if drop_before is None:
        return False
    oldest = group.oldest
    return oldest is not None and oldest < drop_before
