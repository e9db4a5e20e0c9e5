import os
import signal
import time
from pathlib import Path

import pytest

from connectors.files import FileLock, Locked


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with pytest.raises(Locked) as caught:
        FileLock(tmp_path / "lock")
    assert caught.value.pid == str(os.getpid())
    lock.close()
    FileLock(tmp_path / "lock").close()


def test_a_process_forked_from_the_holder_does_not_hold_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"here")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reader, 4) == b"here"
        lock.close()
        FileLock(tmp_path / "lock").close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
