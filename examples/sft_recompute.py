"""Supervised fine-tuning with activation checkpointing: layers that are recomputed take the experts of their forward.

python examples/sft_recompute.py --steps 60

Kernels that add up in another order each time, and jitter, let a recomputed router choose other experts than its
forward did; the gradient is then that of neither. Here a little noise in what routers are given stands for that.
"""

import argparse
import random

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr

LETTERS = "abcdefghijklmnopqrstuvwxyz>."
NOISE = 2**-8  # the precision of bfloat16


def tiny_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(LETTERS), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2, mlp_only_layers=[0],
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


def examples(step: int, sequences: int = 32) -> dict[str, torch.Tensor]:
    """Return prompts of five letters with the same letters sorted as the completion, which alone is in the loss."""
    draw = random.Random(step)
    prompts = ["".join(draw.choices(LETTERS[:26], k=5)) for _ in range(sequences)]
    ids = torch.tensor([[LETTERS.index(c) for c in f"{text}>{''.join(sorted(text))}."] for text in prompts])
    return {"input_ids": ids, "labels": ids.where(torch.arange(ids.shape[1]) > 5, -100)}


class NoisyRouters:
    """Adds noise to what the routers of a model are given, and counts tokens whose second choice is another one."""

    def __init__(self, model: nn.Module, top_k: int) -> None:
        self.generator = torch.Generator()
        self.top_k, self.tokens, self.changed = top_k, 0, 0
        self.first: dict[nn.Module, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_pre_hook(self.add_noise)
                module.register_forward_hook(self.compare)

    def add_noise(self, router: nn.Module, args: tuple) -> tuple:
        noise = torch.randn(args[0].shape, generator=self.generator)
        return (args[0] * (1 + NOISE * noise), *args[1:])

    def compare(self, router: nn.Module, args: tuple, output: object) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        choice = logits.topk(self.top_k).indices.sort().values  # what it chooses without replay
        if router not in self.first:
            self.first[router] = choice
            return
        self.tokens += len(choice)
        self.changed += (choice != self.first.pop(router)).any(-1).sum().item()


def gradient(model: nn.Module, routers: NoisyRouters, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the gradient of all weights; every call draws the same noise in the forward."""
    routers.generator.manual_seed(0)
    routers.first.clear()
    model.zero_grad()
    model(**inputs).loss.backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def gradient_error(model: nn.Module, routers: NoisyRouters) -> torch.Tensor:
    """Return the relative error of the gradient with checkpointing against that without."""
    inputs = examples(-1)
    recomputed = gradient(model, routers, inputs)
    model.gradient_checkpointing_disable()
    expected = gradient(model, routers, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    routers.first.clear()
    return (recomputed - expected).norm() / expected.norm()


def train(steps: int, recompute_only: bool) -> None:
    model = tiny_model()
    routers = NoisyRouters(model, model.config.num_experts_per_tok)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.gradient_checkpointing_enable({"use_reentrant": True})  # the other kind may stop with a CheckpointError
    model.enable_input_require_grads()
    if recompute_only:
        mr.attach(model, recompute_only=True)  # all there is to do
    name = "recompute_only" if recompute_only else "native        "
    print(f"{name}  error of the gradient before training {gradient_error(model, routers):.1e}")
    for step in range(steps):
        loss = model(**examples(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            share = routers.changed / routers.tokens
            print(f"{name}  step {step:3}  loss {loss:.3f}  tokens that would take other experts {share:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    train(steps, recompute_only=False)
    train(steps, recompute_only=True)


if __name__ == "__main__":
    main()
