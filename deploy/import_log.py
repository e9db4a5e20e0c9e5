"""`headwater logs import`: foreign logs into a run's `agent-traffic` and `feedback`.

    files ─▶ connectors.imports ─▶ checked (task, twice?) ─▶ the log, each record once

A record is known by its topic, its session and its id, which follow from the file's content. Before
anything is written, what importers wrote until now is read back, under a lock that one import holds
at a time: so an import that is repeated, or started again after it was killed, adds what is
missing. (What a killed one still had on its way to the broker may follow its end by an instant;
the near-line stage takes a call, and a fact, once by the same ids.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from connectors.config import Config, ConfigError
from connectors.files import FileLock, Locked
from connectors.imports.outcome import LeftOut
from connectors.imports.read import Format, Found, Import
from connectors.kafka.client import Cluster, Producer, Reader, RecordTooLarge
from connectors.kafka.locate import topics
from connectors.kafka.topics import ensure_topics
from connectors.records import HEADER_ID, HEADER_WRITER, encode
from connectors.run_dir import RunDir
from connectors.traffic import TOPICS, Call, Feedback, partition_of
from deploy.errors import EnvironmentFailure
from deploy.imported import Imported, refused
from deploy.log import home, opened
from operators.traces import standing

WRITER: Final = "import"
LOCK: Final = "import.lock"
FLUSH_RECORDS: Final = 2000
FLUSH_BYTES: Final = 16 << 20
"""Of values on their way at most, by about one record."""
WHERE_TEMPERATURE: Final = 1.0
"""At which log-probs count as those of the policy where no configuration tells."""


Told = Callable[[Found], None]


def import_log(
    path: Path,
    run: tuple[Config, RunDir] | None,
    *,
    form: Format = "auto",
    task: str | None = None,
    dry_run: bool = False,
    told: Told = lambda found: None,
) -> Imported:
    """Reads the file or folder and, unless `dry_run`, writes its records into the run's log. `task`
    is for calls that name none; the only task of the run when it is not given. `told`: of each row
    as it is read."""
    if not path.exists():
        raise ConfigError(f"{path}: does not exist")
    if run is None and not dry_run:
        raise ConfigError("logs import: give the run, or --dry-run")
    config = None if run is None else run[0]
    if config is not None:
        task = _task(config, task)
    reading = Import(path, form)
    if not reading.files:
        raise ConfigError(f"{path}: holds no .jsonl, .ndjson, .json, .csv (or .gz) nor .parquet")
    done = Imported(files=len(reading.files))
    records = _records(reading, config, task, done, told)
    if dry_run or run is None:
        for record in records:
            _count(record, config, done)
    else:
        with _log(*run) as cluster:
            _read_back(cluster, run[0].kafka.partitions, done.known)
            _write(records, cluster, run[0], done)
    done.noted = {
        "time_missing": sum(clock.num_missing for clock in reading.clocks),
        "clock_backwards": sum(clock.num_backwards for clock in reading.clocks),
    }
    done.refused = [] if config is None else list(refused(config, done))
    return done


def _task(config: Config, task: str | None) -> str | None:
    if task is None and len(config.tasks) == 1:
        return next(iter(config.tasks))
    if task is not None and task not in config.tasks:
        raise ConfigError(f"--task {task}: is no task of the run; known: {', '.join(config.tasks)}")
    return task


def _records(
    reading: Import, config: Config | None, task: str | None, done: Imported, told: Told
) -> Iterator[tuple[str, Call | Feedback]]:
    """Where it stands, and the record, of all that is to be written."""
    seen: set[int] = set()
    for found in reading:
        done.read += 1
        told(found)
        record = found.record
        if found.form is not None:
            done.formats[found.form] += 1
        if isinstance(record, LeftOut):
            done.skip(found.where, record.reason, str(record))
            continue
        if isinstance(record, Call):
            record = replace(record, task=record.task or task or "")
            if config is not None and record.task not in config.tasks:
                known = ", ".join(config.tasks)
                reason = "unknown_task" if record.task else "no_task"
                done.skip(found.where, reason, f"{record.task or 'no task'}; the run has {known}")
                continue
        mark = _mark(*_place(record))
        if mark in seen or mark in done.known:
            reason = "duplicate" if mark in seen else "already_imported"
            done.skip(found.where, reason, f"{record.id} is there already")
            continue
        seen.add(mark)
        yield found.where, record


def _place(record: Call | Feedback) -> tuple[str, str, str]:
    """(topic, key, id) that tell it from all others."""
    if isinstance(record, Call):
        return TOPICS[0], record.session, record.id
    return TOPICS[1], record.session or str(record.call), record.id


def _mark(*parts: str) -> int:
    content = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _count(record: tuple[str, Call | Feedback], config: Config | None, done: Imported) -> None:
    said = record[1]
    done.sessions.add(_mark(_place(said)[1]))
    if isinstance(said, Feedback):
        done.feedback += 1
        return
    done.calls += 1
    done.tasks[said.task] += 1
    temperature = WHERE_TEMPERATURE if config is None else config.sampling.temperature
    behaviour, why = standing(said, temperature)
    done.classes[behaviour] += 1
    if why:
        done.why[f"{behaviour}: {why}"] += 1


# --------------------------------------------------------------------------------------- the log
@contextmanager
def _log(config: Config, run_dir: RunDir) -> Iterator[Cluster]:
    """The run's log, with the topics; no other import writes into it meanwhile."""
    folder = home(config, run_dir).path
    if not folder.exists():
        raise ConfigError(f"{folder}: does not exist; a run has a log once it was started")
    try:
        lock = FileLock(folder / LOCK)
    except Locked as error:
        raise EnvironmentFailure(
            f"process {error.pid} imports into {folder} now: wait for its end"
        ) from error
    except OSError as error:
        raise EnvironmentFailure(f"{folder} cannot be written: {error.strerror}") from error
    with closing(lock), opened(config, run_dir) as cluster:
        ensure_topics(cluster, topics(config.kafka.partitions))
        yield cluster


def _read_back(cluster: Cluster, partitions: int, known: set[int]) -> None:
    """Adds what importers wrote: 8 bytes a record are kept."""
    starts = dict.fromkeys(range(partitions), 0)
    for topic in TOPICS:
        with closing(Reader(cluster, cluster.topic(topic), starts)) as reader:
            ends = reader.ends()
            reader.rewind()
            for record in reader.read_to(ends):
                if record.headers.get(HEADER_WRITER) == WRITER and record.key is not None:
                    known.add(_mark(topic, record.key.decode(), record.headers[HEADER_ID]))


def _write(
    records: Iterator[tuple[str, Call | Feedback]],
    cluster: Cluster,
    config: Config,
    done: Imported,
) -> None:
    num_waiting = num_bytes = 0
    with closing(Producer(cluster)) as producer:
        for where, record in records:
            topic, key, name = _place(record)
            value = encode(record)
            try:
                producer.send(
                    cluster.topic(topic),
                    partition_of(key, config.kafka.partitions),
                    value,
                    key=key.encode(),
                    headers={HEADER_WRITER: WRITER, HEADER_ID: name},
                )
            except RecordTooLarge as error:
                done.skip(where, "too_large", str(error))
                continue
            _count((where, record), config, done)
            done.written += 1
            num_waiting, num_bytes = num_waiting + 1, num_bytes + len(value)
            if num_waiting >= FLUSH_RECORDS or num_bytes >= FLUSH_BYTES:
                producer.flush()
                num_waiting = num_bytes = 0
        producer.flush()
