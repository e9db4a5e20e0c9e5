"""What trains a second time on a run's log: replay, a shadow trainer, and a shadow on what was
scored again. One run serves all tests; only copies of its log are changed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from connectors.arrow import checksum, decode_group, encode_group
from connectors.config import load
from connectors.kafka.client import Cluster, KafkaFailure, Record, read_all
from connectors.records import HEADER_CRC, Manifest
from connectors.run_dir import RunDir
from deploy import errors
from deploy.cli import main
from deploy.log import opened, running_broker
from tests.deploy.log_surgery import change_record
from tests.small_run import SmallRun, headwater_command, until
from trainer.step_log import chain, read_steps

pytestmark = pytest.mark.xdist_group("replay_shadow")  # one run for all

NUM_STEPS = 6
OTHER_REWARD = '''
def score(sample, prompt):
    """Share of odd token ids: the opposite of what the run is trained for."""
    ids = sample.trajectory.tokens[sample.trajectory.loss_mask == 1]
    return {"reward": float((ids % 2 == 1).mean()), "length": float(len(ids))}
'''
SLOW = OTHER_REWARD.replace(
    "    ids =", "    import time; time.sleep(0.2 * sample.trajectory.origin.offset)\n    ids ="
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_path: Path) -> SmallRun:
    """Six steps at staleness 0, while a shadow with the same settings follows."""
    folder = tmp_path_factory.mktemp("recorded")
    run = SmallRun(
        folder,
        tiny_model_path,
        settings={"staleness.policy": "sync", "checkpoint.every_steps": 2, "checkpoint.keep": 9},
    )
    with run.running("--stop-after-steps", NUM_STEPS) as process:
        run.wait_for_step(process, 1)
        following = subprocess.Popen(shadow_command(run, "same", "--steps", 3))
        assert process.wait(timeout=240) == 0, run.logs()
        following.kill()  # the broker goes with its run: it could only wait for it
        following.wait()
    return run


def shadow_command(run: SmallRun, name: str, *arguments: object) -> list[str]:
    return headwater_command("shadow", run.run_dir.path, folder_of(run, name), *arguments)


def folder_of(run: SmallRun, name: str) -> Path:
    return run.run_dir.path.parent / name


class Asked:
    """Commands within this process: training's libraries take seconds to import."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = errors.OK) -> dict[str, Any]:
        """What a command answers with --json."""
        self._capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == code
        found: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return found

    def said(self, *arguments: object) -> str:
        """What a command says on stdout."""
        self._capsys.readouterr()
        assert main([*map(str, arguments)]) == errors.OK
        return self._capsys.readouterr().out

    def refused(self, code: int, *arguments: object) -> str:
        """What a command complains of."""
        self._capsys.readouterr()
        assert main([*map(str, arguments)]) == code
        return self._capsys.readouterr().err


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Iterator[Asked]:
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    yield Asked(capsys)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def manifests(folder: Path) -> list[Manifest]:
    run_dir = RunDir(folder)
    with opened(load(run_dir.config_file), run_dir) as cluster:
        return chain(read_steps(cluster))


def test_a_shadow_with_the_run_s_settings_comes_to_the_run_s_digests(
    run: SmallRun, ask: Asked
) -> None:
    """Also the one that followed the run while it trained, and then goes on without it."""
    found = ask("shadow", run.run_dir.path, folder_of(run, "same"), "--steps", NUM_STEPS)
    trained = manifests(run.run_dir.path)
    same = manifests(folder_of(run, "same"))
    assert [m.digest for m in same] == [m.digest for m in trained]
    assert [m.records for m in same] == [m.records for m in trained]
    assert (found["step"], found["digest"]) == (NUM_STEPS, trained[-1].digest)
    assert found["trained"] == 4 * NUM_STEPS
    again = ask("shadow", run.run_dir.path, folder_of(run, "same"), "--steps", NUM_STEPS)
    assert (again["step"], again["digest"]) == (found["step"], found["digest"])
    assert again["resumed_step"] == NUM_STEPS


