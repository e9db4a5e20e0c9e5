import errno
from pathlib import Path

import pytest

from deploy.disk import FULL_BYTES, PATIENCE_S, DiskWatch, free_bytes, room_or_later
from deploy.errors import EnvironmentFailure


def test_a_full_disk_is_said_once_and_so_is_room_again() -> None:
    free = [FULL_BYTES]
    watch = DiskWatch(Path("/run"), lambda path: free[0])
    assert watch.look(0.0) is None
    free[0] = FULL_BYTES - 1
    said = watch.look(1.0)
    assert said is not None
    assert "/run is full" in said
    assert watch.look(2.0) is None
    free[0] = FULL_BYTES
    said = watch.look(3.0)
    assert said is not None
    assert "has room again" in said
    assert watch.look(4.0) is None


def test_a_disk_that_stays_full_ends_the_run() -> None:
    watch = DiskWatch(Path("/run"), lambda path: 0)
    watch.look(0.0)
    assert watch.look(PATIENCE_S) is None
    with pytest.raises(EnvironmentFailure, match="is full"):
        watch.look(PATIENCE_S + 0.1)


def test_free_bytes_are_those_of_the_machine(tmp_path: Path) -> None:
    assert free_bytes(tmp_path) > 0


def test_what_a_full_disk_refuses_may_wait_and_no_other_failure_may() -> None:
    with room_or_later():
        raise OSError(errno.ENOSPC, "no space")
    with pytest.raises(PermissionError), room_or_later():
        raise PermissionError(errno.EACCES, "denied")
