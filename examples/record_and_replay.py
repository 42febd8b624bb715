"""Record the routes of a tiny MoE, perturb its routers, and replay the recorded routes.

python examples/record_and_replay.py
"""

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr
from moe_replay.verification.agreement import route_agreement

torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=1000, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=32, num_experts_per_tok=4, mlp_only_layers=[0],
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
sequences = [torch.randint(1000, (length,)).tolist() for length in (50, 31, 64)]
layout = mr.TokenLayout.padded([len(ids) for ids in sequences], side="left")
input_ids = torch.tensor(layout.fed_token_ids(sequences, pad=0), dtype=torch.long)
mask = torch.tensor(layout.fed >= 0, dtype=torch.long)

replay = mr.attach(model)
with torch.no_grad(), replay.record() as recording:  # R2: the old-log-prob pass
    model(input_ids, attention_mask=mask)
traces = recording.traces(layout, sequences)  # for R3, an engine sends these
print("recorded  ", traces[0])

with torch.no_grad():  # a policy update, much larger than a real one
    for site in replay.sites.values():
        site.module.weight.add_(0.5 * site.module.weight.std() * torch.randn_like(site.module.weight))

batch = mr.RouteBatch.from_traces([mr.RouteTrace.from_bytes(trace.to_bytes()) for trace in traces], layout)
with replay.replay(batch, observe=True) as replaying:
    loss = model(input_ids, attention_mask=mask).logits.logsumexp(-1).mean()
loss.backward()  # with gradient checkpointing, recomputed layers find their routes too

print("layer      native routing agrees   router gradient")
for layer, agreement in zip(batch.layers, route_agreement(batch, replaying.native()), strict=True):
    print(f"{layer:5}      {agreement:20.1%}   {replay.sites[layer].module.weight.grad.norm():15.2e}")
print(f"replayed   {batch.coverage.replayed} routes of {batch.coverage.token_rows} tokens, as recorded")

other_tokens = input_ids.roll(1, dims=1)  # off by one token: a typical silent bug
try:
    with replay.replay(batch):
        model(other_tokens, attention_mask=mask)
except mr.AlignmentError as error:
    print("refused   ", error)
