"""What bytewax keeps of an epoch that a killed process did not finish, and what we do about it."""

from __future__ import annotations

import pickle
import sqlite3
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import bytewax.operators as op
import pytest
from bytewax.dataflow import Dataflow
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import TestingSink, TestingSource, run_main

from pipelines.recovery_folder import forget_unfinished


class Words(op.StatefulBatchLogic):  # type: ignore[misc]
    """Remembers the words of its key."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def on_batch(self, values: list[str]) -> tuple[list[list[str]], bool]:
        self.words = [*self.words, *values]
        return [self.words], op.StatefulBatchLogic.RETAIN

    def snapshot(self) -> list[str]:
        return self.words


def executed(folder: Path, script: list[Any]) -> list[tuple[str, list[str]]]:
    """What one execution, which goes on where the last one ended, says of each word."""
    said: list[tuple[str, list[str]]] = []
    flow = Dataflow("flow")
    words = op.input("in", flow, TestingSource(script))
    known = op.stateful_batch("words", words, lambda resumed: Words(resumed or []))
    op.output("out", known, TestingSink(said))
    run_main(flow, epoch_interval=timedelta(0), recovery_config=RecoveryConfig(folder))
    return said


def save_of_unfinished_epoch(database: Path, key: str, words: list[str]) -> None:
    """As a process does that is killed before its epoch ends."""
    with closing(sqlite3.connect(database)) as connection, connection:
        last = "SELECT ex_num FROM exs ORDER BY ex_num DESC LIMIT 1"
        (epoch,) = connection.execute(
            f"SELECT max(worker_frontier) FROM fronts WHERE ex_num = ({last})"
        ).fetchone()
        connection.execute(
            "INSERT INTO snaps (step_id, state_key, snap_epoch, ser_change) VALUES (?, ?, ?, ?)",
            ("flow.words", key, epoch, pickle.dumps(words)),
        )


@pytest.mark.parametrize("forgotten", [True, False])
def test_what_a_killed_process_saved_of_its_last_epoch_does_not_come_back(
    tmp_path: Path, forgotten: bool
) -> None:
    init_db_dir(tmp_path, 1)
    database = tmp_path / "part-0.sqlite3"
    end = TestingSource.EOF()
    script: list[Any] = [("a", "one"), end, ("a", "two"), end, ("b", "three")]
    assert executed(tmp_path, script) == [("a", ["one"])]
    save_of_unfinished_epoch(database, "b", ["a word that comes again"])
    if forgotten:
        forget_unfinished([database])
    assert executed(tmp_path, script) == [("a", ["one", "two"])]  # its first epoch saves "a" alone
    before = [] if forgotten else ["a word that comes again"]
    assert executed(tmp_path, script) == [("b", [*before, "three"])]


def test_a_new_folder_has_nothing_to_forget(tmp_path: Path) -> None:
    init_db_dir(tmp_path, 1)
    forget_unfinished([tmp_path / "part-0.sqlite3"])
