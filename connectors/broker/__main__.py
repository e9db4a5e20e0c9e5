"""python -m connectors.broker --data-dir D [--host H] [--port N] [--fsync always|never]
                            [--tls-cert F --tls-key F] [--users F]
python -m connectors.broker users add NAME --file F

Serves: prints one JSON line, {"host": ..., "port": ...}, when clients may connect; 0 as the port
takes a free one. Ends with 0 at SIGTERM or SIGINT, with 3 and one line if it cannot start.
"""

from __future__ import annotations

import argparse
import getpass
import json
import sys
from pathlib import Path

from connectors.broker import users
from connectors.broker.errors import BrokerError
from connectors.broker.security import secured
from connectors.broker.server import serve

EXIT_ENVIRONMENT = 3


def main() -> int:
    command = _users if sys.argv[1:2] == ["users"] else _serve
    try:
        command()
    except BrokerError as error:
        print(f"broker: {error}", file=sys.stderr)
        return EXIT_ENVIRONMENT
    return 0


def _serve() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m connectors.broker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fsync", choices=["always", "never"], default="never")
    parser.add_argument("--tls-cert", metavar="PEM", help="serve over TLS with this certificate")
    parser.add_argument("--tls-key", metavar="PEM", help="its key (default: in the same file)")
    parser.add_argument("--users", metavar="FILE", help="serve only these, by SASL")
    arguments = parser.parse_args()
    security = secured(arguments.tls_cert, arguments.tls_key, arguments.users)
    serve(arguments.data_dir, arguments.host, arguments.port, arguments.fsync, _announce, security)


def _announce(host: str, port: int) -> None:
    print(json.dumps({"host": host, "port": port}), flush=True)


def _users() -> None:
    parser = argparse.ArgumentParser(prog="python -m connectors.broker users")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("add", "adds a user, or gives it a new password: asked for, or the first line of stdin"),
        ("remove", "removes a user; connections it has stay"),
    ):
        command = commands.add_parser(name, help=summary, description=summary)
        command.add_argument("name", metavar="NAME")
        command.add_argument("--file", type=Path, required=True, help="the broker's file of users")
    arguments = parser.parse_args(sys.argv[2:])
    if arguments.command == "remove":
        users.remove(arguments.file, arguments.name)
    else:
        users.add(arguments.file, arguments.name, _password(arguments.name))


def _password(name: str) -> str:
    """Never from the command line, which other processes can read."""
    if sys.stdin.isatty():
        return getpass.getpass(f"password of {name}: ")
    return sys.stdin.readline().rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
