"""`[kafka] security` as a client's settings: the files read, the password found."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from connectors.config import ConfigError, KafkaSecurity

PASSWORD: Final = "HEADWATER_SASL_PASSWORD"


def settings(security: KafkaSecurity, resolve: Callable[[str], Path]) -> dict[str, Any]:
    """For kafka-python. `resolve` makes a path of the configuration one that can be opened.
    ConfigError when a file or the password is missing."""
    made: dict[str, Any] = {"security_protocol": security.security_protocol}
    if security.tls:
        files = {
            key: None if path is None else str(resolve(path))
            for key, path in (
                ("ssl_cafile", security.ssl_cafile),
                ("ssl_certfile", security.ssl_certfile),
                ("ssl_keyfile", security.ssl_keyfile),
            )
        }
        _check_files(**files)
        made |= {**files, "ssl_check_hostname": security.ssl_check_hostname}
    if security.sasl:
        made |= {
            "sasl_mechanism": security.sasl_mechanism,
            "sasl_plain_username": security.sasl_username,
            "sasl_plain_password": _password(security, resolve),
        }
    return made


def _check_files(ssl_cafile: str | None, ssl_certfile: str | None, ssl_keyfile: str | None) -> None:
    """The clients read them at every connection, and would only say that it failed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    key, file = "ssl_cafile", ssl_cafile
    try:
        if ssl_cafile is not None:
            context.load_verify_locations(ssl_cafile)
        key, file = "ssl_certfile", ssl_certfile
        if ssl_certfile is not None:
            context.load_cert_chain(ssl_certfile, ssl_keyfile, password="")
    except OSError as error:  # of ssl, too
        with_key = f" with ssl_keyfile {ssl_keyfile}" if key != "ssl_cafile" and ssl_keyfile else ""
        why = error.strerror or error
        raise ConfigError(f"kafka.security.{key}: {file}{with_key}: {why}") from error


def _password(security: KafkaSecurity, resolve: Callable[[str], Path]) -> str:
    if security.sasl_password is not None:
        return security.sasl_password
    if security.sasl_password_file is None:
        password = os.environ.get(PASSWORD, "")
        where = f"neither sasl_password_file nor sasl_password is set, and {PASSWORD}"
    else:
        where = str(resolve(security.sasl_password_file))
        try:
            password = Path(where).read_text().partition("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is no text"
            raise ConfigError(f"kafka.security.sasl_password_file: {where}: {why}") from None
    if not password:
        raise ConfigError(f"kafka.security: no password: {where} is empty")
    return password
