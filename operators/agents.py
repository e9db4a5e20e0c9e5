"""What a user's agent sees (`LLM`, `Message`, `Tools`, `Outcome`) and the two built-in agents.

An agent is `async def rollout(prompt, llm, tools) -> Outcome | None`: it asks `llm` as often as
it likes and everything that was sampled becomes training data, token by token. An exception means
"try again"."""

from __future__ import annotations

import ast
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from connectors.engines.types import Completion
from connectors.records import Prompt
from connectors.tool_calls import marked


class Message(dict[str, Any]):
    """An assistant's turn: a mapping with `role` and `content`, to be appended to the messages as
    it is. `content` is all the model wrote, tool calls included, so that the template writes the
    same text again and the next turn extends these very ids; `tool_calls` is read from it, and is
    no key of the mapping, because a template would write the calls a second time."""

    @property
    def role(self) -> str:
        return str(self["role"])

    @property
    def content(self) -> str:
        return str(self["content"])

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The JSON objects between <tool_call> marks; those that are no JSON are left out."""
        return [found.call for found in marked(self.content)]


class ContextFull(RuntimeError):
    """The conversation leaves no room to generate. An agent that lets it pass ends its trajectory
    here, with what was generated so far."""


class LLM(Protocol):
    """The policy. `sampling` overrides max_tokens, top_p or stop_ids of one call; the temperature
    is the run's, because log-probs are computed again at it."""

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **sampling: Any,
    ) -> Message: ...

    async def generate(self, new_ids: Sequence[int], **sampling: Any) -> Completion:
        """Appends `new_ids` to what was generated last and continues from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`reward` set: no scorer is asked. `metadata` goes onto the trajectory."""

    reward: float | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Tools:
    """Functions by name. `call` never raises: what went wrong is text the model can read."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]] | None = None) -> None:
        self._functions = {"calc": calculate, **(functions or {})}

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    async def call(self, name: str, *arguments: Any) -> str:
        if name not in self._functions:
            return f"error: there is no tool {name}"
        try:
            result = self._functions[name](*arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except Exception as error:  # a tool is foreign code: its failure is the model's to handle
            return f"error: {error}"


Agent = Callable[[Prompt, LLM, Tools], Any]


# ---------------------------------------------------------------------------------- built-in
# agents
async def single_turn(prompt: Prompt, llm: LLM, tools: Tools) -> Outcome | None:
    """One answer to the prompt's messages, text or ids."""
    await llm.generate(())
    return None


MAX_TOOL_TURNS: Final = 4
_CALL: Final = re.compile(r"calc\(((?:[^()]|\([^()]*\))*)\)")


async def tool_loop(prompt: Prompt, llm: LLM, tools: Tools) -> Outcome | None:
    """Answers with a calculator: a turn that writes `calc(12 + 7)` gets a tool message with the
    result and goes on; the first turn without a call, or the fourth, is the answer."""
    if prompt.messages is not None:
        messages: list[Mapping[str, Any]] = list(prompt.messages)
    elif prompt.prompt is not None:
        messages = [{"role": "user", "content": prompt.prompt}]
    else:
        raise ValueError("tool_loop needs messages or prompt, not token_ids")
    for turn in range(MAX_TOOL_TURNS):
        message = await llm.chat(messages)
        calls = _CALL.findall(message.content)
        if not calls or turn == MAX_TOOL_TURNS - 1:
            break
        results = [await tools.call("calc", call) for call in calls]
        messages += [message, {"role": "tool", "content": "\n".join(results)}]
    return None


BUILT_IN: Final[Mapping[str, Agent]] = {"single_turn": single_turn, "tool_loop": tool_loop}

# --------------------------------------------------------------------------------------
# calculator
_BINARY: Final[Mapping[type[ast.operator], Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div:
    operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow:
    operator.pow,
}  # fmt: skip
_UNARY: Final[Mapping[type[ast.unaryop], Callable[[Any], Any]]] = {
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_MAX_EXPRESSION: Final = 200  # characters
_MAX_POWER: Final = 64  # so that no expression can eat the machine
_MAX_MAGNITUDE: Final = 10**60


def calculate(expression: str) -> str:
    """The value of an arithmetic expression (+ - * / // % ** and brackets); ValueError for
    anything else, ZeroDivisionError for a division by zero. 12.0 is written as 12."""
    if len(expression) > _MAX_EXPRESSION:
        raise ValueError("the expression is too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("that is no arithmetic expression") from None
    value = _value(tree.body)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > _MAX_POWER:
            raise ValueError("the exponent is too large")
        value = _BINARY[type(node.op)](left, right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        value = _UNARY[type(node.op)](_value(node.operand))
    else:
        raise ValueError("that is no arithmetic expression")
    if isinstance(value, complex) or not abs(value) < _MAX_MAGNITUDE:
        raise ValueError("the number is too large")
    return value  # type: ignore[no-any-return]
