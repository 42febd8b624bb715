"""Anticipatory routing in pre-training: the experts of a batch are chosen some steps before it is trained on.

python examples/anticipatory_routing.py --steps 120 --ahead 4 --figure losses.svg

DeepSeek-V4 (arXiv 2606.19348) does so against spikes of the loss. Step t computes with the weights of step t, and takes
the experts that the weights of step t - ahead have chosen: they are recorded when the batch is fetched ahead.
"""

import argparse
import random
from collections import deque
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr
from moe_replay.verification.agreement import route_agreement

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
WORDS = ["".join(random.Random(i).choices(LETTERS[:26], k=2 + i % 6)) for i in range(60)]


def text_batch(step: int, sequences: int = 8, width: int = 48) -> torch.Tensor:
    """Return token ids (B, W) of made-up text, one per letter: a word decides what the next one may be."""
    draw, rows = random.Random(step), []
    for _ in range(sequences):
        word, text = draw.randrange(60), ""
        while len(text) < width:
            text += WORDS[word] + draw.choice([" ", " ", " ", ". "])
            word = (word * 7 + draw.randrange(3)) % 60
        rows.append([LETTERS.index(letter) for letter in text[:width]])
    return torch.tensor(rows)


def train(steps: int, ahead: int) -> list[float]:
    """Return the loss of every step; routes are chosen `ahead` steps before, 0: natively."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(LETTERS), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2, mlp_only_layers=[0],
        max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    replay = mr.attach(model)
    chosen: deque[mr.RouteBatch] = deque()  # of the batches that come next
    losses = []
    for step in range(steps):
        ids, agreement = text_batch(step), ""
        if len(chosen) == ahead > 0:
            routes = chosen.popleft()
            with replay.replay(routes, observe=True) as replaying:
                loss = model(ids, labels=ids).loss
            agreement = f"native routes agree {route_agreement(routes, replaying.native()).mean():.1%}"
        else:
            loss = model(ids, labels=ids).loss  # the first steps have nothing older to choose with
        if ahead:
            with torch.no_grad(), replay.record() as recording:
                model(text_batch(step + ahead))
            chosen.append(recording.batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0 or step == steps - 1:
            print(f"{ahead} steps ahead  step {step:3}  loss {losses[-1]:.3f}  {agreement}")
    replay.detach()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("--figure", type=Path, help="draw the losses into this file; needs matplotlib")
    options = parser.parse_args()
    curves = {f"{ahead} steps ahead": train(options.steps, ahead) for ahead in (0, options.ahead)}
    if options.figure is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4))
        axes = figure.subplots()
        for name, losses in curves.items():
            axes.plot(losses, label=name)
        axes.set(xlabel="step", ylabel="loss")
        axes.legend()
        figure.savefig(options.figure)


if __name__ == "__main__":
    main()
