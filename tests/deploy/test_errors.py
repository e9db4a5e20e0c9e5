import errno

import pytest

from connectors.broker.errors import PortTaken
from connectors.config import ConfigError
from connectors.kafka.client import BrokerUnavailable
from deploy.errors import EnvironmentFailure, RunFailed, explain
from trainer.accounts import LedgerBroken
from trainer.checkpoint import CheckpointFailed
from trainer.feed import FeedFailed
from trainer.step_log import ChainBroken, Fenced


def feed_died_of(cause: Exception) -> FeedFailed:
    failed = FeedFailed("the feed died")
    failed.__cause__ = cause
    return failed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (BrokerUnavailable("x"), 3),
        (PortTaken("x"), 3),
        (CheckpointFailed("x"), 3),
        (OSError(errno.ENOSPC, "no space", "/some/file"), 3),
        (PermissionError(errno.EACCES, "denied", "/some/file"), 3),
        (EnvironmentFailure("x"), 3),
        (RunFailed("x", 4), 4),
        (ChainBroken("x"), 4),
        (LedgerBroken("x"), 4),
        (Fenced("x"), 1),
        (feed_died_of(Fenced("x")), 1),
        (feed_died_of(BrokerUnavailable("x")), 3),
    ],
)
def test_an_expected_failure_is_a_code_and_one_line(error: Exception, code: int) -> None:
    found = explain(error)
    assert found is not None
    assert found[0] == code
    assert found[1]
    assert "\n" not in found[1]


@pytest.mark.parametrize(
    "error", [RuntimeError("x"), KeyError("x"), FileNotFoundError(errno.ENOENT, "x")]
)
def test_a_fault_of_ours_is_no_answer_to_the_user(error: Exception) -> None:
    assert explain(error) is None
    assert explain(feed_died_of(error)) is None
