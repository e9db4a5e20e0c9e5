"""Topics as folders: a topic exists when its folder does, so creating and deleting are one rename
each; what its description names is there before the description is replaced.

DATA/topics/NAME/topic.json      {"partitions": 2, "configs": {...}}
DATA/topics/NAME/0/              partition 0's log
DATA/staging/                    topics half created or half deleted; emptied at start
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from connectors.broker.configs import LogConfig, check_config
from connectors.broker.errors import CorruptLog, ErrorCode, Refused
from connectors.broker.log import Log
from connectors.broker.notices import notice
from connectors.broker.partition import Partition
from connectors.files import replace_file, sync_path

MAX_PARTITIONS = 4096
RETENTION_EVERY_S = 1.0
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    name: str
    configs: Mapping[str, str]
    """What was set for it; the rest is at its default."""
    partitions: tuple[Partition, ...]


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Topics:
    def __init__(
        self, data_dir: Path, *, sync: bool, now_ms: Callable[[], int] = wall_clock_ms
    ) -> None:
        """Opens every topic. CorruptLog if one is damaged. `now_ms` is the clock of retention and
        of the times that the broker gives."""
        self.now_ms = now_ms
        self._changing = asyncio.Lock()
        self._folder = data_dir / "topics"
        self._staging = data_dir / "staging"
        self._sync = sync
        self._topics: dict[str, Topic] = {}
        self._num_staged = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._staging, ignore_errors=True)
        self._staging.mkdir(exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            self._topics[folder.name] = self._open(folder)

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._topics.values())

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def partition(self, name: str, index: int) -> Partition:
        """Refused if there is none."""
        topic = self._topics.get(name)
        if topic is None or not 0 <= index < len(topic.partitions):
            raise Refused(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
                f"there is no partition {index} of topic {name!r}",
            )
        return topic.partitions[index]

    def _known(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r}")
        return topic

    def check_new(self, name: str, num_partitions: int, configs: Mapping[str, str | None]) -> None:
        """Refused if `create` would refuse."""
        if not _LEGAL_NAME.fullmatch(name) or name in (".", ".."):
            raise Refused(
                ErrorCode.INVALID_TOPIC,
                f"topic name {name!r}: 1 to 249 of letters, digits, '.', '_' and '-' are allowed",
            )
        if name in self._topics:
            raise Refused(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name!r} exists")
        _check_count(num_partitions, lowest=1)
        for key, value in configs.items():
            check_config(key, value)

    async def create(
        self, name: str, num_partitions: int, configs: Mapping[str, str | None]
    ) -> None:
        """Refused if the name is taken or a value is not supported; OSError when the disk
        refuses."""
        async with self._changing:
            self.check_new(name, num_partitions, configs)
            staged = self._staged()
            for index in range(num_partitions):
                (staged / str(index)).mkdir(parents=True)
            _describe(staged, num_partitions, configs)
            folder = self._folder / name
            staged.rename(folder)
            try:
                sync_path(self._folder)
                self._topics[name] = self._open(folder)
            except OSError:
                folder.rename(staged)
                raise

    async def add_partitions(self, name: str, num_partitions: int, *, only_check: bool) -> None:
        """Makes it `num_partitions` in all, the new ones empty. Refused if it has as many; OSError
        when the disk refuses."""
        async with self._changing:
            topic = self._known(name)
            num_old = len(topic.partitions)
            _check_count(num_partitions, lowest=num_old + 1)
            if only_check:
                return
            added = []
            for index in range(num_old, num_partitions):
                folder = self._folder / name / str(index)
                folder.mkdir(exist_ok=True)
                added.append(Partition(self._open_log(folder, topic.configs)))
            _describe(self._folder / name, num_partitions, topic.configs)
            self._topics[name] = replace(topic, partitions=(*topic.partitions, *added))

    async def configure(
        self,
        name: str,
        change: Callable[[Mapping[str, str]], Mapping[str, str | None]],
        *,
        only_check: bool,
    ) -> None:
        """Sets the topic's own configs to what `change` makes of them. Refused if one is not
        supported; OSError when the disk refuses."""
        async with self._changing:
            topic = self._known(name)
            configs: dict[str, str] = {}
            for key, value in change(topic.configs).items():
                check_config(key, value)
                configs[key] = str(value)
            if only_check:
                return
            _describe(self._folder / name, len(topic.partitions), configs)
            self._topics[name] = replace(topic, configs=configs)
            for partition in topic.partitions:
                partition.log.config = LogConfig.of(configs)

    async def delete(self, name: str) -> None:
        """Waits for what is being written to it. Refused if there is none; OSError when the disk
        refuses."""
        async with self._changing:
            topic = self._known(name)
            staged = self._staged()
            try:
                for partition in topic.partitions:
                    await partition.close()
                (self._folder / name).rename(staged)
            except BaseException:
                for partition in topic.partitions:
                    partition.reopen()
                raise
            del self._topics[name]
            for partition in topic.partitions:
                partition.wake()
            sync_path(self._folder)
        # What is left goes at the next start.
        await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)

    async def retain(self) -> None:
        """Removes what the topics' retention lets go."""
        for topic in list(self):
            for partition in topic.partitions:
                # Neither a full disk, which the partition tells of, nor a deletion is for here.
                with contextlib.suppress(OSError, Refused):
                    await partition.retain(self.now_ms())

    async def keep_retaining(self) -> None:
        """Until cancelled."""
        while True:
            await self.retain()
            await asyncio.sleep(RETENTION_EVERY_S)

    def _staged(self) -> Path:
        self._num_staged += 1
        return self._staging / str(self._num_staged)

    def _open(self, folder: Path) -> Topic:
        try:
            description = json.loads((folder / "topic.json").read_bytes())
            num_partitions, configs = int(description["partitions"]), dict(description["configs"])
            for name, value in configs.items():
                check_config(name, value)
        except (FileNotFoundError, ValueError, KeyError, TypeError, Refused) as error:
            raise CorruptLog(f"{folder}/topic.json: is missing or damaged: {error}") from error
        partitions = []
        for index in range(num_partitions):
            if not (folder / str(index)).is_dir():
                raise CorruptLog(f"{folder / str(index)}: is missing")
            partitions.append(Partition(self._open_log(folder / str(index), configs)))
        return Topic(name=folder.name, configs=configs, partitions=tuple(partitions))

    def _open_log(self, folder: Path, configs: Mapping[str, str]) -> Log:
        log = Log(folder, LogConfig.of(configs), sync=self._sync)
        if log.repair is not None:
            notice(str(log.repair))
        return log


def _check_count(num_partitions: int, *, lowest: int) -> None:
    if not lowest <= num_partitions <= MAX_PARTITIONS:
        raise Refused(
            ErrorCode.INVALID_PARTITIONS,
            f"it may have {lowest} to {MAX_PARTITIONS} partitions, got {num_partitions}",
        )


def _describe(folder: Path, num_partitions: int, configs: Mapping[str, str | None]) -> None:
    description = {"partitions": num_partitions, "configs": dict(configs)}
    replace_file(folder / "topic.json", json.dumps(description).encode(), sync=True)
