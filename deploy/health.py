"""Which roles of a run live, from what the supervisor and the roles themselves left in its folder.

The supervisor writes RUN/supervisor.json at every change. Roles started without one are known by
their registration alone.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from connectors.config import Config
from connectors.engines.types import EngineState
from connectors.files import replace_file
from connectors.run_dir import RunDir
from deploy.log import is_alive
from deploy.supervisor import RoleHealth

ENGINE_ANSWER_S: Final = 1.0


class Supervised(msgspec.Struct, frozen=True, kw_only=True):
    """RUN/supervisor.json."""

    pid: int
    roles: tuple[RoleHealth, ...]


def write(run_dir: RunDir, roles: Sequence[RoleHealth]) -> None:
    """Leaves the supervisor's view of its roles in the run's folder."""
    left = Supervised(pid=os.getpid(), roles=tuple(roles))
    replace_file(run_dir.path / "supervisor.json", msgspec.json.encode(left))


def roles_of(config: Config, run_dir: RunDir) -> list[dict[str, Any]]:
    """`roles` of the status object: name, pid, state, restarts, version (of engines that
    answer)."""
    found: dict[str, dict[str, Any]] = {}
    for health in _supervised(run_dir):
        found[health.name] = {**msgspec.structs.asdict(health), "version": None}
    for role in run_dir.roles():
        if role.name not in found:
            state = "running" if is_alive(role.pid) else "stopped"
            pid = role.pid if state == "running" else None
            found[role.name] = {
                "name": role.name, "pid": pid, "state": state, "restarts": 0, "version": None,
            }  # fmt: skip
        if role.name.startswith("engine") and found[role.name]["state"] == "running":
            found[role.name]["version"] = _engine_version(role.url)
    return list(found.values())


def _supervised(run_dir: RunDir) -> Sequence[RoleHealth]:
    """The supervisor's roles; all stopped when it is gone, for they died with it."""
    try:
        content = (run_dir.path / "supervisor.json").read_bytes()
    except FileNotFoundError:
        return ()
    left = msgspec.json.decode(content, type=Supervised)
    if is_alive(left.pid):
        return left.roles
    return [
        role
        if role.state == "finished"
        else msgspec.structs.replace(role, state="stopped", pid=None)
        for role in left.roles
    ]


def _engine_version(url: str) -> dict[str, int] | None:
    """The version an engine holds; None when it holds none or does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/state", timeout=ENGINE_ANSWER_S) as response:
            state = msgspec.json.decode(response.read(), type=EngineState)
    except (OSError, msgspec.DecodeError):
        return None
    return None if state.version is None else msgspec.structs.asdict(state.version)
