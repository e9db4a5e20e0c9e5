"""Topics as folders: a topic exists when its folder does, so creating and deleting are one rename
each.

DATA/topics/NAME/topic.json      {"partitions": 2, "configs": {...}}
DATA/topics/NAME/0/              partition 0's log
DATA/staging/                    topics half created or half deleted; emptied at start
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from connectors.broker.errors import CorruptLog, ErrorCode, Refused
from connectors.broker.log import Log
from connectors.broker.notices import notice
from connectors.broker.partition import Partition
from connectors.files import replace_file, sync_path

DEFAULT_CONFIGS = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "-1",
    "segment.bytes": str(128 << 20),
}
ADJUSTABLE = {"max.message.bytes": (1, 96 << 20), "segment.bytes": (1024, 1 << 30)}
MAX_PARTITIONS = 4096
_LEGAL_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    name: str
    configs: Mapping[str, str]
    """What its creator set; the rest is DEFAULT_CONFIGS."""
    partitions: tuple[Partition, ...]


class Topics:
    def __init__(self, data_dir: Path, *, sync: bool) -> None:
        """Opens every topic. CorruptLog if one is damaged."""
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

    def check_new(self, name: str, num_partitions: int, configs: Mapping[str, str | None]) -> None:
        """Refused if `create` would refuse."""
        if not _LEGAL_NAME.fullmatch(name) or name in (".", ".."):
            raise Refused(
                ErrorCode.INVALID_TOPIC,
                f"topic name {name!r}: 1 to 249 of letters, digits, '.', '_' and '-' are allowed",
            )
        if name in self._topics:
            raise Refused(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name!r} exists")
        if not 1 <= num_partitions <= MAX_PARTITIONS:
            raise Refused(
                ErrorCode.INVALID_PARTITIONS,
                f"1 to {MAX_PARTITIONS} partitions, got {num_partitions}",
            )
        for key, value in configs.items():
            _check_config(key, value)

    def create(self, name: str, num_partitions: int, configs: Mapping[str, str | None]) -> Topic:
        """Refused if the name is taken or a value is not supported; OSError when the disk
        refuses."""
        self.check_new(name, num_partitions, configs)
        staged = self._staged()
        for index in range(num_partitions):
            (staged / str(index)).mkdir(parents=True)
        description = {"partitions": num_partitions, "configs": dict(configs)}
        replace_file(staged / "topic.json", json.dumps(description).encode(), sync=True)
        folder = self._folder / name
        staged.rename(folder)
        sync_path(self._folder)
        topic = self._topics[name] = self._open(folder)
        return topic

    def delete(self, name: str) -> None:
        """Refused if there is none; OSError when the disk refuses."""
        topic = self._topics.get(name)
        if topic is None:
            raise Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"there is no topic {name!r}")
        staged = self._staged()
        (self._folder / name).rename(staged)
        sync_path(self._folder)
        del self._topics[name]
        for partition in topic.partitions:
            partition.wake()
        shutil.rmtree(staged, ignore_errors=True)  # what is left goes at the next start

    def _staged(self) -> Path:
        self._num_staged += 1
        return self._staging / str(self._num_staged)

    def _open(self, folder: Path) -> Topic:
        try:
            description = json.loads((folder / "topic.json").read_bytes())
            num_partitions, configs = int(description["partitions"]), dict(description["configs"])
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise CorruptLog(f"{folder}/topic.json: is missing or damaged: {error}") from error
        partitions = []
        for index in range(num_partitions):
            if not (folder / str(index)).is_dir():
                raise CorruptLog(f"{folder / str(index)}: is missing")
            partitions.append(Partition(self._open_log(folder / str(index), configs)))
        return Topic(name=folder.name, configs=configs, partitions=tuple(partitions))

    def _open_log(self, folder: Path, configs: Mapping[str, str]) -> Log:
        values = DEFAULT_CONFIGS | dict(configs)
        log = Log(
            folder,
            sync=self._sync,
            segment_bytes=int(values["segment.bytes"]),
            max_batch_bytes=int(values["max.message.bytes"]),
        )
        if log.repair is not None:
            notice(
                f"{log.repair.path}: cut off a write that was interrupted:"
                f" {log.repair.num_bytes} bytes from byte {log.repair.position}"
            )
        return log


def _check_config(key: str, value: str | None) -> None:
    if key not in DEFAULT_CONFIGS:
        raise Refused(ErrorCode.INVALID_CONFIG, f"unknown topic config {key!r}")
    if key not in ADJUSTABLE:
        if value != DEFAULT_CONFIGS[key]:
            raise Refused(
                ErrorCode.INVALID_CONFIG,
                f"{key}: only {DEFAULT_CONFIGS[key]} is supported, got {value}",
            )
        return
    lowest, highest = ADJUSTABLE[key]
    if value is None or not value.isdecimal() or not lowest <= int(value) <= highest:
        raise Refused(
            ErrorCode.INVALID_CONFIG, f"{key}: {lowest} to {highest} is allowed, got {value}"
        )