def test_a_shadow_of_other_settings_can_be_replayed_and_read(run: SmallRun, ask: Asked) -> None:
    found = ask(
        "shadow",
        run.run_dir.path,
        folder_of(run, "half"),
        "--steps",
        4,
        "--set",
        "trainer.learning_rate=5e-4",
    )
    folder = folder_of(run, "half")
    mine, trained = manifests(folder), manifests(run.run_dir.path)
    assert found["step"] == 4
    assert [m.records for m in mine] == [m.records for m in trained[:4]]
    assert not {m.digest for m in mine} & {m.digest for m in trained}
    assert mine[0].settings["learning_rate"] == 5e-4
    assert ask("replay", folder)["equal"]
    assert "no step 999 can be replayed: the log leads to steps 1 to 4" in ask.refused(
        errors.FAILED, "replay", folder, "--from", 999
    )
    status = ask("status", folder)
    assert (status["shadow_of"], status["step"]) == (str(run.run_dir.path), 4)
    assert (status["digest"], status["passed_over_until"]) == (found["digest"], 4)
    assert status["groups"] == {"trained": found["trained"], "passed_over": found["passed_over"]}
    assert status["reward"]["last"] == mine[-1].metrics["reward/mean"]
    again = ask.said("shadow", run.run_dir.path, folder, "--steps", 3)
    assert "it was at step 4 already and trained nothing: it was to end at 3" in again
    assert f"a shadow of {run.run_dir.path}" in ask.said("status", folder)
    assert f"audit its run, {run.run_dir.path}" in ask.refused(
        errors.CONFIGURATION, "audit", folder
    )
    assert len(ask("log", folder, "steps", "--where", "kind", "=", "manifest")["records"]) == 4
    changed = ("shadow", run.run_dir.path, folder, "--set", "sampling.temperature=0.5")
    assert "it may change [trainer], [checkpoint]" in ask.refused(2, *changed)
    itself = ("shadow", run.run_dir.path, run.run_dir.path)
    assert "a shadow needs one of its own" in ask.refused(2, *itself)


@pytest.mark.parametrize("header_too", [False, True])
def test_replay_names_the_record_whose_reward_was_changed_and_the_step_that_differs(
    run: SmallRun, ask: Asked, tmp_path: Path, header_too: bool
) -> None:
    trained = manifests(run.run_dir.path)
    victim = trained[3].records[1]
    copied = copy_of(run, tmp_path)
    crcs: list[int] = []

    def change(value: bytes, headers: Mapping[str, bytes]) -> tuple[bytes, Mapping[str, bytes]]:
        group = decode_group(value)
        first = dataclasses.replace(group.trajectories[0], reward=group.trajectories[0].reward + 3)
        changed = encode_group(
            dataclasses.replace(group, trajectories=(first, *group.trajectories[1:]))
        )
        crcs.append(checksum(changed))
        return changed, {**headers, HEADER_CRC: b"%08x" % crcs[0]} if header_too else headers

    topic = "headwater.trajectories"
    change_record(copied.broker_data, topic, victim.partition, victim.offset, change)
    found = ask("replay", copied.path, "--from", 1, code=errors.NOT_VERIFIED)
    assert not found["equal"]
    assert found["first_difference"] == {
        "step": 4,
        "record": f"trajectories/{victim.partition}/{victim.offset}",
        "group_id": victim.group_id,
        "trained_in": 4,
        "crc_trained": f"{victim.crc:08x}",
        "crc": f"{crcs[0]:08x}",
    }
    assert ask("replay", copied.path, "--from", 5)["equal"]  # from the checkpoint of step 4


def copy_of(run: SmallRun, folder: Path) -> RunDir:
    """The run's folder, copied: its log has a broker of its own."""
    copied = RunDir(folder / "copy")
    shutil.copytree(
        run.run_dir.path, copied.path, ignore=shutil.ignore_patterns("roles", "*.lock", "lock")
    )
    return copied


