"""Routing replay with FSDP2: sharded weights, gradient checkpointing, routes that came over the wire (R3).

torchrun --nproc-per-node 2 examples/fsdp2_loop.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr
from moe_replay.verification.agreement import route_agreement

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=100, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4, mlp_only_layers=[0],
    use_cache=False,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
model.gradient_checkpointing_enable()
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
replay = mr.attach(model)  # 1. before or after fully_shard
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

random = torch.Generator().manual_seed(dist.get_rank())
ids = [torch.randint(100, (length,), generator=random).tolist() for length in (9, 20)]  # this rank's samples
layout = mr.TokenLayout.padded([len(one) for one in ids])  # 2.
input_ids = torch.tensor(layout.fed_token_ids(ids, pad=0)).long()
mask = torch.tensor(layout.fed >= 0).long()

with torch.no_grad(), replay.record() as recording:  # 3. in place of a remote engine, which sends traces as bytes
    model(input_ids, attention_mask=mask)
sent = [trace.to_bytes() for trace in recording.traces(layout, ids)]

traces = [mr.RouteTrace.from_bytes(one) for one in sent]
batch = mr.RouteBatch.from_traces(traces, layout)  # 4.
for step in range(3):
    with replay.replay(batch, observe=True) as replaying:  # 5.
        loss = model(input_ids, attention_mask=mask).logits.logsumexp(-1).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    agreement = route_agreement(batch, replaying.native()).mean()
    if dist.get_rank() == 0:
        print(f"step {step}  loss {loss.item():.4f}  native routes agree {agreement:.1%}")
dist.destroy_process_group()
