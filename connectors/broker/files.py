"""Small files that are replaced whole, and folders whose entries must last."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes the creations, removals and renames in `folder` survive power loss."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """`path` holds its old content or all of `content`, whatever happens meanwhile. OSError if the
    disk refuses, then the old content stays."""
    staged = path.with_name(path.name + ".new")
    with staged.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    sync_folder(path.parent)
