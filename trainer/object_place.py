"""Checkpoints as objects of any fsspec file system: `s3://bucket/prefix` and its like.

    URL/step-00000012/ATTEMPT/state/...    one attempt's files, uploaded one by one
    URL/step-00000012/contents.json        put last: names the attempt, every size and checksum

Objects cannot be renamed, but one object is replaced whole: a checkpoint exists from the moment its
`contents.json` does, and saving a step again swaps one attempt for another. Attempts that no
`contents.json` names are half-written or replaced: readers never see them, the writer removes them.

What is written is staged in a local folder first, and what is read is copied there: into
CACHE/ATTEMPT, which the next read of the same attempt uses again. An hour after its last use a copy
goes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import fsspec
import msgspec

from connectors.config import ConfigError
from trainer.places import CONTENTS, At, Contents, PlaceFailed, Swept, folder_name, step_of

log = logging.getLogger(__name__)
T = TypeVar("T")

PATIENCE_S: Final = 60.0
"""How long a store that does not answer is asked again."""
FIRST_PAUSE_S: Final = 0.2  # doubled each time
UNUSED_S: Final = 3600.0
_LOCAL_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_HOPELESS: Final = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")
"""botocore's, by name: what only the user can mend."""
_PACKAGES: Final = {"s3": "pip install 'headwater[s3]'"}


