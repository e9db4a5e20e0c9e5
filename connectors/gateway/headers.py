"""What a client says beside the body: `x-headwater-session`, `-task`, `-user`, `-key`, `-record`
and `-end`, and the session in the path."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from aiohttp import web

from connectors.gateway.calls import Caller
from connectors.gateway.errors import invalid
from connectors.gateway.sessions import scoped

MOST_CHARS: Final = 256
_PREFIX: Final = "x-headwater-"


class Headers:
    """`task`: of calls that name none; None where the run has several and none is the default."""

    def __init__(self, tasks: Collection[str], task: str | None) -> None:
        self._tasks, self._task = tasks, task

    def caller(self, request: web.Request, owner: str, user: str) -> Caller:
        """`user`: the body's, which counts where no header names one. Refused (400) for a value
        that makes no sense."""
        shown = self.session(request)
        return Caller(
            owner=owner,
            session=None if shown is None else scoped(owner, shown),
            shown=shown,
            task=self._task_of(request),
            user=scoped(owner, named) if (named := self._given(request, "user") or user) else owner,
            key=self._given(request, "key") or "",
            is_recorded=self._switch(request, "record", otherwise=True),
            ends_session=self._switch(request, "end", otherwise=False),
        )

    def session(self, request: web.Request) -> str | None:
        """As the client names it: in the path, or in the header."""
        named = request.match_info.get("session")
        if named is not None:
            return self.checked(named, "session")
        return self._given(request, "session")

    def checked(self, value: str, name: str) -> str:
        if not 1 <= len(value) <= MOST_CHARS or not value.isascii() or not value.isprintable():
            raise invalid(
                f"{_PREFIX}{name} must have 1 to {MOST_CHARS} printable ASCII characters",
                _PREFIX + name,
                "bad_header",
            )
        return value

    def _given(self, request: web.Request, name: str) -> str | None:
        value = request.headers.get(_PREFIX + name)
        return None if value is None else self.checked(value, name)

    def _task_of(self, request: web.Request) -> str:
        task = self._given(request, "task") or self._task
        known = ", ".join(self._tasks)
        if task is None:
            raise invalid(f"name one of the tasks ({known})", _PREFIX + "task", "unknown_task")
        if task not in self._tasks:
            message = f"there is no task {task}; known are {known}"
            raise invalid(message, _PREFIX + "task", "unknown_task")
        return task

    def _switch(self, request: web.Request, name: str, *, otherwise: bool) -> bool:
        value = request.headers.get(_PREFIX + name)
        if value is None:
            return otherwise
        if value.lower() not in _SWITCH:
            raise invalid(f"{_PREFIX}{name} must be on or off", _PREFIX + name, "bad_header")
        return _SWITCH[value.lower()]


_SWITCH: Final = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
