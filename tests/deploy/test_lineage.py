"""`headwater rollback` and `fork`: on a log written by hand, on a run at work, and against a clean
run."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import tomli_w

from connectors.config import ConfigError, load
from connectors.kafka.client import Cluster, Reader
from connectors.records import Fork, Group, Manifest, Version
from connectors.run_dir import RunDir
from deploy import lineage
from deploy.errors import RunFailed
from deploy.lineage import Forked, fork_run
from deploy.log import opened
from tests.deploy.command import call, model_folder
from tests.deploy.written_log import WrittenLog, write_example
from tests.small_run import REWARD, SmallRun, headwater_command, until
from trainer import stall
from trainer.reexecute import read_groups
from trainer.step_log import Chain, StepLog


# ------------------------------------------------------------------------------------ by hand
class Written:
    """Two steps, of (0,0) (1,0) and of (1,1) (0,2), in a run's folder."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.log = write_example(cluster, folder)
        self.run_dir = RunDir(folder)
        model_folder(folder / "model")
        self.run_dir.config_file.write_text(
            tomli_w.dumps(self.log.config.model_dump(exclude_none=True))
        )

    def fork(self, step: int, *exclude: str, changed: Sequence[str] = ()) -> Forked:
        return fork_run(
            self.log.config,
            self.run_dir,
            self.log.cluster,
            step,
            exclude=exclude,
            changed=load(self.run_dir.config_file, changed) if changed else None,
        )

    def ids(self, *places: tuple[int, int]) -> tuple[str, ...]:
        return tuple(self.log.group_id(*place) for place in places)


def chain_of(cluster: Cluster) -> Chain:
    with closing(StepLog(cluster)) as steps:
        return steps.chain()


@pytest.fixture
def written(cluster: Cluster, tmp_path: Path) -> Written:
    return Written(cluster, tmp_path)


def test_a_rollback_is_one_begin_in_the_log(written: Written) -> None:
    done = written.fork(1)
    assert (done.version, done.given_up, done.excluded) == (Version(1, 1), (2,), ())
    chain = chain_of(written.log.cluster)
    assert chain.lineage == {1: Fork(parent=0, number=1, reason="rollback")}
    assert chain.forks[0].digest == written.log.digests[1]
    assert [m.step for m in chain.given_up] == [2]


def test_a_run_that_stalled_can_go_on_once_it_was_taken_back(written: Written) -> None:
    stall.keep(written.run_dir, "stalled: x")
    assert written.fork(2).is_nothing
    with pytest.raises(RunFailed):
        written.fork(3)
    assert stall.kept(written.run_dir) == "stalled: x"
    written.fork(1)
    assert stall.kept(written.run_dir) is None


def test_groups_are_excluded_by_step_by_offset_and_by_id(written: Written) -> None:
    ids = written.ids
    assert written.fork(0, "steps:1-2").excluded == ids((0, 0), (1, 0), (1, 1), (0, 2))
    other = dataclasses.replace(written.log.cluster, namespace=f"other-{uuid.uuid4().hex[:8]}.")
    again = Written(other, written.run_dir.path / "other")
    done = again.fork(1, "steps:2", "1/1", "0/1-2", again.log.group_id(1, 2))
    assert done.excluded == again.ids((1, 1), (0, 2), (0, 1), (1, 2))
    assert chain_of(again.log.cluster).forks[0].excluded == done.excluded


def test_what_the_weights_hold_already_is_said_to_stay(written: Written) -> None:
    done = written.fork(1, "steps:1-2")
    assert done.excluded == written.ids((1, 1), (0, 2))
    assert done.kept == written.ids((0, 0), (1, 0))


def test_steps_that_a_rollback_gave_up_can_still_be_named(written: Written) -> None:
    log = written.log
    log.rollback(1)
    assert written.fork(1, "steps:2").excluded == written.ids((1, 1), (0, 2))
    log.incarnation = 2
    log.begin()
    log.score(1, 2, 1)
    log.step(2, (1, 2), reward=0.0)
    assert written.fork(1, "steps:2").excluded == written.ids((1, 2)), "the newest line's"


