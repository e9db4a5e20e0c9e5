"""A folder of checkpoints, each whole or not there: staged aside, published by rename.

    STORE/step-00000012/state/...      what the caller's `write` put there
    STORE/step-00000012/meta           the caller's bytes: offsets, ledger, whatever goes with it
    STORE/step-00000012/contents.json  every file's size and crc32c
    STORE/.staging-*                   being written
    STORE/.old-*, .retired-*           on their way out

Everything is on disk (fsync of files and folders) before the rename, so a checkpoint that can be
seen is whole after `kill -9` and after power loss. Reading verifies sizes and checksums: a damaged
checkpoint is named in the log and passed over, never loaded. One writer at a time: a new one cleans
away the staging folder of the one before, whose save then fails.
"""

from __future__ import annotations

import logging
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import google_crc32c
import msgspec

from connectors.config import ConfigError
from connectors.files import sync_path

_log = logging.getLogger(__name__)

STAGES: Final = (
    "staged", "written", "synced", "listed", "set_aside", "renamed", "retiring", "done",
)  # fmt: skip
"""What `at` hears during a save, in this order: "set_aside" only when the step was there already,
"retiring" only when an old checkpoint goes."""

_NAME: Final = re.compile(r"step-(\d{8,})")
_CHUNK_BYTES: Final = 4 << 20


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; earlier ones are as they were."""


class CorruptCheckpoint(ValueError):
    """A checkpoint is not what its `contents.json` says."""


class _Contents(msgspec.Struct, frozen=True):
    step: int
    files: dict[str, tuple[int, int]]  # path within the checkpoint -> (bytes, crc32c)


def local_folder(url: str) -> Path:
    """The folder a plain path or a file:// URL names; ConfigError for any other kind of URL."""
    if "://" not in url:
        return Path(url).expanduser()
    parts = urlsplit(url)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ConfigError(f"checkpoint.url: a folder or file:// URL is needed, got {url}")
    return Path(unquote(parts.path))


