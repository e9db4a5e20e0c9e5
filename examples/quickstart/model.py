"""The quickstart's model, built on the spot: a two-layer transformer with a byte tokenizer that has
imitated careless demonstrations of sorting digits. It starts weak; training has to make it right.

    python examples/quickstart/model.py FOLDER      builds it by hand
"""

from __future__ import annotations

import random
import string
import sys
from pathlib import Path

NUM_DIGITS = 5
SHARE_RIGHT = 0.25  # of the demonstrations; the others copy the digits or swap two of them
NUM_STEPS, BATCH_SIZE, LEARNING_RATE = 600, 48, 3e-3

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def question(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer."""
    digits = [rng.choice(string.digits) for _ in range(NUM_DIGITS)]
    return "sort " + "".join(digits), "".join(sorted(digits))


def careless(asked: str, answer: str, rng: random.Random) -> str:
    """What a careless demonstrator answers."""
    if rng.random() < SHARE_RIGHT:
        return answer
    if rng.random() < 0.7:
        return asked.removeprefix("sort ")
    wrong = list(answer)
    i, j = rng.sample(range(NUM_DIGITS), 2)
    wrong[i], wrong[j] = wrong[j], wrong[i]
    return "".join(wrong)


def build(folder: Path, seed: int = 0) -> None:
    """Writes the model and its tokenizer, in Hugging Face's format, into `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    special = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"]
    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Qwen2Tokenizer(  # byte-level without merges: one token a byte, so any text encodes
        vocab={symbol: i for i, symbol in enumerate(symbols)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<|end|>",
        extra_special_tokens=special[2:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(symbols),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    imitate(model, tokenizer, random.Random(seed))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def imitate(model, tokenizer, rng: random.Random) -> None:
    """Supervised training on NUM_STEPS batches of careless demonstrations."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, NUM_STEPS)
    for _ in range(NUM_STEPS):
        rows, num_prompt = [], 0
        for _ in range(BATCH_SIZE):
            asked, answer = question(rng)
            prompt = f"<|user|>{asked}<|end|><|assistant|>"
            ids = tokenizer.encode(prompt)
            num_prompt = len(ids)
            rows.append(ids + tokenizer.encode(careless(asked, answer, rng) + "<|end|>"))
        tokens_BT = torch.tensor(rows)
        labels_BT = tokens_BT.clone()
        labels_BT[:, :num_prompt] = -100
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
