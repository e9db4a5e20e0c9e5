"""The sections of the log: how it is reached, and the broker that a run may start itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from connectors.config.section import Section


class KafkaSecurity(Section):
    """How every role and command proves itself to the log, and the log to them."""

    security_protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    ssl_cafile: str | None = None
    """PEM of who signed the brokers' certificates; leave out to trust whom this machine trusts."""
    ssl_certfile: str | None = None
    """PEM of a client's certificate, where the brokers ask for one."""
    ssl_keyfile: str | None = None
    """Of ssl_certfile; leave out if that file holds it too."""
    ssl_check_hostname: bool = True
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] | None = None
    sasl_username: str | None = None
    sasl_password: str | None = Field(None, repr=False)
    """Is copied into the run's config.toml, which then only its owner can read."""
    sasl_password_file: str | None = None
    """Its first line is the password. Without either, HEADWATER_SASL_PASSWORD in the environment
    is."""

    @property
    def tls(self) -> bool:
        return self.security_protocol in ("SSL", "SASL_SSL")

    @property
    def sasl(self) -> bool:
        return self.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL")

    def problem(self) -> str | None:
        """What does not go together, by key; the values may be secret."""
        for key, field in type(self).model_fields.items():
            if key == "security_protocol" or getattr(self, key) == field.default:
                continue
            needed = "SSL" if key.startswith("ssl_") else "SASL_PLAINTEXT"
            if not (self.tls if needed == "SSL" else self.sasl):
                return (
                    f"{key} needs security_protocol = {needed} or SASL_SSL, got "
                    f"{self.security_protocol}"
                )
        for key in ("sasl_mechanism", "sasl_username"):
            if self.sasl and not getattr(self, key):
                return f"security_protocol = {self.security_protocol} needs {key}"
        if self.sasl_password is not None and self.sasl_password_file is not None:
            return "sasl_password and sasl_password_file: one of them is enough"
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            return "ssl_keyfile needs ssl_certfile"
        return None


class Kafka(Section):
    bootstrap_servers: str | None = None
    """host:port of an Apache Kafka; leave out to use the embedded broker."""
    partitions: int = Field(2, ge=1, le=1024)
    max_message_bytes: int = Field(64 << 20, ge=1 << 16, le=(1 << 31) - 1)
    security: KafkaSecurity = KafkaSecurity()


class Broker(Section):
    embedded: bool = True
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free port at the first start and keeps it for the run."""
    data_dir: str | None = None
    fsync: Literal["always", "never"] = "never"
    """`never` survives kill -9 of the broker; `always` survives power loss too."""
    tls_cert: str | None = None
    """PEM; with it the broker serves over TLS only."""
    tls_key: str | None = None
    """Of tls_cert; leave out if that file holds it too."""
    users: str | None = None
    """Who may connect, a file: `python -m connectors.broker users add NAME --file F` writes it."""
