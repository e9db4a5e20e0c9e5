"""A run's folder: where each role keeps its files, and where roles find each other.

A role that serves registers its address in `roles/NAME.json`; readers take what is there now, so
an engine that joins or leaves while running needs no restart of anyone. Plain files, written by
rename.

    RUN/config.toml      the run's configuration, overrides applied
    RUN/broker/          the embedded broker's data
    RUN/recovery/STAGE/  bytewax's snapshots
    RUN/checkpoints/     unless checkpoint.url says otherwise
    RUN/checkpoint-cache/ of what lies in an object store
    RUN/roles/           one JSON a role: name, pid, url, started_at, restarts
    RUN/logs/            one text file a role
    RUN/tensorboard/
    RUN/stall.txt        while the staleness policy cannot go on
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from connectors.config import Config
from connectors.files import replace_file


class Role(msgspec.Struct, frozen=True, kw_only=True):
    """A registered role. `url` is host:port for the broker, http://host:port for an engine, "" for
    those that serve nothing."""

    name: str
    pid: int
    url: str = ""
    started_at: float = 0.0


class RunDir:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()

    @classmethod
    def of(cls, config: Config) -> RunDir:
        """The folder the configuration names: `run.dir` (relative to its file) or `runs/NAME` in
        the working directory."""
        if config.run.dir is not None:
            return cls(config.resolve(config.run.dir))
        return cls(Path("runs", config.run.name))

    @property
    def config_file(self) -> Path:
        return self.path / "config.toml"

    @property
    def broker_data(self) -> Path:
        return self.path / "broker"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def stall_file(self) -> Path:
        return self.path / "stall.txt"

    def recovery(self, stage: str) -> Path:
        return self.path / "recovery" / stage

    def log_file(self, role: str) -> Path:
        return self.path / "logs" / f"{role}.log"

    def register(self, name: str, *, url: str = "") -> None:
        """Publishes this process as role `name`."""
        folder = self.path / "roles"
        folder.mkdir(parents=True, exist_ok=True)
        role = Role(name=name, pid=os.getpid(), url=url, started_at=time.time())
        replace_file(folder / f"{name}.json", msgspec.json.encode(role))

    def roles(self) -> list[Role]:
        """Every role that ever registered, by name; a role whose process died is still listed."""
        found = []
        for file in sorted((self.path / "roles").glob("*.json")):
            try:
                found.append(msgspec.json.decode(file.read_bytes(), type=Role))
            except (OSError, msgspec.DecodeError):
                continue  # removed or replaced between listing and reading
        return found

    def url(self, name: str) -> str | None:
        return next((r.url for r in self.roles() if r.name == name and r.url), None)

    def engine_urls(self, config: Config) -> list[str]:
        """The engines to talk to now: those the configuration lists and those registered here."""
        own = [r.url for r in self.roles() if r.name.startswith("engine") and r.url]
        return [*config.engine.urls, *own]
