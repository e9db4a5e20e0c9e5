"""The policy that is trained: a pack enters, log-probs of its trained tokens leave.

A causal language model of transformers whose attention is that of packed rows
(`trainer.attention`), with its head applied at the trained tokens only (`trainer.logprobs`).
`check_head` and `check_packing` hold it, at start, against what the model itself computes of each
row alone.

Legend: P packed positions, N trained tokens, T tokens of one row, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.distributed import ProcessGroup

from connectors.config import ConfigError
from trainer import attention
from trainer.attention import PackedRows
from trainer.batches import Rows
from trainer.logprobs import chosen_logprobs
from trainer.packing import Pack, pack
from trainer.sequence_parallel import gathered, own_places, own_slice

NO_DROPOUT: Final = ("dropout", "pdrop", "jitter_noise")
"""How settings that make a model's forward pass random end."""


class PolicyModel(torch.nn.Module):
    """A Hugging Face causal language model whose forward answers with log-probs of trained tokens.

    `sequence_group`: ranks that run the same packs, each a slice of them. ConfigError for a model
    whose attention cannot be replaced."""

    def __init__(
        self, model: Any, temperature: float, sequence_group: ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.sequence_group = sequence_group
        self._attend_as(attention.NAME)

    def forward(self, pack: Pack, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """(log-probs [N], entropies [N]) of the pack's targets given the tokens before them in
        their rows, float32; the entropies carry a gradient if asked."""
        group = self.sequence_group
        tokens_P, position_ids_P, places_N = pack.tokens_P, pack.position_ids_P, pack.predictor_N
        targets_N = pack.targets_N
        if group is not None:
            own_N, places_N = own_places(places_N, len(tokens_P), group)
            targets_N = targets_N[own_N]
            tokens_P, position_ids_P = own_slice(tokens_P, group), own_slice(position_ids_P, group)
        hidden_PH = self.model.base_model(
            input_ids=tokens_P[None],
            position_ids=position_ids_P[None],
            use_cache=False,
            packed_rows=PackedRows.of(pack, group),
        ).last_hidden_state[0]
        logprobs_N, entropy_N = chosen_logprobs(
            hidden_PH.index_select(0, places_N),
            self._head_VH,
            targets_N,
            self.temperature,
            entropy_gradient=entropy_gradient,
        )
        if group is not None:
            logprobs_N = gathered(logprobs_N, own_N, group)
            entropy_N = gathered(entropy_N, own_N, group)
        return logprobs_N, entropy_N

    @torch.no_grad()
    def check_head(self) -> None:
        """ConfigError if the model's logits are more than its output embedding times its last
        hidden state (a bias, a soft cap, a scale): its log-probs would be wrong without a sound."""
        gap = self._gap(_rows(self._num_ids, (16,), shared=0))
        if not gap <= self._tolerance:
            raise ConfigError(
                f"{type(self.model).__name__}: log-probs computed from the output embedding differ "
                f"from the model's own by {gap:.3g}; heads with a bias, scale or soft cap are not "
                "supported"
            )

    @torch.no_grad()
    def check_packing(self) -> None:
        """ConfigError if a row's log-probs depend on what it is packed with: the model carries
        state from token to token by other ways than attention (a recurrence, a convolution), or
        builds masks of its own."""
        gap = self._gap(_rows(self._num_ids, (24, 9, 33, 40, 17), shared=16))
        if not gap <= self._tolerance:
            raise ConfigError(
                f"{type(self.model).__name__}: log-probs of packed rows differ from those of each "
                f"row alone by {gap:.3g}; models in which tokens meet elsewhere than in attention "
                "are not supported"
            )

    def _gap(self, rows: Rows) -> float:
        """The largest between our log-probs of rows in one pack and the model's own, row by row and
        by the attention it comes with."""
        device = self._head_VH.device
        advantages = [np.zeros(len(tokens)) for tokens in rows.tokens]
        ours_N, _ = self(pack(rows, range(len(rows)), advantages).to(device))
        with self._own_attention():
            theirs_N = torch.cat([self._alone(tokens, device) for tokens in rows.tokens])
        return float((ours_N - theirs_N).abs().max())

    def _alone(self, tokens: Any, device: torch.device) -> Tensor:
        """Log-probs [T - 1] of all tokens but the first."""
        tokens_T = torch.from_numpy(tokens.astype(np.int64)).to(device)
        logits = self.model(input_ids=tokens_T[None], use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / self.temperature, -1)
        return logprobs.gather(1, tokens_T[1:, None])[:, 0]

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        self._attend_as("sdpa")
        try:
            yield
        finally:
            self._attend_as(attention.NAME)

    def _attend_as(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)
        if self.model.config._attn_implementation != implementation:
            raise ConfigError(
                f"{type(self.model).__name__}: its attention cannot be replaced; only models built "
                "on transformers' attention interface are supported"
            )

    @property
    def _head_VH(self) -> Tensor:
        # Used outside its module's forward, so not gathered there under ZeRO-3: DeepSpeed notes, at
        # the first such use within our forward, that this module needs it too.
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def _num_ids(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)  # under ZeRO-3 weights are empty

    @property
    def _tolerance(self) -> float:
        return 1e-3 if self._head_VH.dtype == torch.float32 else 0.25


def load_policy(
    path: Path,
    dtype: torch.dtype,
    temperature: float,
    *,
    gradient_checkpointing: bool = False,
    sequence_group: ProcessGroup | None = None,
) -> PolicyModel:
    """That of a Hugging Face folder, without dropout: its log-probs must be those of the policy
    that samples. `gradient_checkpointing`: layers are computed again in the backward pass of a
    model in training mode, for less memory."""
    transformers.utils.logging.disable_progress_bar()
    settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    for key, value in vars(settings).items():
        if key.endswith(NO_DROPOUT) and isinstance(value, float):
            setattr(settings, key, 0.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, config=settings, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return PolicyModel(model, temperature, sequence_group)


def _rows(num_ids: int, lengths: tuple[int, ...], shared: int) -> Rows:
    """Of one group; those longer than `shared` begin with the same so many tokens. All but the
    first token of each are trained."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, num_ids, length).astype(np.int32) for length in lengths]
    for row in tokens[1:]:
        if len(row) > shared:
            row[:shared] = tokens[0][:shared]
    return Rows(
        ids=tuple(f"check/{i}" for i in range(len(tokens))),
        tokens=tuple(tokens),
        masks=tuple(np.arange(len(row)) > 0 for row in tokens),
        logprobs=tuple(np.zeros(len(row), np.float32) for row in tokens),
        rewards=np.zeros(len(tokens)),
        groups=np.zeros(len(tokens), np.int64),
    )
