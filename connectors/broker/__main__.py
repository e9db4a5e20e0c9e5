"""python -m connectors.broker --data-dir D [--host H] [--port N] [--fsync always|never]

Prints one JSON line, {"host": ..., "port": ...}, when clients may connect; 0 as the port takes a
free one. Ends with 0 at SIGTERM or SIGINT, with 3 and one line if it cannot start.
"""

from __future__ import annotations

import argparse
import json
import sys

from connectors.broker.errors import BrokerError
from connectors.broker.server import serve

EXIT_ENVIRONMENT = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m connectors.broker", description=__doc__)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fsync", choices=["always", "never"], default="never")
    arguments = parser.parse_args()
    try:
        serve(arguments.data_dir, arguments.host, arguments.port, arguments.fsync, _announce)
    except BrokerError as error:
        print(f"broker: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def _announce(host: str, port: int) -> None:
    print(json.dumps({"host": host, "port": port}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
