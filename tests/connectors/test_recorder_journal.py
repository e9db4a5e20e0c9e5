"""The recorder's journal: what is appended comes out once and in order, whatever it suffered."""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.gateway.journal import FRAME, TAKEN_BYTES, TAKEN_RECORDS, Journal

BODIES = st.lists(st.binary(max_size=40), max_size=20)


def drained(journal: Journal) -> list[bytes]:
    found: list[bytes] = []
    while bodies := journal.front():
        found += bodies
        journal.drop(bodies)
    return found


def left_in(folder: Path) -> list[bytes]:
    with closing(Journal(folder)) as journal:
        num_records = len(journal)
        found = drained(journal)
        assert len(found) == num_records
        return found


@given(
    steps=st.lists(
        st.one_of(st.binary(max_size=60), st.integers(0, 5), st.just("again")), max_size=40
    ),
    segment_bytes=st.integers(1, 200),
)
def test_what_is_appended_comes_out_once_and_in_order(
    steps: list[bytes | int | str], segment_bytes: int
) -> None:
    """A number drops that many of the front; "again" opens it anew."""
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name), segment_bytes)
        expected: list[bytes] = []
        for step in steps:
            if isinstance(step, bytes):
                journal.append(step)
                expected.append(step)
            elif isinstance(step, int):
                bodies = journal.front()
                assert bodies == expected[: len(bodies)]
                assert bool(bodies) == bool(expected)
                if bodies:
                    journal.drop(bodies[:step])
                expected = expected[min(step, len(bodies)) :]
            else:
                journal.close()
                journal = Journal(Path(name), segment_bytes)
                # what was dropped of a segment that still has records comes again
                again: list[bytes] = []
                while bodies := journal.front():
                    again += bodies
                    journal.drop(bodies)
                assert again[len(again) - len(expected) :] == expected
                expected = []
            assert len(journal) == len(expected)
        assert drained(journal) == expected
        journal.close()
        assert list(Path(name).glob("*.journal")) == []


@given(bodies=BODIES, data=st.data())
def test_a_torn_tail_costs_the_torn_record_alone(bodies: list[bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        journal = Journal(folder)
        for body in bodies:
            journal.append(body)
        journal.close()
        ends = [0]
        for body in bodies:
            ends.append(ends[-1] + FRAME.size + len(body))
        cut = data.draw(st.integers(0, ends[-1]))
        junk = data.draw(st.binary(max_size=FRAME.size - 1))
        if bodies:
            file = folder / "1.journal"
            file.write_bytes(file.read_bytes()[:cut] + junk[: ends[-1] - cut])
        journal = Journal(folder)
        journal.append(b"of the next start")
        journal.close()
        whole = [body for body, end in zip(bodies, ends[1:], strict=True) if end <= cut]
        found = left_in(folder)
        assert found[: len(whole)] == whole
        assert found[-1] == b"of the next start"
        assert len(found) <= len(bodies) + 1


@given(bodies=st.lists(st.binary(min_size=1, max_size=40), min_size=1), data=st.data())
def test_a_flipped_bit_is_never_a_record(bodies: list[bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name))
        for body in bodies:
            journal.append(body)
        journal.close()
        file = Path(name) / "1.journal"
        content = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        found = left_in(Path(name))
        assert found == bodies[: len(found)]
        assert len(found) < len(bodies)


def test_many_and_large_records_come_in_portions(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        for index in range(TAKEN_RECORDS + 1):
            journal.append(b"%d" % index)
        journal.append(b"x" * 2 * TAKEN_BYTES)
        journal.append(b"last")
        sizes = []
        while bodies := journal.front():
            sizes.append(len(bodies))
            journal.drop(bodies)
        assert sizes == [TAKEN_RECORDS, 1, 1, 1]


FULL = """
import resource, sys
from pathlib import Path
from connectors.gateway.journal import Journal
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
journal = Journal(Path(sys.argv[1]))
taken = refused = 0
for index in range(20):
    try:
        journal.append(b"%03d" % index + b"x" * 97)
        taken += 1
    except OSError as error:
        refused += 1
        assert "takes no record" in str(error), error
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
journal.append(b"there is room again")
print(taken, refused)
"""


@pytest.mark.parametrize("limit", [0, 1, 107, 108, 109, 1000])
def test_a_full_disk_refuses_a_record_and_keeps_the_others(tmp_path: Path, limit: int) -> None:
    """The kernel takes what fits below the limit, then nothing: a torn frame, which is cut off."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = subprocess.run(
        [sys.executable, "-P", "-c", FULL, str(tmp_path), str(limit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fits = limit // 108
    assert done.stdout.split() == [str(fits), str(20 - fits)]
    found = left_in(tmp_path)
    assert [body[:3] for body in found[:-1]] == [b"%03d" % index for index in range(fits)]
    assert found[-1] == b"there is room again"


def test_a_segment_is_removed_once_it_was_taken(tmp_path: Path) -> None:
    with closing(Journal(tmp_path, segment_bytes=50)) as journal:
        for index in range(30):
            journal.append(b"%02d" % index * 10)
        assert len(list(tmp_path.glob("*.journal"))) == 15
        bodies = journal.front()
        assert len(bodies) == 2
        assert not journal.drop(bodies[:1])
        assert journal.drop(bodies[1:])
        assert len(list(tmp_path.glob("*.journal"))) == 14
        drained(journal)
        assert list(tmp_path.glob("*.journal")) == []
