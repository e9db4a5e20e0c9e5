"""The whole job against a real broker: every granted prompt ends exactly once, also when killed."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from connectors.arrow import checksum, decode_group
from connectors.kafka.client import Cluster, Producer, Reader, Record, read_all
from connectors.kafka.topics import delete_records, ensure_topics
from connectors.records import (
    HEADER_CRC,
    HEADER_KIND,
    HEADER_WRITER,
    Announcement,
    Begin,
    Cancel,
    Closed,
    Version,
    decode_as,
    encode,
    parse_group_id,
)
from connectors.run_dir import RunDir
from pipelines.job import run_dataflow
from pipelines.recovery_folder import RecoveryLocked, RecoveryLost
from tests.broker_process import BrokerProcess
from tests.operators.engine_fake import FakeEngine, tokenizer
from tests.pipelines.dataflow_process import DataflowProcess, answer

PARTITIONS = 2
Ordered = tuple[int, int, Literal["requeue", "close"], str]
"""A cancel: partition, offset, what to do and why."""
USER_CODE = """
async def agent(prompt, llm, tools):
    if prompt.reward == "agent raises":
        raise RuntimeError("no")
    await llm.chat(prompt.messages)

def score(sample, prompt):
    if prompt.reward == "raises":
        raise RuntimeError("no")
    if prompt.reward == "nan":
        return float("nan")
    return {"reward": 1.0, "length": len(sample.text)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer(folder)
    return folder


@pytest.fixture
def run(tmp_path: Path, cluster: Cluster, model: Path) -> RunDir:
    """A run's folder with a configuration, and its topics."""
    (tmp_path / "code.py").write_text(USER_CODE)
    (tmp_path / "config.toml").write_text(f"""
[run]
namespace = "{cluster.namespace}"
[kafka]
bootstrap_servers = "{cluster.bootstrap_servers}"
partitions = {PARTITIONS}
max_message_bytes = 65536
[model]
path = "{model}"
context_tokens = 60
[sampling]
max_tokens = 8
[tasks.t]
agent = "code.py:agent"
reward = "code.py:score"
group_size = 2
reward_retries = 0
""")
    topics = ("prompts", "rollouts", "trajectories", "dead-letters", "evaluations")
    ensure_topics(cluster, dict.fromkeys(topics, PARTITIONS) | {"policy": 1, "steps": 1})
    return RunDir(tmp_path)


def asked(reward: str = "", **changes: Any) -> bytes:
    message = {"role": "user", "content": "a"}
    return msgspec.json.encode({"task": "t", "messages": [message], "reward": reward} | changes)


def kinds_of_prompts(count: int) -> list[tuple[bytes, str]]:
    """Prompts and the reasons they close with; "" = scored."""
    kinds = [
        (asked(), ""),
        (asked("raises"), "reward_failed"),
        (b"{no json", "malformed"),
        (asked(), ""),
        (asked(task="other"), "unknown_task"),
        (asked("nan"), "reward_nan"),
        (asked(messages=[{"role": "user", "content": "long " * 20}]), "too_long"),
        (asked(), ""),
        (asked("agent raises"), "agent_failed"),
        (asked(metadata={"padding": "x" * 60_000}), "too_large"),
    ]
    return [kinds[i % len(kinds)] for i in range(count)]


def produce(cluster: Cluster, prompts: list[bytes]) -> None:
    producer = Producer(cluster)
    for i, prompt in enumerate(prompts):
        producer.send(cluster.topic("prompts"), i % PARTITIONS, prompt)
    producer.flush()
    producer.close()


def grant(
    cluster: Cluster,
    *limits: int,
    number: int = 0,
    drop_before: int | None = None,
    cancels: Sequence[Ordered] = (),
) -> None:
    producer = Producer(cluster)
    begin = Begin(epoch=0, writer="test", resumed_step=0, started_at=0.0)
    announcement = Announcement(
        epoch=0,
        version=Version(0, number),
        digest="0" * 16,
        limits=limits,
        drop_before=None if drop_before is None else Version(0, drop_before),
        cancels=tuple(
            Cancel(f"{cluster.topic('prompts')}/{partition}/{offset}", then, reason)
            for partition, offset, then, reason in cancels
        ),
    )
    for record in (begin, announcement):
        producer.append(cluster.topic("policy"), 0, encode(record))
    producer.close()


def count(cluster: Cluster, topic: str = "trajectories") -> int:
    reader = Reader(cluster, cluster.topic(topic), dict.fromkeys(range(PARTITIONS), 0))
    try:
        return sum(reader.ends().values())
    finally:
        reader.close()


def wait_for(
    condition: Callable[[], bool], job: DataflowProcess | None = None, deadline_s: float = 120.0
) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        if job is not None:
            assert job.process.poll() is None, f"the job ended: {job.log()}"
        assert time.monotonic() < deadline, job.log() if job is not None else "too slow"
        time.sleep(0.05)


def written(cluster: Cluster, topic: str) -> list[Record]:
    return read_all(cluster, cluster.topic(topic), range(PARTITIONS))


def ends(cluster: Cluster, topic: str = "trajectories") -> dict[tuple[int, int], list[str]]:
    """Every prompt's terminals by (partition, offset): reason, "" for a scored group."""
    found = collections.defaultdict(list)
    for record in written(cluster, topic):
        assert record.key is not None
        origin = parse_group_id(record.key.decode())
        assert origin.topic == cluster.topic("prompts")
        assert origin.partition == record.partition
        crc = int(record.headers[HEADER_CRC], 16)
        if record.headers[HEADER_KIND] == "group":
            group = decode_group(record.value, crc)
            assert group.group_id == record.key.decode()
            assert [t.reward for t in group.trajectories] == [1.0, 1.0]
            assert group.trajectories[0].reward_parts == {"length": 2.0}
            found[origin.partition, origin.offset].append("")
        else:
            end: Closed = decode_as(record.value, Closed)
            found[origin.partition, origin.offset].append(end.reason)
    return dict(found)


def expected(prompts: list[tuple[bytes, str]]) -> dict[tuple[int, int], list[str]]:
    return {(i % PARTITIONS, i // PARTITIONS): [end] for i, (_, end) in enumerate(prompts)}


def test_every_granted_prompt_ends_once_though_the_job_is_killed_and_stopped(
    cluster: Cluster, run: RunDir
) -> None:
    prompts = kinds_of_prompts(40)
    produce(cluster, [value for value, _ in prompts])
    grant(cluster, 7, 7)
    job = DataflowProcess(run.path)
    try:
        for limit, killed in ((12, True), (17, False), (19, True)):
            before = count(cluster)
            wait_for(lambda before=before: count(cluster) >= before + 4, job)  # type: ignore[misc]
            if killed:
                job.kill9()
            else:
                assert job.stop() == 0, job.log()
            grant(cluster, limit, limit)
            job = DataflowProcess(run.path)
        wait_for(lambda: count(cluster) >= 38, job)
        grant(cluster, 20, 20)
        wait_for(lambda: count(cluster) >= 40, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    assert ends(cluster) == expected(prompts)
    in_rollouts = collections.Counter(record.key for record in written(cluster, "rollouts"))
    assert set(in_rollouts.values()) == {1}
    assert len(in_rollouts) == 40
    letters = written(cluster, "dead-letters")
    assert collections.Counter(letter.headers["code"] for letter in letters) == {
        "not_json": 4, "unknown_task": 4, "too_long": 4,
    }  # fmt: skip
    for letter in letters:
        origin = parse_group_id(letter.headers["origin"])
        assert letter.value == prompts[origin.offset * PARTITIONS + origin.partition][0]


def test_what_is_not_granted_is_not_touched_and_a_stopped_job_goes_on(
    cluster: Cluster, run: RunDir
) -> None:
    prompts = [(asked(), "")] * 12
    produce(cluster, [value for value, _ in prompts])
    grant(cluster, 1, 4, number=3)
    job = DataflowProcess(run.path)
    try:
        wait_for(lambda: count(cluster) >= 5, job)
        assert job.stop() == 0, job.log()
        assert sorted(ends(cluster)) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
        grant(cluster, 6, 6, number=4)
        job = DataflowProcess(run.path)
        wait_for(lambda: count(cluster) >= 12, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    assert ends(cluster) == expected(prompts)


def test_groups_below_the_announced_version_close_as_stale(cluster: Cluster, run: RunDir) -> None:
    produce(cluster, [asked(), asked("raises")])
    grant(cluster, 1, 1, drop_before=1)  # the fake engine writes version 0
    job = DataflowProcess(run.path)
    try:
        wait_for(lambda: count(cluster) >= 2, job)
    finally:
        job.stop()
    assert ends(cluster) == {(0, 0): ["stale"], (1, 0): ["stale"]}


def test_cancelled_groups_close_or_start_again_once_though_the_job_is_killed(
    cluster: Cluster, run: RunDir
) -> None:
    """The engine answers nothing of version 0.0: a group ends by its cancel alone. Two cancels are
    announced while the job is away, and those before once more."""
    produce(cluster, [asked()] * 6)
    grant(cluster, 2, 2)
    first: list[Ordered] = [(0, 0, "close", "stale"), (1, 0, "requeue", "stale")]
    away: list[Ordered] = [(0, 1, "requeue", "stale"), (1, 1, "close", "overload")]
    job = DataflowProcess(run.path, "hanging")
    try:
        wait_for(lambda: any(r.name == "dataflow" for r in run.roles()), job)
        grant(cluster, 2, 2, number=1, cancels=first)
        wait_for(lambda: count(cluster) >= 2, job)
        assert ends(cluster) == {(0, 0): ["stale"], (1, 0): [""]}
        job.kill9()
        grant(cluster, 3, 2, number=2, cancels=[*first, *away])
        job = DataflowProcess(run.path, "hanging")
        wait_for(lambda: count(cluster) >= 5, job)
        grant(cluster, 3, 3, number=3, cancels=[*first, *away])
        wait_for(lambda: count(cluster) >= 6, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    assert ends(cluster) == {
        (0, 0): ["stale"], (1, 0): [""], (0, 1): [""], (1, 1): ["cancelled"], (0, 2): [""],
        (1, 2): [""],
    }  # fmt: skip
    groups = [
        decode_group(record.value)
        for record in written(cluster, "rollouts")
        if record.headers[HEADER_KIND] == "group"
    ]
    versions = {group.group_id.rpartition(".")[2]: str(group.oldest) for group in groups}
    assert versions == {
        "prompts/1/0": "0.1", "prompts/0/1": "0.2", "prompts/0/2": "0.2", "prompts/1/2": "0.3",
    }  # fmt: skip


def test_unreadable_rollouts_are_dead_letters_and_second_terminals_are_ignored(
    cluster: Cluster, run: RunDir
) -> None:
    producer = Producer(cluster)
    topic, prompts = cluster.topic("rollouts"), cluster.topic("prompts")
    end = encode(Closed(group_id=f"{prompts}/0/0", reason="time_cap"))
    crc = {HEADER_KIND: "group", HEADER_CRC: "00000000", HEADER_WRITER: "rollout"}
    closed = crc | {HEADER_KIND: "closed", HEADER_CRC: f"{checksum(end):08x}"}
    for key, value, headers in [
        (f"{prompts}/0/0", end, closed),
        (f"{prompts}/0/0", end, closed),
        (f"{prompts}/0/1", b"not arrow", crc),
        (f"{prompts}/0/2", b"not json", closed),
        (f"{prompts}/0/3", b"?", {HEADER_KIND: "new"}),
        ("no coordinates", b"?", crc),
    ]:
        producer.send(topic, 0, value, key=key.encode(), headers=headers)
    producer.flush()
    begin_anew(run)  # a folder without snapshots beside a filled topic would be an error
    job = DataflowProcess(run.path)
    try:
        wait_for(lambda: count(cluster) >= 4 and count(cluster, "dead-letters") >= 4, job)
        assert job.stop() == 0
    finally:
        job.stop()
    assert ends(cluster) == {
        (0, 0): ["time_cap"], (0, 1): ["malformed"], (0, 2): ["malformed"], (0, 3): ["malformed"],
    }  # fmt: skip
    codes = collections.Counter(r.headers["code"] for r in written(cluster, "dead-letters"))
    assert codes == {"corrupt_record": 3, "unknown_record": 1}


# ---------------------------------------------------------------------------------- recovery folder
def begin_anew(run: RunDir) -> None:
    run.recovery("dataflow").mkdir(parents=True, exist_ok=True)
    (run.recovery("dataflow") / "restart").touch()


def start(run: RunDir) -> None:
    """Starts in this process; for starts that fail."""
    from connectors.config import load

    config = load(run.config_file)
    run_dataflow(config, run, {"rollout", "reward"}, engine=FakeEngine(answer))


def test_two_jobs_on_one_recovery_folder_is_one_clear_line(cluster: Cluster, run: RunDir) -> None:
    grant(cluster, 0, 0)
    job = DataflowProcess(run.path)
    try:
        wait_for(lambda: any(r.name == "dataflow" for r in run.roles()), job)
        with pytest.raises(RecoveryLocked, match=f"process {job.process.pid} runs this dataflow"):
            start(run)
    finally:
        job.stop()


@pytest.fixture
def finished(cluster: Cluster, run: RunDir) -> RunDir:
    produce(cluster, [asked(), asked()])
    grant(cluster, 1, 1)
    job = DataflowProcess(run.path)
    try:
        wait_for(lambda: count(cluster) >= 2, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    return run


def test_a_lost_recovery_folder_is_said_and_can_be_done_without(
    finished: RunDir, cluster: Cluster
) -> None:
    folder = finished.recovery("dataflow")
    steps = (folder / "steps.json").read_bytes()
    (folder / "steps.json").write_bytes(steps.replace(b"headwater.roll", b"headwater.old"))
    with pytest.raises(RecoveryLost, match="other steps"):
        start(finished)
    (folder / "steps.json").write_bytes(steps)
    (database,) = folder.glob("part-*.sqlite3")
    whole = database.read_bytes()
    database.write_bytes(b"no database" * 400)
    with pytest.raises(RecoveryLost, match="is damaged"):
        start(finished)
    database.write_bytes(whole)
    for file in folder.glob("part-*"):
        file.unlink()
    with pytest.raises(RecoveryLost, match="lost its database"):
        start(finished)
    (folder / "steps.json").unlink()
    with pytest.raises(RecoveryLost, match=r"is empty, but .*rollouts holds"):
        start(finished)
    begin_anew(finished)
    produce(cluster, [asked(), asked()])
    grant(cluster, 2, 2)
    job = DataflowProcess(finished.path)
    try:
        wait_for(lambda: count(cluster) >= 4, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    assert ends(cluster) == {(p, o): [""] for p in range(2) for o in range(2)}


def test_a_recovery_folder_is_of_one_log_one_namespace_and_one_number_of_partitions(
    finished: RunDir, cluster: Cluster, own_broker: BrokerProcess
) -> None:
    whole = finished.config_file.read_text()
    other = whole.replace(cluster.bootstrap_servers, own_broker.bootstrap)
    finished.config_file.write_text(other)  # the namespace's name on another broker
    with pytest.raises(RecoveryLost, match=r"is of another run.*bring back the log"):
        start(finished)
    finished.config_file.write_text(whole.replace(cluster.namespace, f"{cluster.namespace}x."))
    with pytest.raises(RecoveryLost, match=rf"of the namespace {cluster.namespace} on the cluster"):
        start(finished)
    finished.config_file.write_text(whole)
    file = finished.recovery("dataflow") / "steps.json"
    belongs = msgspec.json.decode(file.read_bytes())
    file.write_bytes(msgspec.json.encode(belongs | {"partitions": 3}))
    with pytest.raises(RecoveryLost, match=r"is of 3 partitions, the run has 2 now.*set kafka\."):
        start(finished)
    file.write_bytes(b"[]")
    with pytest.raises(RecoveryLost, match="cannot be read"):
        start(finished)
    file.unlink()
    with pytest.raises(RecoveryLost, match=r"has lost its steps.json, but .*rollouts holds"):
        start(finished)


def test_what_retention_removed_under_a_resumed_source_is_said_and_closed_when_begun_anew(
    finished: RunDir, cluster: Cluster
) -> None:
    """Offset 1 of partition 0 is granted while the job is away, and its prompt removed."""
    produce(cluster, [asked()] * 4)
    grant(cluster, 3, 1)
    delete_records(cluster, {"prompts": {0: 2}})
    with pytest.raises(
        RecoveryLost, match=r"prompts/0: cannot go on at offset 1, the log holds 2 to 3.*restart"
    ):
        start(finished)
    begin_anew(finished)
    job = DataflowProcess(finished.path)
    try:
        wait_for(lambda: count(cluster) >= 4, job)
        assert job.stop() == 0, job.log()
    finally:
        job.stop()
    assert ends(cluster) == {(0, 0): [""], (1, 0): [""], (0, 1): ["no_record"], (0, 2): [""]}


def test_a_policy_that_is_gone_ends_the_process_by_name(cluster: Cluster, run: RunDir) -> None:
    producer = Producer(cluster)
    producer.append(cluster.topic("policy"), 0, b"{}")
    producer.close()
    delete_records(cluster, {"policy": {0: 1}})
    produce(cluster, [asked()])
    job = DataflowProcess(run.path)
    try:
        assert job.process.wait(60) not in (0, None)
        assert f"{cluster.topic('policy')}/0/0 is not in the log" in job.log()
    finally:
        job.stop()