def test_a_rollback_that_changes_nothing_writes_nothing(written: Written) -> None:
    done = written.fork(2)
    assert (done.is_nothing, done.version) == (True, Version(0, 2))
    said = call("rollback", written.run_dir.path, "--to", 2)
    assert said.stdout.startswith("nothing to do: the run is at step 2 (version 0.2)\n")
    assert chain_of(written.log.cluster).forks == []
    assert not written.fork(2, written.log.group_id(1, 2)).is_nothing


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("steps:1", "all 2 groups were trained at or before step 1"),
        ("steps:2-3", "the log holds steps 1 to 2"),
        ("0/1-9", "/0 holds the offsets 0 to 2"),
        ("rubbish", "is none of steps:A-B, PARTITION/FROM-TO"),
        ("other/0/0", "no such group was granted"),
        ("NAMESPACEprompts/0/3", "no such group was granted"),
    ],
)
def test_an_exclusion_that_names_nothing_is_refused_and_nothing_is_written(
    written: Written, spec: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        written.fork(1, spec.replace("NAMESPACE", written.log.cluster.namespace))
    assert chain_of(written.log.cluster).forks == []


def test_a_step_without_a_way_back_is_refused_with_those_that_have_one(written: Written) -> None:
    with pytest.raises(RunFailed, match=r"no way leads back to step 3: .* Possible: 0 to 2$"):
        written.fork(3)
    written.log.trim(trajectories={1: 2})
    with pytest.raises(RunFailed, match=r"no way leads back to step 1: .* Possible: 0$"):
        written.fork(1)
    written.log.checkpoint()
    with pytest.raises(RunFailed, match=r"Possible: 0, 2$"):
        written.fork(1)
    assert written.fork(2).given_up == (), "the checkpoint is all it takes"


def test_a_run_without_a_step_has_none_to_go_back_to(cluster: Cluster, tmp_path: Path) -> None:
    log = WrittenLog(cluster, tmp_path)
    with pytest.raises(RunFailed, match="the run has trained no step yet"):
        fork_run(log.config, RunDir(tmp_path), cluster, 0)


def test_settings_are_taken_over_as_by_a_resumed_run(written: Written) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.groups_per_step: cannot change from 2"):
        written.fork(1, changed=["trainer.groups_per_step=3"])
    assert chain_of(written.log.cluster).forks == []
    done = written.fork(1, changed=["trainer.learning_rate=0.25"])
    assert done.changes[-1] == "trainer.learning_rate: 1e-06 -> 0.25"
    assert load(written.run_dir.config_file).trainer.learning_rate == 0.25


def test_settings_are_left_alone_when_the_fork_does_not_come_about(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> int:
        raise RuntimeError("no broker")

    monkeypatch.setattr(StepLog, "begin", fails)
    with pytest.raises(RuntimeError, match="no broker"):
        written.fork(1, changed=["trainer.learning_rate=0.25"])
    assert load(written.run_dir.config_file).trainer.learning_rate == 1e-6


def test_a_checkpoint_that_goes_while_the_fork_is_made_refuses_it(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = iter([0, None])

    def way_back(*arguments: object) -> int:
        if (found := next(ways)) is None:
            raise RunFailed("no way leads back", 1)
        return found

    monkeypatch.setattr(lineage, "_way_back", way_back)
    with pytest.raises(RunFailed, match="no way leads back"):
        written.fork(1)
    assert chain_of(written.log.cluster).forks == []


def test_a_refusal_is_one_line_with_its_exit_code(written: Written) -> None:
    gone = call("rollback", written.run_dir.path, "--to", 7)
    assert (gone.returncode, gone.stdout) == (1, "")
    assert "Possible: 0 to 2" in gone.stderr
    assert len(gone.stderr.splitlines()) == 1
    wrong = call("fork", written.run_dir.path, "--at", 1, "--exclude", "rubbish")
    assert wrong.returncode == 2
    done = call("rollback", written.run_dir.path, "--to", 1, "--json")
    assert json.loads(done.stdout) == {
        "version": {"incarnation": 1, "number": 1}, "excluded": [], "given_up": [2], "kept": [],
    }  # fmt: skip


def test_a_run_that_is_not_at_work_is_told_how_it_goes_on(written: Written) -> None:
    done = call("rollback", written.run_dir.path, "--to", 1)
    assert f"next: headwater run {written.run_dir.config_file}" in done.stdout


# ------------------------------------------------------------------------------------ a real run
def test_a_run_at_work_goes_back_and_on_with_right_staleness(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    run = SmallRun(tmp_path, tiny_model_path, settings={"trainer.num_steps": 1000})
    with run.running() as process:
        run.wait_for_step(process, 5)
        done = run.ask("rollback", "--to", 3)
        assert done["version"] == {"incarnation": 1, "number": 3}
        until(lambda: (m := run.manifests()) and m[-1].version >= Version(1, 6), "version 1.6")
    audit = run.ask("audit")
    assert audit["ok"], audit
    with opened(run.config, run.run_dir) as cluster:
        chain = chain_of(cluster)
        topic = cluster.topic("trajectories")
        with closing(Reader(cluster, topic, {})) as reader:
            groups = {m.step: read_groups(reader, m) for m in chain.manifests}
    assert [m.step for m in chain.given_up] == done["given_up"]
    assert [m.version for m in chain.manifests[:4]] == [
        *(Version(0, n) for n in (1, 2, 3)), Version(1, 4),
    ]  # fmt: skip
    crossed = 0
    for manifest in chain.manifests:
        ages = ages_by_hand(manifest, groups[manifest.step], fork=3)
        assert manifest.staleness["max"] == max(ages) <= 1
        assert manifest.staleness["mean"] == pytest.approx(statistics.mean(ages))
        crossed += manifest.step > 3 and any(
            s.incarnation == 0 for g in groups[manifest.step] for t in g.trajectories
            for s in t.segments
        )  # fmt: skip
    assert crossed, "no token of before the fork was trained after it"


def ages_by_hand(manifest: Manifest, groups: list[Group], fork: int) -> list[int]:
    """Of each trained token, for a run that was rolled back once: v - m, but for tokens that step
    `fork` had not seen (v - fork) + (m - fork)."""
    ages = []
    v = manifest.step - 1
    for trajectory in (t for group in groups for t in group.trajectories):
        for s in trajectory.segments:
            given_up = manifest.version.incarnation == 1 and s.incarnation == 0 and s.number > fork
            age = (v - fork) + (s.number - fork) if given_up else v - s.number
            ages += [age] * int(trajectory.loss_mask[s.start : s.end].sum())
    return ages


GOOD, BAD, LAST = 5, 20, 40
POISONED = REWARD.replace("def score", "import pathlib\n\n\ndef score").replace(
    "    return", "    if pathlib.Path(__file__).with_name('poison').exists():\n"
    "        return float((ids % 2 == 1).mean())\n    return",
)  # fmt: skip


@pytest.mark.slow
def test_a_stretch_of_wrong_rewards_is_cut_out_and_the_run_is_as_good_as_a_clean_one(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    """For a stretch the reward is the share of odd ids. The rewards compared are the true ones of
    the last steps; both runs train as many."""
    settings = {
        "trainer.num_steps": 1000, "trainer.groups_per_step": 8, "trainer.learning_rate": 2e-3,
        "checkpoint.every_steps": 5, "checkpoint.keep": 10,
    }  # fmt: skip
    clean = small(tmp_path / "clean", tiny_model_path, settings)
    poisoned = small(tmp_path / "poisoned", tiny_model_path, settings)
    clean.run_to_end("--stop-after-steps", LAST, timeout_s=600)
    poisoned.run_to_end("--stop-after-steps", GOOD, timeout_s=600)
    flag = tmp_path / "poisoned" / "poison"
    flag.touch()
    poisoned.run_to_end("--stop-after-steps", BAD, timeout_s=600)
    flag.unlink()
    with_poison, without = (true_reward(run, BAD - 2, BAD) for run in (poisoned, clean))
    done = poisoned.ask("fork", "--at", GOOD, "--exclude", f"steps:{GOOD + 1}-{BAD}")
    assert len(done["excluded"]) == 8 * (BAD - GOOD)
    resumed = subprocess.run(
        headwater_command(
            "run", poisoned.run_dir.config_file, "--run-dir", poisoned.run_dir.path,
            "--stop-after-steps", LAST,
        ),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    clean_end, forked_end = (true_reward(run, LAST - 4, LAST) for run in (clean, poisoned))
    print(
        f"steps {BAD - 2} to {BAD}: clean {without:.3f}, poisoned {with_poison:.3f}; steps "
        f"{LAST - 4} to {LAST}: clean {clean_end:.3f}, forked {forked_end:.3f}"
    )
    assert with_poison < without - 0.1, "the poison did something"
    assert abs(clean_end - forked_end) < 0.05
    audit = poisoned.ask("audit")
    assert audit["ok"], audit
    trained = {r.group_id for m in chain_in(poisoned).manifests for r in m.records}
    assert not trained & set(done["excluded"])


def small(folder: Path, model: Path, settings: Mapping[str, object]) -> SmallRun:
    folder.mkdir()
    return SmallRun(folder, model, settings=settings, reward=POISONED)


def chain_in(run: SmallRun) -> Chain:
    with opened(run.config, run.run_dir) as cluster:
        return chain_of(cluster)


def true_reward(run: SmallRun, first: int, last: int) -> float:
    """Mean share of even ids that the steps' groups have, whatever they were rewarded with."""
    shares = []
    with opened(run.config, run.run_dir) as cluster:
        chain = chain_of(cluster)
        with closing(Reader(cluster, cluster.topic("trajectories"), {})) as reader:
            for manifest in chain.manifests[first - 1 : last]:
                for group in read_groups(reader, manifest):
                    for t in group.trajectories:
                        shares.append(float((t.tokens[t.loss_mask == 1] % 2 == 0).mean()))
    return statistics.mean(shares)
