"""`headwater log RUN TOPIC`: what is in any topic of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy import errors
from deploy.commands.arguments import Commands, add_json, add_run, command, load_run
from deploy.output import answer, stdout_for_answer

if TYPE_CHECKING:
    from connectors.config import Config
    from connectors.run_dir import RunDir
    from deploy.log_range import Range
    from deploy.read_log import Decoded, Topic

NAMED = 5
"""Unreadable records that are named on stderr; all of them are in the output."""


def add(commands: Commands) -> None:
    parser = command(
        commands,
        "log",
        execute,
        "prints the records of a topic, or exports them; groups one trajectory a line",
        "headwater log runs/quickstart trajectories --from 0/100 --where reward '>' 0.5 "
        "--export good.parquet",
    )
    add_run(parser)
    parser.add_argument("topic", metavar="TOPIC", help="a topic of the run, or its full name")
    add_range(parser)
    parser.add_argument(
        "--where", nargs=3, action="append", default=[], metavar=("FIELD", "OP", "VALUE"),
        help="only lines of which this holds: = != < <= > >= or ~ (contains), to be quoted for "
        "the shell; FIELD is dotted, e.g. segments.number or headers.code; repeatable",
    )  # fmt: skip
    parser.add_argument("--last", type=_count, metavar="K", help="the last K lines by time")
    parser.add_argument("--follow", action="store_true", help="go on with what is written later")
    parser.add_argument("--export", type=Path, metavar="FILE", help="a new .jsonl or .parquet file")
    add_json(parser)


def add_range(parser: argparse.ArgumentParser) -> None:
    """`--from` and `--to`, as `deploy.log_range` reads them."""
    for option, name, which in (("--from", "since", "first"), ("--to", "until", "last")):
        parser.add_argument(
            option, dest=name, action="append", default=[], metavar="WHERE",
            help=f"the {which} record: OFFSET, PARTITION/OFFSET (repeatable), or a time",
        )  # fmt: skip


def execute(arguments: argparse.Namespace) -> int:
    from connectors.config import ConfigError

    config, run_dir = load_run(arguments)
    if arguments.follow and (arguments.json or arguments.export or arguments.until):
        raise ConfigError("log: --follow goes without --json, --export and --to")
    if arguments.follow and config.kafka.bootstrap_servers is None:
        from deploy.log import home, running_broker

        if running_broker(home(config, run_dir)) is None:
            raise errors.EnvironmentFailure(
                f"{run_dir.path}: its broker does not run, so nothing comes that could be followed"
            )
    if arguments.export is not None:
        from deploy.export_log import check

        check(arguments.export)
    return _read(config, run_dir, arguments)


def _read(config: Config, run_dir: RunDir, arguments: argparse.Namespace) -> int:
    import threading
    from dataclasses import replace

    from connectors.signals import stop_on_signals
    from deploy import read_log
    from deploy.log import opened
    from deploy.log_where import Conditions, Where

    asked = [Where.parse(*condition) for condition in arguments.where]
    where = Conditions(asked) if asked else None
    # An exception would be swallowed where a client's callback runs at that moment.
    stop = stop_on_signals(threading.Event()) if arguments.follow else None
    with stdout_for_answer(arguments.json), opened(config, run_dir) as cluster:
        topic = read_log.find_topic(cluster, arguments.topic)
        span = read_log.find_range(cluster, topic, arguments.since, arguments.until)
        for partition, start in span.removed.items():
            _say(f"retention removed what lay before {topic.name}/{partition}/{start}")
        output = _Output(arguments, topic)
        if arguments.last is not None:
            part = span if where else read_log.newest(span, arguments.last)
            found = read_log.read(cluster, topic, part, where, stop=stop)
            output.take(read_log.last(found, arguments.last))
        else:
            output.take(read_log.read(cluster, topic, span, where, stop=stop))
        if arguments.follow:
            later = replace(span, first=span.stop)
            output.take(read_log.read(cluster, topic, later, where, follow=True, stop=stop))
    if not output.num_lines and not arguments.follow:
        for why in where.unknown() if where else ():
            _say(why)
        _say(_why_nothing(topic, span))
    return output.end(span.first, span.stop)


def _why_nothing(topic: Topic, span: Range) -> str:
    if any(span.stop[p] > at for p, at in span.first.items()):
        return "no record matches"
    held = (
        f"{topic.name}/{p} holds {f'the offsets {start} to {end - 1}' if end > start else 'none'}"
        for p, (start, end) in span.held.items()
    )
    return f"no record is there: {', '.join(held)}"


class _Output:
    """Where lines go: the terminal, the file, or what --json answers."""

    def __init__(self, arguments: argparse.Namespace, topic: Topic) -> None:
        self._topic = topic
        self._json, self._file = arguments.json, arguments.export
        self._records: list[Any] = []
        self._unreadable: list[dict[str, Any]] = []
        self._written = self.num_lines = 0
        self._short = sys.stdout.isatty() and not arguments.json
        self._flush = self._short or arguments.follow

    def take(self, found: Iterable[Decoded]) -> None:
        import msgspec

        from deploy.export_log import export
        from deploy.read_log import shortened

        seen = self._seen(found)
        if self._file is not None:
            self._written = export(seen, self._file, groups=self._topic.terminals)
            return
        for decoded in seen:
            for line in decoded.lines:
                data = msgspec.json.encode(shortened(line) if self._short else line)
                if self._json:
                    self._records.append(msgspec.json.decode(data))  # NaN is null by now
                else:
                    print(data.decode(), flush=self._flush)

    def end(self, first: Mapping[int, int], stop: Mapping[int, int]) -> int:
        """Says what is left to say; the exit code."""
        topic = self._topic.name
        found = {
            "topic": topic,
            "from": {str(p): at for p, at in first.items()},
            "to": {str(p): at - 1 for p, at in stop.items()},
            "records": self._records,
            "written": self._written,
            "file": None if self._file is None else str(self._file),
            "unreadable": self._unreadable,
        }
        if self._json:
            answer(True, found, ())
        elif self._file is not None:
            print(f"{self._written} lines written to {self._file}")
        sys.stdout.flush()  # a closed pipe is noticed here
        if self._unreadable and not self._json:
            for bad in self._unreadable[:NAMED]:
                _say(f"{topic}/{bad['partition']}/{bad['offset']} is unreadable: {bad['why']}")
            _say(f"{len(self._unreadable)} records are unreadable; their lines say so")
        return errors.OK

    def _seen(self, found: Iterable[Decoded]) -> Iterable[Decoded]:
        for decoded in found:
            if decoded.unreadable is not None:
                at = decoded.record
                self._unreadable.append(
                    {"partition": at.partition, "offset": at.offset, "why": decoded.unreadable}
                )
            self.num_lines += len(decoded.lines)
            yield decoded


def _say(text: str) -> None:
    print(f"headwater: {text}", file=sys.stderr)


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number
