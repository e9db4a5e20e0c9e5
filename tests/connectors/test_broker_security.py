"""TLS and SASL between the embedded broker and both clients, and what is said of disagreements."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka
import confluent_kafka.admin
import pytest
import trustme
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest
from kafka.protocol.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

from connectors.broker import users
from connectors.broker.errors import BrokerError, ErrorCode
from connectors.broker.security import secured
from connectors.config import ConfigError, KafkaSecurity, load, parse
from connectors.kafka.client import Cluster, KafkaFailure, Producer, Reader, read_all
from connectors.kafka.security import PASSWORD, settings
from connectors.kafka.topics import ensure_topics, partition_counts
from connectors.run_dir import RunDir
from deploy import run_folder
from deploy.doctor import examine
from tests.broker_process import BrokerProcess
from tests.connectors.broker_wire import Connection
from tests.deploy.command import config_text, model_folder
from tests.small_run import SmallRun

USER, SECRET, WRONG = "ann", "pencil and paper", "pen and ink"
DEADLINE_S = 30.0


class Certificates:
    """`ca` signed `server`, which is of this machine, and `stranger`, which is of another one."""

    def __init__(self, folder: Path) -> None:
        ca = trustme.CA()
        self.ca, self.server, self.stranger, self.other_ca = (
            str(folder / f"{name}.pem") for name in ("ca", "server", "stranger", "other-ca")
        )
        ca.cert_pem.write_to_path(self.ca)
        trustme.CA().cert_pem.write_to_path(self.other_ca)
        for name, file in (("127.0.0.1", self.server), ("elsewhere.example", self.stranger)):
            ca.issue_cert(name).private_key_and_cert_chain_pem.write_to_path(file)


class Brokers:
    """A broker of each kind, started when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder)
        self.users = folder / "users.json"
        users.add(self.users, USER, SECRET)
        self._folder, self._started = folder, dict[str, BrokerProcess]()

    def of(self, kind: str) -> BrokerProcess:
        """`plain`, `tls`, `sasl`, `tls+sasl` or `stranger`."""
        if kind not in self._started:
            arguments = []
            if "tls" in kind:
                arguments += ["--tls-cert", self.certificates.server]
            if kind == "stranger":
                arguments += ["--tls-cert", self.certificates.stranger]
            if "sasl" in kind:
                arguments += ["--users", str(self.users)]
            self._started[kind] = BrokerProcess(self._folder / kind, arguments=arguments)
        return self._started[kind]

    def cluster(self, kind: str, section: Mapping[str, Any]) -> Cluster:
        """For a client that would wait for ten minutes."""
        return Cluster(
            bootstrap_servers=self.of(kind).bootstrap,
            namespace="secured.",
            security=settings(KafkaSecurity(**section), Path),
            unavailable_s=600.0,
        )

    def stop(self) -> None:
        for process in self._started.values():
            process.stop()


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    made = Brokers(tmp_path_factory.mktemp("secured"))
    yield made
    made.stop()


def asking(brokers: Brokers, protocol: str, mechanism: str | None = None) -> dict[str, Any]:
    """`kafka.security` as it should be."""
    section: dict[str, Any] = {"security_protocol": protocol}
    if protocol.endswith("SSL"):
        section["ssl_cafile"] = brokers.certificates.ca
    if mechanism is not None:
        section |= {"sasl_mechanism": mechanism, "sasl_username": USER, "sasl_password": SECRET}
    return section


MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
WAYS = [
    ("tls", "SSL", None),
    *(("sasl", "SASL_PLAINTEXT", mechanism) for mechanism in MECHANISMS),
    *(("tls+sasl", "SASL_SSL", mechanism) for mechanism in MECHANISMS),
]


@pytest.mark.parametrize(("kind", "protocol", "mechanism"), WAYS)
def test_our_clients_write_and_read_over(
    brokers: Brokers, kind: str, protocol: str, mechanism: str | None
) -> None:
    cluster = brokers.cluster(kind, asking(brokers, protocol, mechanism))
    name = f"ours-{mechanism}"
    ensure_topics(cluster, {name: 1})
    producer = Producer(cluster)
    value = bytes(3 << 20)  # more than the broker has in memory for a client
    assert [producer.append(cluster.topic(name), 0, v) for v in (b"first", value)] == [0, 1]
    producer.close()
    assert [r.value for r in read_all(cluster, cluster.topic(name), [0])] == [b"first", value]


