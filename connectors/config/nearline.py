"""The sections of live traffic: the gateway that serves it, the job that makes training data of it,
and what counts as a label of each task."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from connectors.config.section import YEAR_S, Section


class Gateway(Section):
    port: int = Field(0, ge=0, le=65535)
    """0 takes a free port at the first start and keeps it for the run."""
    host: str = "127.0.0.1"
    task: str | None = None
    """Of calls that name none (`x-headwater-task`); may be left out where the run has one task."""
    keys_file: str | None = None
    """A line a key, `KEY` or `KEY NAME`; without it anybody on `host` is served."""
    redact: list[str] = Field([])
    """Regular expressions: what they match in texts is written as `[redacted]`. A call whose text
    they change is recorded without its ids, so it cannot be trained on exactly."""
    max_body_bytes: int = Field(8 << 20, ge=1024, le=1 << 30)
    retry_s: float = Field(600.0, ge=0, le=YEAR_S)
    """How long an answer is kept for a client that asks again."""
    max_sessions: int = Field(10_000, ge=1, le=10_000_000)
    """Whose exact ids are kept in memory, the latest used: an older session's next call is encoded
    from its text."""


class Nearline(Section):
    share: float = Field(1.0, gt=0, le=1)
    """Of each step's groups, at most so many are live traffic's; 1: all of them, prompts are
    granted none."""
    bound: int = Field(8, ge=0, le=10_000)
    """Steps that a trained token of live traffic may be old; what cannot be trained in time is
    dropped, and counted."""
    idle_s: float = Field(300.0, gt=0, le=YEAR_S)
    """A session without a call for so long, in event time, is over."""
    max_calls: int = Field(256, ge=1, le=100_000)
    """A session of so many calls is over."""
    sessions_per_user: int | None = Field(None, ge=1)
    """Trained of one user within `cap_window_s` of event time; more are closed as `capped`."""
    cap_window_s: float = Field(86_400.0, gt=0, le=YEAR_S)
    tokens_per_session: int | None = Field(None, ge=1)
    """Trained tokens; later branches beyond them are left out."""

    def places(self, groups_per_step: int) -> int:
        """Of a step's groups, those that are live traffic's; at least one."""
        return max(1, round(self.share * groups_per_step))


class TaskFeedback(Section):
    window_s: float = Field(3600.0, gt=0, le=YEAR_S)
    """Attribution window: feedback counts until so long after the session's last call."""
    correction_s: float = Field(0.0, ge=0, le=YEAR_S)
    """Feedback so long after the window corrects a label that was provisional or final."""
    provisional: Literal["wait", "default", "tracker"] = "wait"
    """Of a session that has no label when the window ends: closed as `no_label`; trained with
    `default`; trained with its tracked value. A label that comes later corrects it."""
    default: float = 0.0
    combine: str = "mean"
    """Of several signals: `mean`, `last`, `min`, `max`, `sum`, or `module:function`, which is given
    {name: [values in order of time]} and returns a number."""
    names: list[Annotated[str, Field(min_length=1)]] = Field([])
    """Only these signals count; leave out for all."""
    value_of: Literal["task", "user", "prompt"] = "task"
    """What the tracked value is of, for calls that give no key of their own."""
    low: float = 0.0
    high: float = 1.0
    """Bounds of a label: a combined value is cut to them, and counted as cut."""

    @model_validator(mode="after")
    def _ordered(self) -> TaskFeedback:
        if not self.low < self.high:
            raise ValueError(f"high must be above low ({self.low:g}), got {self.high:g}")
        if not self.low <= self.default <= self.high:
            raise ValueError(
                f"default must be between {self.low:g} and {self.high:g}, got {self.default:g}"
            )
        return self