class CheckpointStore:
    """Reading never changes the folder; `clean` and `save` are for the one writer."""

    def __init__(
        self, url: str | Path, *, keep: int = 2, at: Callable[[str], None] | None = None
    ) -> None:
        """`keep` checkpoints, the one just saved and those before it, stay after a save. `at` is
        called with the name of each stage a save passes: tests crash there. ConfigError for a bad
        URL."""
        self.path = local_folder(str(url))
        self._keep = keep
        self._at = at or (lambda stage: None)

    # ------------------------------------------------------------------------------------ writing
    def clean(self) -> None:
        """Makes the folder and removes what a crash left in it; the writer calls it at its start,
        before it looks for the newest. OSError when the folder cannot be made or written."""
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in list(self.path.iterdir()):
            if entry.name.startswith(".old-"):
                final = self.path / entry.name.removeprefix(".old-")
                if not final.exists():  # killed between the two renames of a replacement
                    entry.rename(final)
                    continue
            elif not entry.name.startswith((".staging-", ".retired-")):
                continue
            _log.info("removing what a crash left: %s", entry)
            shutil.rmtree(entry, ignore_errors=True)

    def save(self, step: int, write: Callable[[Path], None], meta: bytes) -> None:
        """Makes the checkpoint of `step` from what `write` puts into the folder it is given, and
        `meta`. An earlier checkpoint of the same step is replaced. CheckpointFailed when it cannot
        be written: nothing of it stays, earlier ones are untouched."""
        staging = self.path / f".staging-{uuid.uuid4().hex}"
        try:
            self._stage(staging, step, write, meta)
            self._publish(staging, step)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be written to {self.path}: "
                f"{_reason(error)} ({_free_mib(self.path)})"
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._retire(step)
        self._at("done")

    def _stage(self, staging: Path, step: int, write: Callable[[Path], None], meta: bytes) -> None:
        state = staging / "state"
        state.mkdir(parents=True)
        self._at("staged")
        write(state)
        (staging / "meta").write_bytes(meta)
        self._at("written")
        files = {}
        for file in sorted(f for f in staging.rglob("*") if f.is_file()):
            sync_path(file)
            files[file.relative_to(staging).as_posix()] = _size_and_crc(file)
        self._at("synced")
        contents = staging / "contents.json"
        contents.write_bytes(msgspec.json.encode(_Contents(step, files)))
        sync_path(contents)
        for folder in sorted((d for d in staging.rglob("*") if d.is_dir()), reverse=True):
            sync_path(folder)
        sync_path(staging)
        self._at("listed")

    def _publish(self, staging: Path, step: int) -> None:
        final = self._folder(step)
        old = self.path / f".old-{final.name}"
        if final.exists():
            # A folder cannot be renamed onto another. After a kill between the two renames, `clean`
            # puts the old one back.
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            self._at("set_aside")
        try:
            staging.rename(final)
        except OSError:
            if old.exists():
                old.rename(final)
            raise
        sync_path(self.path)
        self._at("renamed")
        shutil.rmtree(old, ignore_errors=True)

    def _retire(self, saved: int) -> None:
        """Removes what is older than the newest `keep` up to `saved`, damaged ones too. Later steps
        are of a run that went another way; they say nothing about which of ours to keep."""
        kept = [step for step in self.steps() if step <= saved][-self._keep :]
        for step in self._listed():
            if step < kept[0]:
                gone = self.path / f".retired-{step}-{uuid.uuid4().hex}"
                self._folder(step).rename(gone)
                self._at("retiring")
                shutil.rmtree(gone, ignore_errors=True)

    # ------------------------------------------------------------------------------------ reading
    def steps(self) -> list[int]:
        """Steps whose checkpoint has all its files at their sizes, ascending; checksums are not
        read."""
        return [step for step in self._listed() if self._is_whole(step, checksums=False)]

    def newest(self) -> int | None:
        """The newest step whose checkpoint is whole, checksums included; None without one. Damaged
        ones are named in the log."""
        return next(
            (s for s in reversed(self._listed()) if self._is_whole(s, checksums=True)), None
        )

    def read(self, step: int) -> tuple[Path, bytes]:
        """(the folder `write` filled, meta) of one checkpoint. CorruptCheckpoint when it is damaged
        or missing."""
        self._verify(step, checksums=True)
        folder = self._folder(step)
        return folder / "state", (folder / "meta").read_bytes()

    def _is_whole(self, step: int, *, checksums: bool) -> bool:
        try:
            self._verify(step, checksums=checksums)
        except CorruptCheckpoint as error:
            _log.warning("checkpoint passed over: %s", error)
            return False
        return True

    def _verify(self, step: int, *, checksums: bool) -> None:
        folder = self._folder(step)
        try:
            contents = msgspec.json.decode((folder / "contents.json").read_bytes(), type=_Contents)
            if contents.step != step:
                raise CorruptCheckpoint(f"{folder}: its contents are of step {contents.step}")
            for name, (size, crc) in contents.files.items():
                if (got := (folder / name).stat().st_size) != size:
                    raise CorruptCheckpoint(f"{folder}: {name} has {got} bytes instead of {size}")
                if checksums and _size_and_crc(folder / name) != (size, crc):
                    raise CorruptCheckpoint(f"{folder}: {name} differs from its checksum")
            if "meta" not in contents.files:
                raise CorruptCheckpoint(f"{folder}: its contents name no meta")
        except FileNotFoundError as error:
            raise CorruptCheckpoint(f"{folder}: {Path(error.filename).name} is missing") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptCheckpoint(f"{folder}: contents.json cannot be read: {error}") from error

    def _listed(self) -> list[int]:
        names = [entry.name for entry in self.path.iterdir()] if self.path.is_dir() else []
        found = (_NAME.fullmatch(name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def _folder(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"


def _size_and_crc(file: Path) -> tuple[int, int]:
    crc, size = google_crc32c.Checksum(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            crc.update(chunk)
            size += len(chunk)
    return size, int.from_bytes(crc.digest(), "big")


def _reason(error: OSError | RuntimeError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__


def _free_mib(folder: Path) -> str:
    if not folder.exists():
        return "the folder is gone"
    return f"{shutil.disk_usage(folder).free >> 20} MiB are free there"
