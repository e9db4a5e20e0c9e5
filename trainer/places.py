"""Where checkpoints lie: `Place`, its local folder, and `place(url)`.

    PLACE/step-00000012/...        one checkpoint, as `Contents` says
    PLACE/.staging-*               being written
    PLACE/.old-*, .retired-*       on their way out

A place knows nothing of what is in a checkpoint; `trainer.checkpoint` decides what is whole, what
is read and what goes.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from connectors.config import ConfigError
from connectors.files import sync_path

log = logging.getLogger(__name__)

CONTENTS: Final = "contents.json"
At = Callable[[str], None]
"""Hears the name of each stage a save passes."""


class Contents(msgspec.Struct, frozen=True):
    """`contents.json`, the last file written of a checkpoint."""

    step: int
    files: dict[str, tuple[int, int]]  # path within the checkpoint -> (bytes, crc32c)
    saved_at: float = 0.0
    attempt: str = ""  # where in an object store the files lie


class PlaceFailed(OSError):
    """The place cannot be reached or refuses; the message says which, and why, in one line."""


class Swept(OSError):
    """What was being written is gone: a newer writer cleaned up."""


class Place(Protocol):
    """One writer cleans, publishes and removes; anybody reads. PlaceFailed from everything that
    reaches beyond this machine."""

    syncs: bool
    """Whether what is staged must be on disk (fsync) before it is published."""

    def clean(self) -> None:
        """Makes the place and removes what a crash left in it. OSError when it cannot be made or
        written."""

    def stage(self) -> Path:
        """A folder, not made yet, to write a checkpoint into."""

    def attempt(self) -> str:
        """A new `Contents.attempt`."""

    def publish(self, staging: Path, contents: Contents, at: At) -> None:
        """Makes the checkpoint staged there the one of its step, all at once; an earlier one of the
        same step is replaced. Swept when a newer writer cleaned it away."""

    def remove(self, step: int, at: At) -> None:
        """The checkpoint of that step, whole or not; what is left of it when this is cut short is
        no checkpoint."""

    def listed(self) -> list[int]:
        """Steps that have a checkpoint, whole or not, ascending."""

    def contents(self, step: int) -> bytes:
        """FileNotFoundError without one."""

    def sizes(self, contents: Contents) -> Mapping[str, int]:
        """Bytes of each file that lies where that checkpoint's files are."""

    def read(self, contents: Contents, name: str) -> bytes:
        """One of its files. FileNotFoundError without it."""

    def fetch(self, contents: Contents) -> Path:
        """A local folder with its files; nobody has looked at their checksums. FileNotFoundError
        when one is missing."""

    def forget(self, contents: Contents) -> None:
        """What `fetch` gave was damaged: take it from the place again next time."""

    def room(self) -> str:
        """How much space is left on the disk that is staged on, for messages."""


def place(url: str, cache: Path | None, options: Mapping[str, Any]) -> Place:
    """A plain path or file:// is a local folder; any other URL is fsspec's, with `options` for its
    file system and `cache` for local copies. ConfigError for one nobody can open."""
    folder = local_folder(url)
    if folder is not None:
        return LocalPlace(folder)
    from trainer.object_place import ObjectPlace

    return ObjectPlace(url, cache, options)


def local_folder(url: str) -> Path | None:
    """The folder a plain path or a file:// URL names; None for any other kind of URL."""
    if "://" not in url:
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.scheme != "file":
        return None
    if parts.netloc not in ("", "localhost"):
        raise ConfigError(f"checkpoint.url: a file:// URL names no other host, got {url}")
    return Path(unquote(parts.path))


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Of a checkpoint's folder; None for any other name."""
    match = re.fullmatch(r"step-(\d{8,})", name)
    return int(match[1]) if match else None


class LocalPlace:
    """A folder. A checkpoint appears by rename, so one that can be seen is whole after kill -9 and
    after power loss."""

    syncs = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def clean(self) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        for entry in list(self._path.iterdir()):
            if entry.name.startswith(".old-"):
                final = self._path / entry.name.removeprefix(".old-")
                if not final.exists():  # killed between the two renames of a replacement
                    entry.rename(final)
                    continue
            elif not entry.name.startswith((".staging-", ".retired-")):
                continue
            log.info("removing what a crash left: %s", entry)
            shutil.rmtree(entry, ignore_errors=True)

    def stage(self) -> Path:
        return self._path / f".staging-{uuid.uuid4().hex}"

    def attempt(self) -> str:
        return ""

    def publish(self, staging: Path, contents: Contents, at: At) -> None:
        final = self._folder(contents.step)
        old = self._path / f".old-{final.name}"
        if not staging.exists():
            raise Swept
        if final.exists():
            # A folder cannot be renamed onto another. After a kill between the two renames, `clean`
            # puts the old one back.
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            at("set_aside")
        try:
            staging.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        sync_path(self._path)
        at("published")
        shutil.rmtree(old, ignore_errors=True)

    def remove(self, step: int, at: At) -> None:
        gone = self._path / f".retired-{step}-{uuid.uuid4().hex}"
        self._folder(step).rename(gone)
        at("retiring")
        shutil.rmtree(gone, ignore_errors=True)

    def listed(self) -> list[int]:
        names = [entry.name for entry in self._path.iterdir()] if self._path.is_dir() else []
        return sorted(step for step in map(step_of, names) if step is not None)

    def contents(self, step: int) -> bytes:
        return (self._folder(step) / CONTENTS).read_bytes()

    def sizes(self, contents: Contents) -> Mapping[str, int]:
        folder = self._folder(contents.step)
        files = (file for file in folder.rglob("*") if file.is_file())
        return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}

    def read(self, contents: Contents, name: str) -> bytes:
        return (self._folder(contents.step) / name).read_bytes()

    def fetch(self, contents: Contents) -> Path:
        return self._folder(contents.step)

    def forget(self, contents: Contents) -> None:
        return None

    def room(self) -> str:
        if not self._path.exists():
            return "the folder is gone"
        return f"{shutil.disk_usage(self._path).free >> 20} MiB are free there"

    def _folder(self, step: int) -> Path:
        return self._path / folder_name(step)
