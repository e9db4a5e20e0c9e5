"""Numbers by version, as a manifest's settings hold them: `incarnation.number=value`, blanks
between. Whoever executes a step again needs neither policy nor lineage for them."""

from __future__ import annotations

from collections.abc import Mapping

from connectors.records import Version


def text(numbers: Mapping[Version, float]) -> str:
    """Without the loss of a bit."""
    return " ".join(f"{version}={number!r}" for version, number in numbers.items())


def parsed(found: object) -> dict[Version, float]:
    """The opposite of `text`."""
    numbers = {}
    for entry in str(found).split():
        version, _, number = entry.partition("=")
        incarnation, _, of_version = version.partition(".")
        numbers[Version(int(incarnation), int(of_version))] = float(number)
    return numbers
