"""A model's parameters, wherever they lie, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from trainer import zero

TOKENIZER_FILES: Final = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "generation_config.json",
)  # fmt: skip


def save_whole(
    model: Any,
    parameters: Iterable[tuple[str, Tensor]],
    source: Path,
    folder: Path,
    *,
    by_this_rank: bool,
) -> None:
    """Writes `parameters` as those of `model`, and the tokenizer that lies in `source`. One after
    another they are made whole, by all ranks together; one rank keeps and writes them."""
    whole = {}
    for name, parameter in parameters:
        with zero.gathered([parameter]):
            if by_this_rank:
                whole[name] = parameter.detach().cpu().clone()
    if not by_this_rank:
        return
    known = dict(model.named_parameters(remove_duplicate=False))
    whole |= {name: kept for name, kept in model.state_dict().items() if name not in known}
    model.save_pretrained(folder, state_dict=whole)
    for pattern in TOKENIZER_FILES:
        for file in source.glob(pattern):
            shutil.copy(file, folder)
