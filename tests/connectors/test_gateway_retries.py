"""A second try joins the first; two equal requests that were both answered are two calls."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from connectors.engines.types import Sampling
from connectors.gateway.answers import Answer
from connectors.gateway.asked import Asked, read
from connectors.gateway.errors import Refused, unavailable
from connectors.gateway.retries import Retries, Try
from tests.connectors.gateway_bench import body


class World:
    """Answers without a model; a clock that is set."""

    def __init__(self, keep_s: float = 100.0) -> None:
        self.now = 0.0
        self.retries = Retries(keep_s, clock=lambda: self.now)

    def begin(self, asked: Asked, **of: Any) -> Answer:
        answer = Answer("c", "s", asked, 3, lambda ids: "")
        self.retries.keep(this(asked, **of), answer)
        return answer

    def end(self, answer: Answer, *, delivered: bool) -> None:
        answer.end()
        answer.ended_at, answer.delivered = self.now, delivered


def asked(text: str = "hi") -> Asked:
    return read(msgspec.json.encode(body(text)), Sampling())


def this(asked: Asked, **of: Any) -> Try:
    return Try(**({"owner": "", "session": None, "digest": asked.digest} | of))


def test_in_a_session_an_equal_body_joins_an_answer_on_its_way() -> None:
    world, question = World(), asked()
    answer = world.begin(question, session="s")
    with answer.followed(lambda: False):
        assert world.retries.find(this(question, session="s")) is answer
        assert world.retries.find(this(question, session="other")) is None
        assert world.retries.find(this(asked("else"), session="s")) is None
        assert world.retries.find(this(question, session="s", owner="bob")) is None


def test_an_answer_that_arrived_is_not_given_twice() -> None:
    world, question = World(), asked()
    for session in ("s", None):
        answer = world.begin(question, session=session)
        world.end(answer, delivered=True)
        assert world.retries.find(this(question, session=session)) is None


def test_an_answer_that_did_not_arrive_is() -> None:
    world, question = World(), asked()
    for session in ("s", None):
        answer = world.begin(question, session=session)
        world.end(answer, delivered=False)
        assert world.retries.find(this(question, session=session)) is answer


def test_without_a_session_equal_requests_at_the_same_time_are_two_calls() -> None:
    world, question = World(), asked()
    answer = world.begin(question)
    gone = False
    with answer.followed(lambda: gone):
        assert world.retries.find(this(question)) is None
        gone = True  # the first one's connection broke
        assert world.retries.find(this(question)) is answer


def test_a_client_that_says_it_tries_again_is_believed() -> None:
    world, question = World(), asked()
    answer = world.begin(question)
    world.end(answer, delivered=True)
    assert world.retries.find(this(question, number=1)) is answer
    world.now = 101.0
    assert world.retries.find(this(question, number=1)) is None


def test_an_idempotency_key_is_one_call_whatever_was_delivered() -> None:
    world, question = World(), asked()
    answer = world.begin(question, idempotency_key="k")
    world.end(answer, delivered=True)
    assert world.retries.find(this(question, idempotency_key="k")) is answer
    assert world.retries.find(this(question, idempotency_key="l")) is None
    assert world.retries.find(this(question, idempotency_key="k", owner="bob")) is None
    with pytest.raises(Refused, match="another body"):
        world.retries.find(this(asked("else"), idempotency_key="k"))


def test_an_answer_that_failed_is_begun_again() -> None:
    world, question = World(), asked()
    answer = world.begin(question, session="s", idempotency_key="k")
    answer.end(unavailable("no engine"))
    assert world.retries.find(this(question, session="s", idempotency_key="k")) is None


def test_an_answer_on_its_way_is_kept_however_long_it_takes() -> None:
    world, question = World(), asked()
    answer = world.begin(question, session="s")
    world.now = 1e6
    assert world.retries.find(this(question, session="s")) is answer
