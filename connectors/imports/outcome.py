"""What a row of a foreign log may be besides a record: left out, for a reason."""

from __future__ import annotations

from typing import Final

REASONS: Final = (
    # of the file
    "not_json", "bad_encoding", "truncated", "damaged", "unreadable", "too_large",
    "unknown_format", "other_format",
    # of the row
    "not_a_call", "not_chat", "bad_message", "no_messages", "no_answer", "failed_call",
    "tool_unanswered", "bad_record", "score_without_number", "score_of_nothing",
    # of the run
    "no_task", "unknown_task", "duplicate", "already_imported",
)  # fmt: skip


class LeftOut(ValueError):
    """A row, or what remains of a file, is not read; `reason` is one of REASONS."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