class ObjectPlace:
    syncs = False

    def __init__(
        self,
        url: str,
        cache: Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`cache`: of this run alone. `options`: for the file system, beside its own configuration
        and environment. ConfigError for a URL that no installed file system takes."""
        self._url = url.rstrip("/")
        self._cache = cache or Path(tempfile.gettempdir()) / f"headwater-checkpoints-{os.getuid()}"
        scheme = url.partition("://")[0]
        try:
            self._files, path = fsspec.core.url_to_fs(
                self._url, use_listings_cache=False, skip_instance_cache=True, **(options or {})
            )
        except ImportError as error:
            how = _PACKAGES.get(scheme, f"fsspec's package for {scheme}:// is needed")
            raise ConfigError(f"checkpoint.url: {url} cannot be opened: {how}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"checkpoint.url: {url} cannot be opened: {error}") from error
        self._root = str(path).rstrip("/")

    def __str__(self) -> str:
        return self._url

    # ------------------------------------------------------------------------------------ writing
    def clean(self) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        for entry in self._cache.glob(".staging-*"):
            shutil.rmtree(entry, ignore_errors=True)
        self._evict()
        self._try_writing()
        for step in self._steps():
            try:
                named = msgspec.json.decode(self.contents(step), type=Contents).attempt
            except FileNotFoundError:
                named = None
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # damaged: nobody knows which attempt it names
            lost = [f for f in self._find(step) if f.partition("/")[0] not in (named, CONTENTS)]
            if lost:
                log.info("removing what a crash left: %s/%s", self, folder_name(step))
                self._delete([self._at(step, name) for name in lost])

    def stage(self) -> Path:
        return self._cache / f".staging-{uuid.uuid4().hex}"

    def attempt(self) -> str:
        return uuid.uuid4().hex

    def publish(self, staging: Path, contents: Contents, at: At) -> None:
        for name in contents.files:
            target = self._at(contents.step, f"{contents.attempt}/{name}")
            self._ask(partial(self._files.put_file, str(staging / name), target))
            at("uploading")
        if self.sizes(contents) != {name: size for name, (size, _) in contents.files.items()}:
            raise Swept
        listing = (staging / CONTENTS).read_bytes()
        before = self._find(contents.step)
        target = self._at(contents.step, CONTENTS)
        self._ask(lambda: self._files.pipe_file(target, listing))
        at("published")
        self._delete(
            self._at(contents.step, name)
            for name in before
            if name.partition("/")[0] not in (contents.attempt, CONTENTS)
        )
        self._evict()

    def remove(self, step: int, at: At) -> None:
        names = self._find(step)
        if CONTENTS in names:
            self._delete([self._at(step, CONTENTS)])
        at("retiring")
        self._delete(self._at(step, name) for name in names if name != CONTENTS)

    # ------------------------------------------------------------------------------------ reading
    def listed(self) -> list[int]:
        return [step for step in self._steps() if CONTENTS in self._find(step)]

    def contents(self, step: int) -> bytes:
        return self._content(self._at(step, CONTENTS))

    def sizes(self, contents: Contents) -> Mapping[str, int]:
        prefix = f"{contents.attempt}/"
        found = self._find(contents.step).items()
        return {n.removeprefix(prefix): size for n, size in found if n.startswith(prefix)}

    def read(self, contents: Contents, name: str) -> bytes:
        return self._content(self._at(contents.step, f"{contents.attempt}/{name}"))

    def fetch(self, contents: Contents) -> Path:
        copy = self._copy(contents)
        if not copy.exists():
            part = self._cache / f".part-{uuid.uuid4().hex}"
            try:
                for name in contents.files:
                    (part / name).parent.mkdir(parents=True, exist_ok=True)
                    source = self._at(contents.step, f"{contents.attempt}/{name}")
                    get = partial(self._files.get_file, source, str(part / name))
                    self._ask(get, missing_is_an_answer=True)
                if not copy.exists():
                    part.rename(copy)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        os.utime(copy)
        self._evict(but=copy)
        return copy

    def forget(self, contents: Contents) -> None:
        shutil.rmtree(self._copy(contents), ignore_errors=True)

    def room(self) -> str:
        return f"{shutil.disk_usage(self._cache).free >> 20} MiB are free in {self._cache}"

    # ----------------------------------------------------------------------------------- the cache
    def _copy(self, contents: Contents) -> Path:
        return self._cache / f"{folder_name(contents.step)}-{contents.attempt}"

    def _evict(self, but: Path | None = None) -> None:
        """Removes copies nobody read for UNUSED_S."""
        for copy in self._cache.glob("step-*"):
            try:
                unused = time.time() - copy.stat().st_mtime >= UNUSED_S
            except FileNotFoundError:
                continue
            if copy != but and unused:
                shutil.rmtree(copy, ignore_errors=True)

    # ------------------------------------------------------------------------------- the objects
    def _at(self, step: int, name: str) -> str:
        return f"{self._root}/{folder_name(step)}/{name}"

    def _steps(self) -> list[int]:
        names = self._ask(lambda: self._list(self._root))
        found = (step_of(name.rstrip("/").rpartition("/")[2]) for name in names)
        return sorted({step for step in found if step is not None})

    def _list(self, path: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            return [str(name) for name in self._files.ls(path, detail=False)]
        except FileNotFoundError:
            return []  # nothing was saved yet

    def _find(self, step: int) -> dict[str, int]:
        """Every object of a step, by its name below the step's folder, and its bytes."""
        folder = f"{self._root}/{folder_name(step)}"

        def find() -> dict[str, int]:
            self._files.invalidate_cache()
            found = self._files.find(folder, detail=True)
            return {
                str(path).partition(f"/{folder_name(step)}/")[2]: int(info["size"])
                for path, info in found.items()
            }

        return self._ask(find)

    def _content(self, path: str) -> bytes:
        return bytes(self._ask(lambda: self._files.cat_file(path), missing_is_an_answer=True))

    def _delete(self, paths: Iterator[str] | list[str]) -> None:
        for path in list(paths):
            with contextlib.suppress(FileNotFoundError):
                self._ask(partial(self._files.rm_file, path), missing_is_an_answer=True)

    def _try_writing(self) -> None:
        """Refused credentials and wrong names are found out now, not at the first checkpoint."""
        probe = f"{self._root}/.probe-{uuid.uuid4().hex}"
        self._ask(lambda: self._files.pipe_file(probe, b""))
        self._delete([probe])

    def _ask(self, question: Callable[[], T], *, missing_is_an_answer: bool = False) -> T:
        """The answer of the file system, which is foreign code over a network: it raises
        anything. What may pass is tried again for a while, the rest becomes PlaceFailed."""
        deadline, pause_s = time.monotonic() + PATIENCE_S, FIRST_PAUSE_S
        while True:
            try:
                return question()
            except FileNotFoundError as error:
                if missing_is_an_answer:
                    raise
                raise self._failed("there is no such bucket or object", error) from error
            except PermissionError as error:
                raise self._failed("access is denied", error) from error
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _LOCAL_ERRORS:
                    raise
                if type(error).__name__ in _HOPELESS or isinstance(error, (TypeError, ValueError)):
                    raise self._failed("access is not configured right", error) from error
                if time.monotonic() + pause_s > deadline:
                    what = f"it could not be reached for {PATIENCE_S:g} s"
                    raise self._failed(what, error) from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5.0)

    def _failed(self, what: str, error: Exception) -> PlaceFailed:
        detail = " ".join(str(error).split()) or type(error).__name__
        return PlaceFailed(f"{what} ({detail})")
