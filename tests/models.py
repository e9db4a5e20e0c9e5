"""A real, tiny language model and tokenizer for tests: two layers, built in about a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(folder: Path, *, seed: int = 0, tie: bool = True) -> Path:
    """Builds a Qwen2 model with random weights (2 layers, hidden 128, 4 heads of 32, 2 KV heads,
    260 ids) and a byte-level tokenizer with a ChatML template into `folder`; returns `folder`.
    Ids 0 to 3 are SPECIAL_TOKENS, the rest are bytes, so any text encodes. The caller's random
    state is left alone."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=tie,
        # Ten times the usual spread: distributions far from uniform, so that tests which compare
        # two models or two positions have something to tell apart.
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    # The class AutoTokenizer picks for this architecture; `unk_token` is given because otherwise it
    # would add an id beyond the model's vocabulary.
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