@pytest.mark.parametrize(("kind", "protocol", "mechanism"), WAYS)
def test_a_client_of_another_make_writes_and_reads_over(
    brokers: Brokers, kind: str, protocol: str, mechanism: str | None
) -> None:
    servers = {"bootstrap.servers": brokers.of(kind).bootstrap, "log_level": 0}
    servers |= {"security.protocol": protocol, "ssl.ca.location": brokers.certificates.ca}
    if mechanism is not None:
        servers |= {"sasl.mechanism": mechanism, "sasl.username": USER, "sasl.password": SECRET}
    topic = f"theirs-{mechanism}"
    admin = confluent_kafka.admin.AdminClient(servers)
    admin.create_topics([confluent_kafka.admin.NewTopic(topic, 1, 1)])[topic].result(DEADLINE_S)
    producer = confluent_kafka.Producer({**servers, "enable.idempotence": True})
    producer.produce(topic, b"x" * 100_000, partition=0)
    assert producer.flush(DEADLINE_S) == 0
    consumer = confluent_kafka.Consumer({**servers, "group.id": "-"})
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    message = consumer.poll(DEADLINE_S)
    assert message is not None
    assert message.value() == b"x" * 100_000
    consumer.close()


DISAGREEMENTS: list[tuple[str, str, str | None, dict[str, Any], str]] = [
    ("tls", "PLAINTEXT", None, {}, "speaks TLS, security_protocol is PLAINTEXT"),
    ("tls", "SASL_PLAINTEXT", "PLAIN", {}, "speaks TLS, security_protocol is SASL_PLAINTEXT"),
    ("plain", "SSL", None, {}, "does not speak TLS, security_protocol is SSL"),
    ("sasl", "SASL_SSL", "PLAIN", {}, "does not speak TLS, security_protocol is SASL_SSL"),
    ("sasl", "PLAINTEXT", None, {}, "wants SASL, security_protocol is PLAINTEXT: set SASL_PLAIN"),
    ("tls+sasl", "SSL", None, {}, "wants SASL, security_protocol is SSL: set SASL_SSL"),
    ("plain", "SASL_PLAINTEXT", "PLAIN", {}, "asks for no SASL"),
    ("tls", "SSL", None, {"ssl_cafile": "other"}, "ssl_cafile: the broker's certificate is not"),
    ("tls", "SSL", None, {"ssl_cafile": None}, "ssl_cafile: the broker's certificate is not"),
    ("stranger", "SSL", None, {}, "ssl_check_hostname: the broker's certificate is not trusted"),
    *(
        (kind, protocol, mechanism, {"sasl_password": WRONG}, "does not accept sasl_username ann")
        for kind, protocol, mechanism in WAYS
        if mechanism is not None
    ),
    ("sasl", "SASL_PLAINTEXT", "SCRAM-SHA-512", {"sasl_username": "bob"}, "sasl_username bob with"),
    ("sasl", "SASL_PLAINTEXT", "PLAIN", {"sasl_username": "bob"}, "sasl_username bob with"),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("kind", "protocol", "mechanism", "but", "said"), DISAGREEMENTS)
def test_what_a_broker_refuses_is_said_at_once_by_the_name_of_the_setting(
    brokers: Brokers,
    kind: str,
    protocol: str,
    mechanism: str | None,
    but: dict[str, Any],
    said: str,
) -> None:
    section = asking(brokers, protocol, mechanism) | but
    if section.get("ssl_cafile") == "other":
        section["ssl_cafile"] = brokers.certificates.other_ca
    cluster = brokers.cluster(kind, section)
    with pytest.raises(KafkaFailure) as raised:
        Producer(cluster)
    line = str(raised.value)
    assert line.startswith(f"{cluster.bootstrap_servers}: kafka.security: ")
    assert said in line
    assert len(line.splitlines()) == 1
    for secret in (SECRET, WRONG):
        assert secret not in line + repr(cluster) + brokers.of(kind).log_file.read_text()


