"""A store of checkpoints, each whole or not there, in a local folder or an object store.

    step-00000012/state/...      what the caller's `write` put there
    step-00000012/meta           the caller's bytes: offsets, ledger, whatever goes with it
    step-00000012/contents.json  every file's size and crc32c, written last

A checkpoint is staged aside and then appears at once (`trainer.places`, `trainer.object_place` say
how), so one that can be seen is whole whatever was killed. Reading verifies sizes and checksums: a
damaged checkpoint is named in the log and passed over, never loaded. One writer at a time: a new
one cleans away what the one before was writing, whose save then fails.
"""

from __future__ import annotations

import errno
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import google_crc32c
import msgspec

from connectors.config import Config
from connectors.files import sync_path
from connectors.run_dir import RunDir
from trainer.places import CONTENTS, At, Contents, PlaceFailed, Swept, place

_log = logging.getLogger(__name__)

STAGES: Final = (
    "staged", "written", "synced", "listed", "uploading", "set_aside", "published", "retiring",
    "done",
)  # fmt: skip
"""What `at` hears during a save, in this order: "uploading" only of an object store, after each
file; "set_aside" only when the step lies in the folder already; "retiring" only when an old
checkpoint goes."""

_META: Final = "meta"
_CHUNK_BYTES: Final = 4 << 20
_SWEPT: Final = "its staging folder was removed meanwhile, as a newer trainer does when it starts"


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written, or the store not be reached; what was saved earlier is as
    it was."""


class CorruptCheckpoint(ValueError):
    """A checkpoint is not what its `contents.json` says."""


class CheckpointStore:
    """Reading never changes the store; `clean` and `save` are for the one writer. CheckpointFailed
    from everything when an object store refuses or does not answer."""

    def __init__(
        self,
        url: str | Path,
        *,
        keep: int = 2,
        keep_for_s: float | None = None,
        cache: Path | None = None,
        options: Mapping[str, Any] | None = None,
        at: At | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """After a save there stay `keep` checkpoints, the one just saved and those before it, and
        those younger than `keep_for_s`. `cache` and `options`: for an object store, its local
        copies and its settings. `at` is called with the name of each stage a save passes: tests
        crash there. ConfigError for a URL nobody can open."""
        self.url = str(url)
        self._place = place(self.url, cache, options or {})
        self._keep, self._keep_for_s = keep, keep_for_s
        self._at: At = at or (lambda stage: None)
        self._clock = clock
        self._passed_over: set[int] = set()

    # ------------------------------------------------------------------------------------ writing
    def clean(self) -> None:
        """Makes the store and removes what a crash left in it; the writer calls it at its start,
        before it looks for the newest. OSError when a folder cannot be made or written."""
        with self._reached():
            self._place.clean()

    def pass_over(self, steps: Iterable[int]) -> None:
        """These lead nowhere (they are of a line that was given up, or of another run): from now
        on, until they are saved anew, they count as little as those that were read and found
        damaged."""
        self._passed_over |= set(steps)

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        meta: bytes,
        *,
        may_retire: Callable[[], bool] = lambda: True,
    ) -> None:
        """Makes the checkpoint of `step` from what `write` puts into the folder it is given, and
        `meta`; then, if the writer `may_retire`, old ones go. An earlier checkpoint of the same
        step is replaced. CheckpointFailed when it cannot be written: nothing of it stays, earlier
        ones are untouched."""
        staging = self._place.stage()
        try:
            contents = self._stage(staging, step, write, meta)
            self._place.publish(staging, contents, self._at)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            missing = getattr(error, "errno", errno.ENOENT) == errno.ENOENT  # torch gives no errno
            gone = missing and staging.parent.exists() and not staging.exists()
            if gone or isinstance(error, Swept):
                reason = _SWEPT
            elif isinstance(error, PlaceFailed):
                reason = str(error)
            else:
                reason = f"{_reason(error)} ({self._place.room()})"
            raise CheckpointFailed(
                f"the checkpoint of step {step} could not be written to {self._place}: {reason}"
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        self._passed_over.discard(step)
        if may_retire():
            with self._reached():
                self._retire(step)
        self._at("done")

    def _stage(
        self, staging: Path, step: int, write: Callable[[Path], None], meta: bytes
    ) -> Contents:
        sync = sync_path if self._place.syncs else lambda path: None
        state = staging / "state"
        state.mkdir(parents=True)
        self._at("staged")
        write(state)
        (staging / _META).write_bytes(meta)
        self._at("written")
        files = {}
        for file in sorted(f for f in staging.rglob("*") if f.is_file()):
            sync(file)
            files[file.relative_to(staging).as_posix()] = _size_and_crc(file)
        self._at("synced")
        contents = Contents(step, files, self._clock(), self._place.attempt())
        (staging / CONTENTS).write_bytes(msgspec.json.encode(contents))
        sync(staging / CONTENTS)
        for folder in sorted((d for d in staging.rglob("*") if d.is_dir()), reverse=True):
            sync(folder)
        sync(staging)
        self._at("listed")
        return contents

    def _retire(self, saved: int) -> None:
        """Removes what is neither among the newest `keep` up to `saved` nor young, damaged ones
        too. Later steps are of a run that went another way; they say nothing about which of ours to
        keep."""
        whole = {step: self._verified(step) for step in self.steps() if step <= saved}
        first_kept = sorted(whole)[-self._keep :][0]
        young_since = self._clock() - (self._keep_for_s or 0.0)
        for step in self._place.listed():
            is_young = step in whole and whole[step].saved_at > young_since
            if step < first_kept and not is_young:
                self._place.remove(step, self._at)

    # ------------------------------------------------------------------------------------ reading
    def steps(self) -> list[int]:
        """Steps whose checkpoint has all its files at their sizes, ascending; checksums are not
        read. Without those passed over."""
        with self._reached():
            listed = [step for step in self._place.listed() if step not in self._passed_over]
            return [step for step in listed if self._is_whole(step, self._verified)]

    def newest(self) -> int | None:
        """The newest step whose checkpoint is whole, checksums included; None without one. Damaged
        ones are named in the log."""
        with self._reached():
            listed = self._place.listed()
        return next((step for step in reversed(listed) if self._is_whole(step, self.read)), None)

    def read(self, step: int) -> tuple[Path, bytes]:
        """(a folder with what `write` put there, meta) of one checkpoint. CorruptCheckpoint when it
        is damaged or missing."""
        with self._reached():
            contents = self._verified(step)
            with self._found(step):
                folder = self._place.fetch(contents)
                for name, listed in contents.files.items():
                    if _size_and_crc(folder / name) != listed:
                        self._place.forget(contents)
                        self._passed_over.add(step)
                        raise CorruptCheckpoint(
                            f"{self._name(step)}: {name} differs from its checksum"
                        )
                return folder / "state", (folder / _META).read_bytes()

    def meta(self, step: int) -> bytes:
        """Of one checkpoint, without its state being fetched or verified. CorruptCheckpoint when
        the meta is damaged or missing."""
        with self._reached(), self._found(step):
            contents = self._verified(step)
            data = self._place.read(contents, _META)
        if (len(data), google_crc32c.value(data)) != contents.files[_META]:
            raise CorruptCheckpoint(f"{self._name(step)}: {_META} differs from its checksum")
        return data

    def _is_whole(self, step: int, look: Callable[[int], object]) -> bool:
        try:
            look(step)
        except CorruptCheckpoint as error:
            _log.warning("checkpoint passed over: %s", error)
            return False
        return True

    def _verified(self, step: int) -> Contents:
        """The contents of a checkpoint whose files are all there at their sizes."""
        with self._found(step):
            contents = msgspec.json.decode(self._place.contents(step), type=Contents)
            sizes = self._place.sizes(contents)
        where = self._name(step)
        if contents.step != step:
            raise CorruptCheckpoint(f"{where}: its contents are of step {contents.step}")
        for name, (size, _) in contents.files.items():
            if name not in sizes:
                raise CorruptCheckpoint(f"{where}: {name} is missing")
            if sizes[name] != size:
                raise CorruptCheckpoint(
                    f"{where}: {name} has {sizes[name]} bytes instead of {size}"
                )
        if _META not in contents.files:
            raise CorruptCheckpoint(f"{where}: its contents name no meta")
        return contents

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except PlaceFailed as error:
            raise CheckpointFailed(f"checkpoint.url {self._place}: {error}") from error

    @contextmanager
    def _found(self, step: int) -> Iterator[None]:
        """What cannot be found or read inside makes the checkpoint a corrupt one."""
        try:
            yield
        except FileNotFoundError as error:
            missing = Path(error.filename).name if error.filename else CONTENTS
            raise CorruptCheckpoint(f"{self._name(step)}: {missing} is missing") from error
        except OSError as error:
            raise CorruptCheckpoint(f"{self._name(step)} cannot be read: {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CorruptCheckpoint(
                f"{self._name(step)}: {CONTENTS} cannot be read: {error}"
            ) from error

    def _name(self, step: int) -> str:
        return f"{self._place}/step-{step:08d}"


def run_store(config: Config, run_dir: RunDir) -> CheckpointStore:
    """The store of a run, wherever its configuration puts it."""
    section = config.checkpoint
    return CheckpointStore(
        section.url or run_dir.checkpoints,
        keep=section.keep,
        keep_for_s=None if section.keep_hours is None else section.keep_hours * 3600.0,
        cache=run_dir.path / "checkpoint-cache",
        options=section.options,
    )


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
