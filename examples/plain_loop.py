"""Routing replay in a plain PyTorch loop: sample, score, update with the same routes.

python examples/plain_loop.py       # R3: the routes of the rollout
python examples/plain_loop.py r2    # R2: the routes of the old-log-prob pass
"""

import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import SamplingParams
from moe_replay.verification.agreement import route_agreement

mode = sys.argv[1] if len(sys.argv) > 1 else "r3"
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=100, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4, mlp_only_layers=[0],
    max_position_embeddings=64,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
prompts = [torch.randint(100, (length,)).tolist() for length in (5, 9, 7)]

replay = mr.attach(model)  # 1. once
engine = TransformersEngine(model, replay=replay)  # shares its weights with the trainer


def log_probs(input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return log-probs (B, W - 1) of every token but the first."""
    logits = model(input_ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


for step in range(3):
    samples = [one for group in engine.generate(prompts, SamplingParams(n=2, max_tokens=12)) for one in group]
    traces = [sample.trace for sample in samples]  # token ids and their experts
    rewards = torch.tensor([float((sample.completion_ids % 2 == 0).mean()) for sample in samples])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    layout = mr.TokenLayout.padded([len(trace) for trace in traces], side="right")  # 2. how the batch is padded
    input_ids = torch.tensor(layout.fed_token_ids([trace.token_ids for trace in traces], pad=0)).long()
    mask = torch.tensor(layout.fed >= 0).long()
    drawn = torch.tensor([[c >= len(s.prompt_ids) for c in range(1, mask.shape[1])] for s in samples]) & (
        mask[:, 1:] > 0
    )

    if mode == "r3":
        batch = mr.RouteBatch.from_traces(traces, layout)  # 3. the routes in the rows of the batch
        with torch.no_grad(), replay.replay(batch):
            old = log_probs(input_ids, mask)
    else:
        with torch.no_grad(), replay.record() as recording:  # 4. or record them here
            old = log_probs(input_ids, mask)
        batch = recording.batch()

    for _ in range(2):
        with replay.replay(batch, observe=True) as replaying:  # 5. in every update
            new = log_probs(input_ids, mask)
        ratio = (new - old).exp()
        loss = -(torch.min(ratio, ratio.clamp(0.8, 1.2)) * advantages[:, None])[drawn].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        agreement = route_agreement(batch, replaying.native()).mean()
        print(
            f"step {step}  reward {rewards.mean():.2f}  ratio {ratio[drawn].mean():.3f}  native routes {agreement:.1%}"
        )