def test_every_client_hears_of_a_refusal(brokers: Brokers) -> None:
    section = asking(brokers, "SASL_PLAINTEXT", "PLAIN") | {"sasl_password": WRONG}
    cluster = brokers.cluster("sasl", section)
    for client in (
        lambda: Reader(cluster, "t", {0: 0}),
        lambda: ensure_topics(cluster, {"t": 1}),
        lambda: partition_counts(cluster),
    ):
        with pytest.raises(KafkaFailure, match="does not accept sasl_username ann"):
            client()


def test_a_name_that_is_not_checked_need_not_match(brokers: Brokers) -> None:
    section = asking(brokers, "SSL") | {"ssl_check_hostname": False}
    ensure_topics(brokers.cluster("stranger", section), {"t": 1})


def choose(connection: Connection, mechanism: str) -> Any:
    return connection.ask(SaslHandshakeRequest(mechanism=mechanism), SaslHandshakeResponse, 1)


def test_before_authentication_nothing_but_the_versions_is_answered(brokers: Brokers) -> None:
    bootstrap = brokers.of("sasl").bootstrap
    with Connection(bootstrap) as connection:
        versions = connection.ask(ApiVersionsRequest(), ApiVersionsResponse, 0)
        assert versions.error_code == ErrorCode.NONE
        connection.send(MetadataRequest(topics=[]), 1)
        assert connection.hung_up()
    with Connection(bootstrap) as connection:
        connection.socket.sendall((1 << 20).to_bytes(4, "big"))
        assert connection.hung_up()  # a large request is not even read


def test_sasl_follows_its_order_and_mechanisms(brokers: Brokers) -> None:
    with Connection(brokers.of("sasl").bootstrap) as connection:
        early = SaslAuthenticateRequest(auth_bytes=b"\0ann\0x")
        answer = connection.ask(early, SaslAuthenticateResponse, 1)
        assert answer.error_code == ErrorCode.ILLEGAL_SASL_STATE
        unknown = connection.ask(SaslHandshakeRequest(mechanism="GSSAPI"), SaslHandshakeResponse, 1)
        assert unknown.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
        assert unknown.mechanisms == list(MECHANISMS)
        assert choose(connection, "PLAIN").error_code == ErrorCode.NONE
        token = SaslAuthenticateRequest(auth_bytes=f"\0{USER}\0{SECRET}".encode())
        assert connection.ask(token, SaslAuthenticateResponse, 1).error_code == ErrorCode.NONE
        assert choose(connection, "PLAIN").error_code == ErrorCode.ILLEGAL_SASL_STATE


BAD_TOKENS = [
    ("PLAIN", b"\0ann\0wrong"),
    ("PLAIN", b"bob\0ann\0pencil and paper"),  # acts for another user
    ("PLAIN", b"\0ann"),
    ("PLAIN", b"\xff\xfe"),
    ("PLAIN", b"\0ann\0\0"),
    ("PLAIN", "\0ann\0\u2028\u0378".encode()),
    ("PLAIN", b"\0no\nbody\0pencil and paper"),
    ("SCRAM-SHA-256", b"n,,n=nobody,r=abc"),
    ("SCRAM-SHA-256", b"p=tls-unique,,n=ann,r=abc"),
    ("SCRAM-SHA-512", b"nonsense"),
    ("SCRAM-SHA-512", b""),
]


def test_a_failed_authentication_ends_the_connection_with_one_line_in_the_log(
    brokers: Brokers,
) -> None:
    broker = brokers.of("sasl")
    before = broker.log_file.read_text()
    connections = [(Connection(broker.bootstrap), *bad) for bad in BAD_TOKENS]
    for connection, mechanism, token in connections:
        assert choose(connection, mechanism).error_code == ErrorCode.NONE
        connection.send(SaslAuthenticateRequest(auth_bytes=token), 1)
    for connection, _, _ in connections:
        with connection:
            answer = connection.receive(SaslAuthenticateResponse, 1)
            assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
            assert connection.hung_up()
    said = broker.log_file.read_text().removeprefix(before)
    assert len(said.splitlines()) == len(BAD_TOKENS)
    for line, (mechanism, _) in zip(said.splitlines(), BAD_TOKENS, strict=True):
        assert f"not authenticated ({mechanism})" in line
    assert "pencil" not in said


