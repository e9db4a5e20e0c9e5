"""One run of TRL's GRPOTrainer, in TRL's own interpreter, which has none of our packages.

    TRL/bin/python -m benchmarks.trl_run ORDER.json RUN.json

Set up as one who knows TRL would on a machine without a GPU: the whole batch in one generation and
one forward pass, all cores, no gradient checkpointing, float32, nothing logged, saved or evaluated.
The rest is what Headwater does, too: no KL, clipping at 0.2, the mean over tokens, AdamW at a
constant rate.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_reward import exact, judged
from benchmarks.trl_workload import Order, Run, Workload

PACKAGES: Final = ("trl", "torch", "transformers", "accelerate", "datasets")


def configuration(order: Order) -> GRPOConfig:
    workload = order.workload
    return GRPOConfig(
        output_dir=str(Path(order.prompts).parent / "trl-output"),
        # The batch: one generation, one forward pass and one optimizer step each.
        per_device_train_batch_size=workload.num_rows,
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        num_generations=workload.group_size,
        max_completion_length=workload.max_tokens,
        max_steps=workload.num_steps,
        shuffle_dataset=False,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        # The step's mathematics.
        beta=0.0,
        epsilon=0.2,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        # The machine.
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        use_vllm=False,
        seed=order.seed,
        # Nothing beside it.
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


class Timed(GRPOTrainer):
    """Notes what it generated and how long it and the rewards took."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.parts_s: dict[str, list[float]] = {"rollout": [], "reward": []}
        self.num_tokens: list[int] = []
        self.rewards: list[float] = []
        self.prompt_ids: dict[str, list[int]] = {}
        self._asked: list[list[int]] = []

    def _generate_single_turn(self, prompt_ids: Any, *more: Any, **named: Any) -> Any:
        self._asked = [list(ids) for ids in prompt_ids]
        began = time.perf_counter()
        found = super()._generate_single_turn(prompt_ids, *more, **named)
        self.parts_s["rollout"].append(time.perf_counter() - began)
        return found

    def _calculate_rewards(self, inputs: Any, *more: Any) -> Any:
        began = time.perf_counter()
        found = super()._calculate_rewards(inputs, *more)
        self.parts_s["reward"].append(time.perf_counter() - began)
        self.rewards.append(float(found.mean()))
        completion_ids = more[-1]
        self.num_tokens.append(sum(map(len, completion_ids)))
        self.prompt_ids |= dict(zip((one["id"] for one in inputs), self._asked, strict=True))
        return found


class Ends(TrainerCallback):
    """When each step ended, and the processor's seconds until then."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.processor_s: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.at.append(time.time())
        self.processor_s.append(time.process_time())


def instant(completions: Any, reward: Any, **more: Any) -> list[float]:
    pairs = zip(completions, reward, strict=True)
    return [exact(one[0]["content"], answer) for one, answer in pairs]


async def slow(completions: Any, reward: Any, **more: Any) -> list[float]:
    """All sleep at once."""
    pairs = zip(completions, reward, strict=True)
    return await asyncio.gather(*(judged(one[0]["content"], wanted) for one, wanted in pairs))


def prompts(file: str, workload: Workload) -> Dataset:
    """As many as it trains, in order."""
    lines = Path(file).read_text().splitlines()[: workload.num_steps * workload.groups_per_step]
    found = [json.loads(line) for line in lines]
    return Dataset.from_list([{**line, "prompt": line.pop("messages")} for line in found])


def train(order: Order) -> Run:
    torch.set_num_threads(order.num_threads)
    workload, ends = order.workload, Ends()
    tokenizer = AutoTokenizer.from_pretrained(order.model)
    settings = configuration(order)
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(order.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=slow if workload.is_slow else instant,
        args=settings,
        train_dataset=prompts(order.prompts, workload),
        callbacks=[ends],
    )
    trainer.train()
    first, num = workload.num_skipped - 1, workload.num_steps - workload.num_skipped
    return Run(
        workload=workload.name,
        system="trl",
        seed=order.seed,
        ends_s=ends.at,
        rewards=trainer.rewards,
        num_tokens=trainer.num_tokens,
        parts_s=trainer.parts_s,
        processor_s={"trl": (ends.processor_s[-1] - ends.processor_s[first]) / num},
        prompt_ids=trainer.prompt_ids,
        settings={
            "num_threads": torch.get_num_threads(),
            "stop_ids": sorted(trainer.eos_token_ids),
            "attention": trainer.model.config._attn_implementation,
            "dtype": str(trainer.model.dtype),
        },
        versions={package: version(package) for package in PACKAGES},
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(train(Order.read(Path(sys.argv[1]))).text)
