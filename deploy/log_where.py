"""Conditions on a line of `headwater log`: `--where FIELD OP VALUE`."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from connectors.config import ConfigError

_NOTHING: Final = object()


def _contains(found: Any, wanted: Any) -> bool:
    if isinstance(found, list | Mapping):
        return wanted in found
    return str(wanted) in str(found)


_OPS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt,
    ">=": operator.ge, "~": _contains,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Where:
    """`field` is dotted; it starts in the record's value, else in the line itself (`offset`,
    `headers.code`). In a list it means any element. A line without the field does not match."""

    field: str
    op: str
    value: Any

    @classmethod
    def parse(cls, field: str, op: str, value: str) -> Where:
        """ConfigError for an unknown operator. `value` is JSON, bare text is a string."""
        if op not in _OPS:
            raise ConfigError(f"--where {field} {op} {value}: {op} is none of {' '.join(_OPS)}")
        try:
            return cls(field, op, msgspec.json.decode(value))
        except msgspec.DecodeError:
            return cls(field, op, value)

    def matches(self, line: Mapping[str, Any]) -> bool:
        return any(self._holds(found) for found in self._found(line))

    def is_in(self, line: Mapping[str, Any]) -> bool:
        """Whether the line has the field."""
        return next(self._found(line), _NOTHING) is not _NOTHING

    def _found(self, line: Mapping[str, Any]) -> Iterator[Any]:
        path = self.field.split(".")
        value = line.get("value")
        inside = isinstance(value, Mapping) and path[0] in value
        return _reach(value if inside else line, path, whole=self.op == "~")

    def _holds(self, found: Any) -> bool:
        wanted = self.value
        if isinstance(found, str) and not isinstance(wanted, str):
            wanted = str(wanted)  # a key of digits
        try:
            return bool(_OPS[self.op](found, wanted))
        except TypeError:  # text is neither above nor below a number
            return False


class Conditions:
    """All of `where` at once, and the fields of the lines they were asked about."""

    def __init__(self, where: Sequence[Where] = ()) -> None:
        self.where = where
        self._unmet = list(where)
        self._names: dict[str, None] = {}
        self._num_lines = 0

    def match(self, line: Mapping[str, Any]) -> bool:
        if self._unmet:
            self._unmet = [w for w in self._unmet if not w.is_in(line)]
            self._names |= dict.fromkeys(_names(line))
        self._num_lines += 1
        return all(w.matches(line) for w in self.where)

    def unknown(self) -> list[str]:
        """Of each field that no line had: that it had none, and which was meant."""
        found = []
        for where in self._unmet if self._num_lines else ():
            close = difflib.get_close_matches(where.field, self._names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            found.append(f"none of {self._num_lines} lines has a field {where.field}{hint}")
        return found


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    """Every field of a line as --where names it; those of its value go without `value`."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        name = "" if not prefix and key == "value" else f"{prefix}{key}"
        first = inner[0] if isinstance(inner, list) and inner else inner
        if name:
            yield name
        yield from _names(first, f"{name}." if name else "")


def _reach(value: Any, path: Sequence[str], *, whole: bool) -> Iterator[Any]:
    """What lies at `path`; a list there is meant element by element, or as a `whole`."""
    if isinstance(value, list) and not (whole and not path):
        for element in value:
            yield from _reach(element, path, whole=whole)
    elif not path:
        yield value
    elif isinstance(value, Mapping) and path[0] in value:
        yield from _reach(value[path[0]], path[1:], whole=whole)