def users_command(*arguments: str, password: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "connectors.broker", "users", *arguments]
    return subprocess.run(
        command, input=password + "\n", capture_output=True, text=True, timeout=60, check=False
    )


def test_the_users_command_keeps_keys_and_a_change_counts_at_once(
    brokers: Brokers, tmp_path: Path
) -> None:
    file = tmp_path / "users.json"
    assert users_command("add", "bob", "--file", str(file), password="one").returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    known = users.Users(file)
    assert known.has("bob", "one")
    users.add(file, "bob", "another")
    assert [known.has("bob", password) for password in ("one", "another")] == [False, True]
    assert set(json.loads(file.read_text())["bob"]) == set(MECHANISMS[1:])
    assert "another" not in file.read_text()
    users.remove(file, "bob")
    assert not known.has("bob", "another")
    refused = users_command("add", "b,ob", "--file", str(file), password="one")
    assert refused.returncode == 3
    assert refused.stderr == "broker: 'b,ob' is no user name: letters, digits and . _ @ -, at " \
        "most 100 of them\n"  # fmt: skip
    for password in ("", "käse", "tab\t"):
        with pytest.raises(BrokerError, match="printable ASCII"):
            users.add(file, "bob", password)


def test_files_that_are_not_what_they_should_be_are_named(brokers: Brokers, tmp_path: Path) -> None:
    ca, server = brokers.certificates.ca, brokers.certificates.server
    open_file, broken = tmp_path / "open.json", tmp_path / "broken.json"
    open_file.write_bytes(brokers.users.read_bytes())
    open_file.chmod(0o644)
    broken.write_text("{")
    for arguments, said in [
        ((None, None, tmp_path / "none.json"), "none.json: cannot be read .*users add NAME"),
        ((None, None, open_file), "others may read it: chmod 600"),
        ((None, None, broken), "broken.json: is no file of users"),
        ((tmp_path / "none.pem", None, None), "none.pem .*No such file"),
        ((ca, None, None), "the certificate .*ca.pem with the key"),
        ((server, ca, None), "with the key .*ca.pem"),
    ]:
        with pytest.raises(BrokerError, match=said):
            secured(*arguments)


MODEL = {"model": {"path": "m"}, "tasks": {"t": {"reward": "exact_match"}}}


