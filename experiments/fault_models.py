"""The weights of the study of faults: a small trained model for each seed, and what a faulty engine would hold.

A Qwen3-MoE (a dense layer, 8 MoE layers, 32 experts, top 4, 1.7 million parameters) is trained on the worked problems
of `task.py`; each seed has other initial weights and other problems. The trainer's weights are those after 20 more
updates, a sync apart from `before`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from experiments.model import PAD_ID, batch_of, build_model, draw_batches, learn
from experiments.scales import TINY, Scale
from experiments.task import build_tokenizer
from moe_replay.demo.warm_start import one_thread

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

SCALE = replace(
    TINY,
    **{"name": "faults", "layers": 9, "experts": 32, "top_k": 4, "taught": (1, 6), "asked": (4, 6)},
    **{"batch_tokens": 1024, "steps": 500, "warmup": 30, "max_tokens": 96},
)
UPDATES = 20
"""Of the weights after the sync, at a tenth of the learning rate of training."""
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
LORA_LR = 1e-3
VARIANTS = ("before", "one_before", "after", "lora", "expert_slice", "router_bf16")
"""Folders of a seed. `after`: the trainer's weights; `lora`: the same with a merged adapter, for the trainer alone."""


def prepare(folder: Path, seed: int, scale: Scale = SCALE) -> Path:
    """Return the folder of a seed, with a model folder for each of `VARIANTS`; train them unless it has them."""
    of_seed = folder / f"seed-{seed}"
    if (of_seed / VARIANTS[-1]).exists():
        return of_seed
    with one_thread():
        model, optimizer = new_model(scale, seed)
        train(model, optimizer, scale, seed, range(scale.steps))
        save(model, of_seed / "before")
        train(model, optimizer, scale, seed, range(scale.steps, scale.steps + UPDATES - 1))
        save(model, of_seed / "one_before")
        train(model, optimizer, scale, seed, range(scale.steps + UPDATES - 1, scale.steps + UPDATES))
        save(model, of_seed / "after")
        save(with_adapter(of_seed / "after", scale, seed), of_seed / "lora")
        for name, spoil in (("expert_slice", first_slice_twice), ("router_bf16", round_routers)):
            spoilt = load(of_seed / "after")
            spoil(spoilt)
            save(spoilt, of_seed / name)
    return of_seed


def load(folder: Path) -> Qwen3MoeForCausalLM:
    """Return a model in float32."""
    from transformers import Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)


def new_model(scale: Scale, seed: int) -> tuple[Qwen3MoeForCausalLM, torch.optim.Optimizer]:
    from transformers import Qwen3MoeForCausalLM

    config = build_model(scale).config
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    return model, torch.optim.AdamW(weights, betas=(0.9, 0.95), weight_decay=0.1)


def train(model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, scale: Scale, seed: int, steps: range) -> None:
    """Take these steps on worked problems; beyond `scale.steps` at the last learning rate of the schedule."""
    model.train()
    began, batches = time.monotonic(), list[list[list[int]]]()
    for step in steps:
        if not batches:
            batches = draw_batches(scale, 10_000 * (seed + 1) + step)
        loss = learn(model, optimizer, scale, min(step, scale.steps), batch_of(batches.pop(), "cpu"))
        if step % 50 == 0:
            print(f"seed {seed}, step {step}, loss {float(loss):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval()


def with_adapter(folder: Path, scale: Scale, seed: int) -> Qwen3MoeForCausalLM:
    """Return the model with a LoRA adapter on attention, routers frozen, trained for UPDATES steps and merged."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    adapted = get_peft_model(load(folder), LoraConfig(**LORA)).train()
    optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=LORA_LR)
    batches = draw_batches(scale, 10_000 * (seed + 1) - 1)
    for lessons in (batches * UPDATES)[:UPDATES]:
        ids = batch_of(lessons, "cpu")
        is_token = ids.ne(PAD_ID)
        adapted(input_ids=ids, attention_mask=is_token.long(), labels=ids.where(is_token, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return adapted.merge_and_unload().eval()


@torch.no_grad()
def first_slice_twice(model: Qwen3MoeForCausalLM) -> None:
    """Give the second of two expert-parallel ranks the experts of the first: an offset left out."""
    for layer in model.model.layers[1:]:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            half = len(weight) // 2
            weight[half:] = weight[:half].clone()


@torch.no_grad()
def round_routers(model: Qwen3MoeForCausalLM) -> None:
    """Round the weights of the routers to bfloat16, as a wire format in bfloat16 does."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.bfloat16())


def save(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    build_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
