"""`headwater init`: a folder to start from. The files are those of `deploy/templates`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from deploy.errors import EnvironmentFailure

FILES: Final = ("headwater.toml", "model.py", "reward.py", "prompts.jsonl")


def write_example(folder: str | Path) -> list[str]:
    """Writes the example into `folder`, made if need be; the paths written, the configuration
    first. EnvironmentFailure, and nothing is written, when one of the files exists."""
    target = Path(folder)
    existing = [name for name in FILES if (target / name).exists()]
    if existing:
        raise EnvironmentFailure(f"{target / existing[0]} exists: choose another folder")
    target.mkdir(parents=True, exist_ok=True)
    templates = resources.files("deploy") / "templates"
    for name in FILES:
        (target / name).write_bytes((templates / name).read_bytes())
    return [str(target / name) for name in FILES]
