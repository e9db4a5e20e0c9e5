"""What a run looks like: a table that redraws on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from deploy.curve import draw
from deploy.view import PLAIN_EVERY_S, RunView, plain_line, status_lines


def status(step: int, **more: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "step": step,
        "version": {"incarnation": 0, "number": step},
        "policy": {"name": "sync", "bound": 0, "lookahead": 1},
        "groups": {"granted": 9, "trained": 4, "closed": 1, "dropped": 0, "open": 4},
        "closed_by_reason": {"reward_nan": 1},
        "staleness": {"mean": 0.5, "p99": 1.0, "max": 1.0},
        "staleness_actions": {
            "waits": {},
            "holds": 0,
            "drops": {},
            "cancels": {"close": {}, "requeue": {}},
            "masked_tokens": 0,
            "reweighted_tokens": 0,
        },
        "stall": None,
        "alerts": [],
        "tokens": {"generated": 7, "trained": 6, "masked": 0, "dropped": 0},
        "seconds": {"wait": 1.0, "logprobs": 0.5, "update": 0.25, "publish": 0.125},
        "eval": {
            "first": 0.25,
            "last": 0.75,
            "low": 0.409,
            "high": 0.929,
            "num_prompts": 8,
            "num_samples": 4,
            "pass_at": {"4": {"mean": 0.875, "low": 0.5, "high": 0.975}},
            "versions": ["0.4"],
            "tasks": {},
        },
        "lag": {"prompts": 64, "rollouts": 3, "trajectories": 2, "trainer": 1},
        "roles": [],
        "reward": {"last": 0.5, "mean": None},
        "tokens_per_s": 123.0,
        "publish_s": 0.0625,
        "wait_share": 0.5,
        "skipped": 0,
        "lineage": [],
        "nearline": None,
        "given_up": {"steps": 0, "groups": 0, "tokens": 0},
        "from_step": 1,
        "incomplete": None,
        **more,
    }


ROLES = [
    {"name": "trainer", "state": "running", "pid": 7, "restarts": 2},
    {"name": "engine-0", "state": "waiting", "pid": None, "restarts": 1},
]


def test_without_a_terminal_there_is_a_line_a_step_and_one_now_and_then() -> None:
    out = io.StringIO()
    with RunView(Console(file=out, width=300), target_steps=5) as view:
        view.show(None, ROLES, now=0.0)
        view.show(status(1), ROLES, now=0.5)
        view.show(status(1), ROLES, now=1.0)
        view.show(status(2), ROLES, now=1.5)
        view.show(status(2), ROLES, now=1.5 + PLAIN_EVERY_S)
        view.say("trainer ended with -9 [not markup]")
    lines = out.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines[:3]] == ["step 1", "step 2", "step 2"]
    assert lines[3:] == ["trainer ended with -9 [not markup]"]
    assert lines[0].endswith("3 restarts")
    for shown in (
        "reward 0.5",
        "eval 0.75",
        "staleness mean 0.5 max 1",
        "123 tokens/s",
        "waiting 50%",
    ):
        assert shown in lines[0]
    assert "publish 0.0625 s" in lines[0]


def test_an_evaluation_shows_its_mean_and_pass_at_k_with_their_intervals() -> None:
    found = status(1)
    (line,) = [line for line in status_lines(found) if line.startswith("eval")]
    assert line == (
        "eval       0.25 at first, 0.75 [0.409, 0.929], pass@4 0.875 [0.5, 0.975] now, "
        "on 8 prompts, 4 samples each"
    )
    bare = {"low": None, "high": None, "pass_at": {}, "num_samples": 1, "versions": ["0.4", "0.5"]}
    found["eval"].update(bare)
    (line,) = [line for line in status_lines(found) if line.startswith("eval")]
    assert line == "eval       0.25 at first, 0.75 now, on 8 prompts, by versions 0.4, 0.5"


def test_on_a_terminal_the_table_shows_figures_and_roles() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    with RunView(console, target_steps=5) as view:
        view.show(None, ROLES, now=0.0)
        view.show(status(3), ROLES, now=0.1)
    drawn = out.getvalue()
    for shown in (
        "starting",
        "3 of 5",
        "0.25 -> 0.75",
        "mean 0.5, max 1",
        "prompts 64",
        "engine-0",
    ):
        assert shown in drawn


def test_a_run_whose_first_version_is_not_published_says_so() -> None:
    assert plain_line(status(0, version=None)).startswith(
        "starting: no engine holds the first weights yet"
    )


def test_the_readable_status_names_why_groups_were_closed() -> None:
    lines = status_lines(status(3, roles=[{**ROLES[0], "version": None}]))
    assert "closed     reward_nan 1" in lines
    assert lines[-1] == "  trainer      running (pid 7, 2 restarts)"


def test_the_readable_status_says_what_the_policy_did_and_what_was_waited_for() -> None:
    done = {
        "waits": {"rollouts": {"steps": 2, "seconds": 1.5}, "policy": {"steps": 1, "seconds": 0.5}},
        "holds": 3,
        "drops": {"stale": 2},
        "cancels": {"close": {"stale": 4}, "requeue": {"cancelled": 1}},
        "masked_tokens": 70,
        "reweighted_tokens": 0,
    }
    lines = status_lines(status(3, staleness_actions=done))
    assert "waits      rollouts 1.5 s, policy 0.5 s" in lines
    assert (
        "actions    3 groups held, 2 dropped (stale), 4 cancelled (stale), 1 put back (cancelled), "
        "70 tokens masked"
    ) in lines
    assert not any(line.startswith(("waits", "actions")) for line in status_lines(status(3)))


def test_the_policy_is_shown_with_what_it_has() -> None:
    for policy, shown in (
        ({"name": "sync", "bound": 0, "lookahead": 0}, "sync, bound 0, lookahead 0"),
        ({"name": "trl", "bound": 4, "lookahead": None}, "trl, bound 4"),
        ({"name": "slime", "bound": None, "lookahead": None}, "slime, not strict"),
    ):
        assert f"policy     {shown}" in status_lines(status(1, policy=policy))


def test_a_stall_is_seen_in_every_view() -> None:
    stalled = status(3, stall="stalled: sync neither ...\npolicy sync")
    assert "stalled: sync neither ..." in status_lines(stalled)
    assert plain_line(stalled).endswith("STALLED (see stall.txt)")
    out = io.StringIO()
    with RunView(Console(file=out, force_terminal=True, width=100, height=40), 5) as view:
        view.show(stalled, ROLES, now=0.0)
    assert "STALLED" in out.getvalue()


def test_alerts_are_seen_in_every_view_and_told_in_the_status() -> None:
    alerted = status(3, alerts=["gap: 30% of the tokens ...", "weights: the loss ..."])
    assert status_lines(alerted)[-2:] == [
        "ALERT      gap: 30% of the tokens ...", "ALERT      weights: the loss ...",
    ]  # fmt: skip
    assert plain_line(alerted).endswith("ALERT gap, weights (see headwater status)")
    out = io.StringIO()
    with RunView(Console(file=out, force_terminal=True, width=100, height=40), 5) as view:
        view.show(alerted, ROLES, now=0.0)
    assert "gap, weights: see its status" in out.getvalue()
    assert "ALERT" not in plain_line(status(3))


def test_the_curve_shows_both_kinds_of_points_without_escapes() -> None:
    drawn = draw([(1, 0.1), (2, 0.9)], [(0, 0.2), (2, 0.8)], title="r: reward")
    assert "training" in drawn
    assert "held out" in drawn
    assert "\x1b" not in drawn
    assert draw([], [], title="none") == ""