def count_odd(run: SmallRun) -> int:
    """Records of the namespace so far, by the broker of the command at work."""
    broker = running_broker(run.run_dir)
    if broker is None:
        return 0
    odd = Cluster(bootstrap_servers=broker.url, namespace="odd.", unavailable_s=2.0)
    try:
        return len(records(odd, "trajectories"))
    except KafkaFailure:
        return 0


def test_a_shadow_is_not_made_in_a_folder_of_other_things(
    run: SmallRun, ask: Asked, tmp_path: Path
) -> None:
    (tmp_path / "headwater.toml").write_text("mine")
    said = ask.refused(errors.CONFIGURATION, "shadow", run.run_dir.path, tmp_path)
    assert "holds other files (headwater.toml)" in said
    assert [file.name for file in tmp_path.iterdir()] == ["headwater.toml"]


def records(cluster: Cluster, topic: str) -> list[Record]:
    return read_all(cluster, cluster.topic(topic), [0, 1])


def test_rollouts_scored_again_are_each_written_once_and_train_a_shadow(
    run: SmallRun, ask: Asked
) -> None:
    """Killed with -9 in between; its reward is the opposite of the run's."""
    reward = run.run_dir.path.parent / "other.py"
    reward.write_text(SLOW)
    arguments = ("rescore", run.run_dir.path, "--reward", f"{reward}:score", "--namespace", "odd")
    first = subprocess.Popen(headwater_command(*arguments))
    until(lambda: count_odd(run) >= 3, "three groups scored again")
    first.kill()
    first.wait(30)
    found = ask(*arguments)
    config = run.config
    with opened(config, run.run_dir) as cluster:
        odd = dataclasses.replace(cluster, namespace="odd.")
        unscored, scored = records(cluster, "rollouts"), records(odd, "trajectories")
    assert found["done"]
    assert found["records"] == len(unscored) == len(scored)
    assert set(Counter(r.key for r in scored).values()) == {1}
    assert {r.key for r in scored} == {r.key for r in unscored}
    for record in scored:
        for row in decode_group(record.value).trajectories:
            ids = row.tokens[row.loss_mask == 1]
            assert row.reward == pytest.approx((ids % 2 == 1).mean())
            assert row.reward_parts == {"length": len(ids)}
    assert ask(*arguments)["records"] == found["records"]  # done already
    wrong = ask.refused(errors.CONFIGURATION, *arguments[:3], "strikt.py:score", *arguments[4:])
    beside = run.run_dir.path.parent / "strikt.py"
    assert f"there is neither {Path.cwd() / 'strikt.py'} nor {beside}" in wrong
    other = ask.refused(errors.ENVIRONMENT, *arguments, "--task", "even")
    assert "is of other work: task None, not even" in other
    trained = ask(
        "shadow", run.run_dir.path, folder_of(run, "odd"), "--trajectories", "odd", "--steps", 3
    )
    assert trained["step"] == 3
    mine, theirs = manifests(folder_of(run, "odd")), manifests(run.run_dir.path)
    assert [[r.group_id for r in m.records] for m in mine] == [
        [r.group_id for r in m.records] for m in theirs[:3]
    ]
    assert mine[0].digest != theirs[0].digest


def test_a_range_of_rollouts_scored_again_trains_a_shadow_on_that_range(
    run: SmallRun, ask: Asked
) -> None:
    reward = run.run_dir.path.parent / "other.py"
    reward.write_text(OTHER_REWARD)
    part = ("--from", "0/2", "--to", "0/9", "--from", "1/1", "--to", "1/6")
    found = ask(
        "rescore", run.run_dir.path, "--reward", f"{reward}:score", "--namespace", "part.", *part
    )
    assert (found["records"], found["from"], found["to"]) == (
        14, {"0": 2, "1": 1}, {"0": 9, "1": 6}
    )  # fmt: skip
    trained = ask("shadow", run.run_dir.path, folder_of(run, "part"), "--trajectories", "part.")
    assert (trained["step"], trained["trained"]) == (3, 12)
    assert trained["passed_over_by_reason"]["no_record"] >= 4 * NUM_STEPS - 14
