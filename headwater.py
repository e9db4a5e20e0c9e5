"""The `headwater` command. Puts Headwater's own folder first on the module path before anything
else is imported, so that a user's `trainer/` or `operators/` folder, in the working directory or
on PYTHONPATH, never shadows ours."""

import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from deploy.cli import main as cli

    sys.exit(cli())


if __name__ == "__main__":
    main()
