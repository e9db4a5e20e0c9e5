"""The section `[trainer.lora]`: train low-rank adapters of a model whose own weights stay."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from connectors.config.section import Section


class Lora(Section):
    """Hu et al. 2021 (arXiv 2106.09685): of each target W, W + alpha / rank * B @ A is what the
    model computes with, and A and B are what is trained, published and checkpointed."""

    rank: int = Field(16, ge=1, le=1024)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0, le=1e6)
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Linear layers by the last parts of their names, such as `q_proj` or `self_attn.q_proj`;
    `all-linear`: every one but the output embedding."""

    @property
    def scale(self) -> float:
        """What B @ A is multiplied by."""
        return self.alpha / self.rank
