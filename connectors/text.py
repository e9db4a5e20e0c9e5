"""The tokenizer's edge: text enters and leaves here, everywhere else there are ids.

`Text` wraps a model folder's tokenizer. It never re-tokenises what a model sampled: callers
encode only new text (a prompt, a suffix) and decode only to show or to score."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connectors.config import ConfigError
from connectors.records import Prompt


class TextError(ValueError):
    """The input cannot become ids: the chat template refuses it, or an id is out of range."""


class Text:
    """`vocab_size` bounds ids. `stop_ids` end a generation: the tokenizer's end of sequence, what
    the model's generation_config names, and what the chat template ends an assistant's turn
    with."""

    def __init__(self, model_path: str | Path) -> None:
        """ConfigError when the folder holds no tokenizer."""
        from transformers import AutoTokenizer

        folder = Path(model_path)
        if not folder.is_dir():
            raise ConfigError(f"model.path: there is no folder {folder}")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ConfigError(f"model.path: no tokenizer in {folder}: {reason}") from error
        self.has_template = bool(getattr(self._tokenizer, "chat_template", None))
        self.vocab_size: int = max(len(self._tokenizer), _number(folder, "vocab_size"))
        self.stop_ids: tuple[int, ...] = self._stop_ids(folder)

    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the prompt: the rendered template with its generation prompt, the text with the
        tokenizer's own special tokens, or the given ids. TextError when there are none."""
        if prompt.token_ids is not None:
            ids = tuple(prompt.token_ids)
            if wrong := [i for i in ids if not 0 <= i < self.vocab_size]:
                raise TextError(
                    f"token id {wrong[0]} is outside the vocabulary of {self.vocab_size}"
                )
        elif prompt.prompt is not None:
            ids = tuple(self._tokenizer.encode(prompt.prompt))
        else:
            ids = tuple(self.encode(self.render(prompt.messages or [])))
        if not ids:
            raise TextError("the prompt is empty")
        return ids

    def render(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The conversation as the chat template writes it; TextError when it refuses."""
        if not self.has_template:
            raise TextError("the model's tokenizer has no chat template: use prompt or token_ids")
        if not messages:
            raise TextError("messages is empty")
        for n, message in enumerate(messages):
            # A template would write an absent role as nothing and say nothing.
            if not isinstance(message.get("role"), str):
                raise TextError(f"message {n} has no role")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                )
            )
        except (
            Exception
        ) as error:  # a template is a program of the model's author: it raises anything
            raise TextError(f"the chat template refuses the messages: {error}") from error

    def marked(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[tuple[int, int]]] | None:
        """The conversation as `render` writes it without a generation prompt, and which of its
        characters [start, end) the template marks as the assistant's own ({% generation %}); None
        when it marks none. TextError when it refuses."""
        from transformers.utils.chat_template_utils import render_jinja_template

        given = list(tools) if tools else None
        if not self.has_template:
            return None
        template = self._tokenizer.get_chat_template(tools=given)
        if not re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", template):
            return None
        try:
            rendered, spans = render_jinja_template(
                [list(messages)],
                tools=given,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # as in `render`
            raise TextError(f"the chat template refuses the messages: {error}") from error
        return str(rendered[0]), [(int(start), int(end)) for start, end in spans[0]]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no special token added (special tokens written in it are recognised)."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | NDArray[np.int32], *, special: bool = False) -> str:
        """Text of `ids`; with `special`, special tokens are written out."""
        # An array: of a list, transformers asks each id for its type, which costs more than the
        # decoding.
        array = np.asarray(ids, np.int64)
        return str(
            self._tokenizer.decode(
                array, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
        )

    def _stop_ids(self, folder: Path) -> tuple[int, ...]:
        found: list[int] = []
        if self._tokenizer.eos_token_id is not None:
            found.append(int(self._tokenizer.eos_token_id))
        named = _read(folder / "generation_config.json").get("eos_token_id")
        found += named if isinstance(named, list) else [named] if named is not None else []
        if self.has_template and (end := self._end_of_turn()) is not None:
            found.append(end)
        return tuple(dict.fromkeys(found))

    def _end_of_turn(self) -> int | None:
        """The token the template writes after an assistant's content, if it is a special one."""
        mark = "@@content@@"
        turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": mark}]
        try:
            rendered = self.render(turns, generation_prompt=False)
        except TextError:
            return None  # a template that wants more than this has no turn we could find
        if mark not in rendered:
            return None
        after = self.encode(rendered.rpartition(mark)[2].lstrip())
        special = {*self._tokenizer.all_special_ids, *self._tokenizer.added_tokens_decoder}
        return after[0] if after and after[0] in special else None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(folder: Path, key: str) -> int:
    found = _read(folder / "config.json").get(key, 0)
    return found if isinstance(found, int) else 0
