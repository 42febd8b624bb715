"""Routing replay with Accelerate: each process replays its own samples; here R2, on two micro-batches a step.

torchrun --nproc-per-node 2 examples/accelerate_loop.py     # or accelerate launch, on GPUs
python examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_replay as mr
from moe_replay.verification.agreement import route_agreement

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=100, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=4, mlp_only_layers=[0],
    use_cache=False,
)  # fmt: skip
model = Qwen3MoeForCausalLM(config)
model.gradient_checkpointing_enable()
replay = mr.attach(model)  # 1. before or after prepare(), which wraps the model
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-4))

random = torch.Generator().manual_seed(accelerator.process_index)
sequences = [[torch.randint(100, (n,), generator=random).tolist() for n in lengths] for lengths in ((9, 20), (14, 6))]


def inputs_of(layout: mr.TokenLayout, ids: list[list[int]]) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.tensor(layout.fed_token_ids(ids, pad=0)).long().to(accelerator.device),
        "attention_mask": torch.tensor(layout.fed >= 0).long().to(accelerator.device),
    }


layouts = [mr.TokenLayout.padded([len(one) for one in ids], side="left") for ids in sequences]  # 2.
routes = []
for layout, ids in zip(layouts, sequences, strict=True):
    with torch.no_grad(), replay.record() as recording:  # 3. the old-log-prob pass
        model(**inputs_of(layout, ids))
    routes.append(recording.batch())  # 4. stays on the device; recording.traces(layout, ids) would travel

for _ in range(3):
    agreements = []
    for layout, ids, batch in zip(layouts, sequences, routes, strict=True):
        with accelerator.accumulate(model):
            with replay.replay(batch, observe=True) as replaying:  # 5.
                loss = model(**inputs_of(layout, ids)).logits.logsumexp(-1).mean()
            accelerator.backward(loss)  # layers that are run again find their routes by themselves
            optimizer.step()
            optimizer.zero_grad()
        agreements.append(route_agreement(batch, replaying.native()).mean())
    mean = accelerator.gather(torch.stack(agreements)).mean()
    accelerator.print(f"loss {loss.item():.4f}  native routes agree {mean:.1%}")
accelerator.end_training()
