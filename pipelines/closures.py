"""What a stage says of groups it closed: in its log, the first of each reason and then now and
then; all of them are in the topic."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

from connectors.records import Closed, Group

log = logging.getLogger(__name__)

FIRST: Final = 3
THEN_EVERY: Final = 100
_counts: Counter[str] = Counter()  # of this process


def note(ended: Group | Closed) -> Group | Closed:
    """`ended`, said in the log if it is closed and its turn."""
    if isinstance(ended, Closed):
        _counts[ended.reason] += 1
        count = _counts[ended.reason]
        if count <= FIRST or count % THEN_EVERY == 0:
            log.warning(
                "closed %s: %s: %s (number %d of this reason)",
                ended.group_id, ended.reason, ended.message, count,
            )  # fmt: skip
    return ended
