"""What a run looks like in the terminal: a live table when stdout is one, plain lines when it is
not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.disk import room_or_later
from deploy.fold import RECENT_STEPS
from deploy.history import fork_text
from deploy.nearline_sums import nearline_lines
from trainer.alerts import subject

PLAIN_EVERY_S: Final = 15.0


def status_lines(status: Mapping[str, Any]) -> list[str]:
    """The status object for reading."""
    groups, staleness, tokens = status["groups"], status["staleness"], status["tokens"]
    policy, seconds, lag = status["policy"], status["seconds"], status["lag"]
    held_out = status["eval"]
    is_whole = status["from_step"] == 1
    kept = "" if is_whole else f" (from step {status['from_step']} on)"
    whole = "" if is_whole else " (of the whole run)"
    lines = [
        f"run        {status['run']}",
        f"step       {status['step']} (version {_version(status['version'])})",
        f"policy     {_policy(policy)}",
        f"groups     {groups['granted']} granted: {groups['trained']} trained, {groups['closed']} "
        f"closed, {groups['dropped']} dropped, {groups['open']} open{whole}",
        f"staleness  mean {_number(staleness['mean'])}, p99 {_number(staleness['p99'])}, "
        f"max {_number(staleness['max'])}{kept}",
        f"tokens     {tokens['generated']} generated, {tokens['trained']} trained, "
        f"{tokens['masked']} masked, {tokens['dropped']} dropped{kept}",
        "seconds    "
        + ", ".join(f"{name} {_number(value)}" for name, value in seconds.items())
        + kept,
        f"publish    {_number(status['publish_s'])} s on average, of the last {RECENT_STEPS} steps",
        f"waiting    {_share(status['wait_share'])} of the trainer's time from step to step{kept}",
        *_actions(status["staleness_actions"], kept),
        f"reward     {_number(status['reward']['last'])} in the last step",
        f"eval       {_number(held_out['first'])} at first, {eval_text(held_out)} now, on "
        f"{held_out['num_prompts']} prompts{_samples(held_out)}{whole}",
        "lag        " + ", ".join(f"{name} {value}" for name, value in lag.items()),
    ]
    if status["nearline"] is not None:
        lines += nearline_lines(status["nearline"])
    for fork in status["lineage"]:
        lines.append(f"incarnation {fork_text(fork)}")
    if (given_up := status["given_up"])["steps"]:
        lines.append(
            f"given up   {given_up['steps']} steps of {given_up['groups']} groups, "
            f"{given_up['tokens']} tokens{kept}"
        )
    if not is_whole:
        lines.append(f"log        trimmed: it holds the steps from {status['from_step']} on")
    if status["incomplete"]:
        lines.append(f"log        INCOMPLETE, the counts miss what is gone: {status['incomplete']}")
    if status["skipped"]:
        lines.insert(
            2, f"skipped    {status['skipped']} steps changed nothing (NaN gradients){kept}"
        )
    if status["closed_by_reason"]:
        lines.insert(4, f"closed     {_reasons(status)}{whole}")
    if status["stall"]:
        lines += status["stall"].splitlines()
    lines += [f"ALERT      {alert}" for alert in status["alerts"]]
    for role in status["roles"]:
        version = f", version {_version(role['version'])}" if role["version"] else ""
        pid = f"pid {role['pid']}, " if role["pid"] else ""
        lines.append(
            f"  {role['name']:<12} {role['state']} ({pid}{role['restarts']} restarts{version})"
        )
    return lines


def plain_line(status: Mapping[str, Any]) -> str:
    """The run in one line, for logs and pipes."""
    restarts = sum(role["restarts"] for role in status["roles"])
    if status["version"] is None:
        return "starting: no engine holds the first weights yet (the roles' logs say what they do)"
    return (
        f"step {status['step']}{_of_incarnation(status)} · "
        f"reward {_number(status['reward']['last'])} · "
        f"eval {_number(status['eval']['last'])} · "
        f"staleness mean {_number(status['staleness']['mean'])} "
        f"max {_number(status['staleness']['max'])} · "
        f"{_number(status['tokens_per_s'])} tokens/s · waiting {_share(status['wait_share'])} · "
        f"publish {_number(status['publish_s'])} s · {status['groups']['open']} groups open"
        + (f" · {status['skipped']} steps skipped" if status["skipped"] else "")
        + (f" · closed: {_reasons(status)}" if status["closed_by_reason"] else "")
        + (f" · {restarts} restart{'s' * (restarts > 1)}" if restarts else "")
        + (" · STALLED (see stall.txt)" if status["stall"] else "")
        + (f" · ALERT {_alerts(status)} (see headwater status)" if status["alerts"] else "")
    )


def _policy(policy: Mapping[str, Any]) -> str:
    bound = "not strict" if policy["bound"] is None else f"bound {policy['bound']}"
    ahead = "" if policy["lookahead"] is None else f", lookahead {policy['lookahead']}"
    return f"{policy['name']}, {bound}{ahead}"


def _actions(actions: Mapping[str, Any], kept: str) -> list[str]:
    """What the policy did; nothing where it did nothing."""
    waits = [
        f"{reason} {wait.get('seconds', 0):.4g} s" for reason, wait in actions["waits"].items()
    ]
    done = [f"{count} {what}" for what, count in _done(actions) if count]
    lines = [f"waits      {', '.join(waits)}{kept}"] if waits else []
    return [*lines, f"actions    {', '.join(done)}{kept}"] if done else lines


def _done(actions: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    yield "groups held", actions["holds"]
    for reason, count in actions["drops"].items():
        yield f"dropped ({reason})", count
    for then, word in (("close", "cancelled"), ("requeue", "put back")):
        for reason, count in actions["cancels"][then].items():
            yield f"{word} ({reason})", count
    yield "tokens masked", actions["masked_tokens"]
    yield "tokens reweighted", actions["reweighted_tokens"]


def _of_incarnation(status: Mapping[str, Any]) -> str:
    """Nothing until the run was forked."""
    return f" of incarnation {status['lineage'][-1]['incarnation']}" if status["lineage"] else ""


def _reasons(status: Mapping[str, Any]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in status["closed_by_reason"].items())


class RunView:
    """Shows the newest status of a run until it is closed.

    On a terminal a table that redraws itself; elsewhere one line a step, and one every fifteen
    seconds while no step ends. `say` prints a line above it."""

    def __init__(self, console: Console, target_steps: int) -> None:
        self._console = console
        self._target = target_steps
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._last_step, self._last_line_at = -1, float("-inf")

    def __enter__(self) -> RunView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        with room_or_later():
            self._console.print(Text(line))

    def show(
        self, status: Mapping[str, Any] | None, roles: Sequence[Mapping[str, Any]], now: float
    ) -> None:
        """`roles` are the supervisor's own, fresher than those in `status`; `now` in seconds."""
        if self._live is not None:
            self._live.update(self._table(status, roles), refresh=True)
        elif status is not None:
            due = now - self._last_line_at >= PLAIN_EVERY_S
            if status["step"] != self._last_step or due:
                self.say(plain_line({**status, "roles": roles}))
                self._last_step, self._last_line_at = status["step"], now

    def _table(self, status: Mapping[str, Any] | None, roles: Sequence[Mapping[str, Any]]) -> Group:
        people = Table(box=None, pad_edge=False, header_style="dim")
        for title in ("role", "state", "pid", "restarts"):
            people.add_column(title)
        for role in roles:
            style = "" if role["state"] in ("running", "finished") else "yellow"
            people.add_row(
                role["name"],
                role["state"],
                str(role["pid"] or "-"),
                str(role["restarts"]),
                style=style,
            )
        if status is None:
            return Group(Text("starting", style="bold"), people)
        staleness, reward, held_out = status["staleness"], status["reward"], status["eval"]
        figures = Table(box=None, pad_edge=False, show_header=False)
        for name, value in (
            ("step", f"{status['step']} of {self._target}"),
            ("reward", f"{_number(reward['last'])} (mean of 10: {_number(reward['mean'])})"),
            ("eval", f"{_number(held_out['first'])} -> {eval_text(held_out)}"),
            ("staleness", f"mean {_number(staleness['mean'])}, max {_number(staleness['max'])}"),
            ("tokens/s", _number(status["tokens_per_s"])),
            ("waiting", _share(status["wait_share"])),
            ("publish", f"{_number(status['publish_s'])} s"),
            ("lag", ", ".join(f"{topic} {n}" for topic, n in status["lag"].items())),
        ):
            figures.add_row(Text(name, style="dim"), value)
        if status["stall"]:
            figures.add_row(Text("STALLED", style="bold red"), "see stall.txt")
        if status["alerts"]:
            figures.add_row(Text("ALERT", style="bold red"), f"{_alerts(status)}: see its status")
        return Group(Text(f"{status['run']}", style="bold"), figures, people)


def _alerts(status: Mapping[str, Any]) -> str:
    return ", ".join(map(subject, status["alerts"]))


def eval_text(held_out: Mapping[str, Any]) -> str:
    """The last evaluation: its mean and pass@k, each with its interval."""
    passes = {f"pass@{k} ": found for k, found in held_out["pass_at"].items()}
    reward = {"mean": held_out["last"], "low": held_out["low"], "high": held_out["high"]}
    return ", ".join(name + _interval(found) for name, found in {"": reward, **passes}.items())


def _interval(found: Mapping[str, float | None]) -> str:
    mean, low, high = (_number(found[key]) for key in ("mean", "low", "high"))
    return mean if found["low"] is None else f"{mean} [{low}, {high}]"


def _samples(held_out: Mapping[str, Any]) -> str:
    many = f", {held_out['num_samples']} samples each" if held_out["num_samples"] > 1 else ""
    mixed = len(held_out["versions"]) > 1
    return many + (f", by versions {', '.join(held_out['versions'])}" if mixed else "")


def _version(version: Mapping[str, int] | None) -> str:
    return "none" if version is None else f"{version['incarnation']}.{version['number']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