@pytest.mark.parametrize(
    ("kafka", "broker", "said"),
    [
        ({"sasl_mecanism": "PLAIN"}, {}, "unknown key kafka.security.sasl_mecanism, did you mean"),
        ({"security_protocol": "TLS"}, {}, "kafka.security.security_protocol: input should be"),
        ({"sasl_password": 12345}, {}, r"kafka.security.sasl_password: .* string$"),
        ({"ssl_cafile": "ca.pem"}, {}, "ssl_cafile needs security_protocol = SSL or SASL_SSL"),
        ({"sasl_username": "ann"}, {}, "sasl_username needs security_protocol = SASL_PLAIN"),
        ({"security_protocol": "SASL_SSL"}, {}, "SASL_SSL needs sasl_mechanism"),
        ({"security_protocol": "SSL", "ssl_keyfile": "k"}, {}, "ssl_keyfile needs ssl_certfile"),
        (
            {},
            {"users": "u"},
            "PLAINTEXT does not go with the embedded broker, which has a broker.u",
        ),
        ({"security_protocol": "SSL"}, {}, "the embedded broker, which has no broker.tls_cert"),
        ({}, {"tls_key": "k"}, "broker.tls_key needs broker.tls_cert"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    kafka: dict[str, Any], broker: dict[str, Any], said: str
) -> None:
    table = {**MODEL, "kafka": {"security": kafka}, "broker": broker}
    with pytest.raises(ConfigError, match=said) as raised:
        parse(table, base_dir="/")
    assert "12345" not in str(raised.value)


def test_the_password_comes_from_the_file_or_the_environment(
    brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"security_protocol": "SASL_SSL", "sasl_mechanism": "PLAIN", "sasl_username": USER}
    monkeypatch.delenv(PASSWORD, raising=False)
    with pytest.raises(ConfigError, match=f"no password: neither .*, and {PASSWORD} is empty"):
        settings(KafkaSecurity(**asked), Path)
    monkeypatch.setenv(PASSWORD, "of the environment")
    assert settings(KafkaSecurity(**asked), Path)["sasl_plain_password"] == "of the environment"
    file = tmp_path / "password"
    section = KafkaSecurity(**asked, sasl_password_file="password")
    with pytest.raises(ConfigError, match=r"sasl_password_file: .*/password: No such file"):
        settings(section, lambda name: tmp_path / name)
    file.write_text("of the file\n")
    made = settings(section, lambda name: tmp_path / name)
    assert made["sasl_plain_password"] == "of the file"
    for key in ("ssl_cafile", "ssl_certfile"):
        with pytest.raises(ConfigError, match=f"kafka.security.{key}: .*/password"):
            settings(KafkaSecurity(**asked, **{key: "password"}), lambda name: tmp_path / name)


def toml(section: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in section.items())


def test_doctor_says_whether_the_broker_serves_these_settings(
    brokers: Brokers, tmp_path: Path
) -> None:
    file, model = tmp_path / "c.toml", model_folder(tmp_path / "m")
    kafka = f'bootstrap_servers = "{brokers.of("tls+sasl").bootstrap}"'
    for but, ok, said in [
        ({}, True, "answers"),
        ({"sasl_password": WRONG}, False, "does not accept sasl_username ann"),
    ]:
        section = asking(brokers, "SASL_SSL", "SCRAM-SHA-256") | but
        file.write_text(config_text(model, kafka=kafka, **{"kafka.security": toml(section)}))
        checks = {check.name: check for check in examine(str(file))}
        assert checks["security"].ok
        assert checks["broker"].ok is ok
        assert said in checks["broker"].fix
        assert WRONG not in checks["broker"].fix
    section = asking(brokers, "SASL_PLAINTEXT", "SCRAM-SHA-256") | {"sasl_password": WRONG}
    own = {"broker": f'users = "{brokers.users}"', "kafka.security": toml(section)}
    file.write_text(config_text(model, **own))
    (wrong,) = [check for check in examine(str(file)) if check.name == "security"]
    assert (wrong.ok, "has no user ann with this password" in wrong.fix) == (False, True)


def test_a_password_in_the_configuration_is_kept_from_others(
    brokers: Brokers, tmp_path: Path
) -> None:
    file, run_dir = tmp_path / "c.toml", RunDir(tmp_path / "run")
    for password in ("of-old", "anew"):
        section = asking(brokers, "SASL_PLAINTEXT", "PLAIN") | {"sasl_password": password}
        own = {"broker": f'users = "{brokers.users}"', "kafka.security": toml(section)}
        file.write_text(config_text(model_folder(tmp_path / "m"), **own))
        prepared = run_folder.prepare(load(file), run_dir)
        assert run_dir.config_file.stat().st_mode & 0o777 == 0o600
        assert password not in repr(prepared.config)
    assert prepared.changes == ("kafka.security.sasl_password: changed",)


def test_a_run_reaches_its_own_secured_broker(
    brokers: Brokers, tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD, SECRET)
    section = asking(brokers, "SASL_SSL", "SCRAM-SHA-512")
    del section["sasl_password"]
    asked = {f"kafka.security.{key}": value for key, value in section.items()}
    served = {"broker.tls_cert": brokers.certificates.server, "broker.users": str(brokers.users)}
    run = SmallRun(tmp_path, tiny_model_path, settings={**asked, **served})
    run.run_to_end("--stop-after-steps", 1)
    assert run.ask("audit")["ok"]
    assert SECRET not in run.run_dir.config_file.read_text()
