"""Routing replay in a Megatron-Core `forward_step`, as Megatron's own schedules call it. Here on one CPU.

python examples/megatron_forward_step.py
"""

import torch
import torch.distributed as dist

import moe_replay as mr
from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.replay.adapters.megatron_settings import layout_for
from moe_replay.verification.agreement import route_agreement

megatron_cpu.enable()  # without a GPU only, together with megatron_cpu.SETTINGS below

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    **megatron_cpu.SETTINGS, num_layers=4, hidden_size=64, num_attention_heads=4, ffn_hidden_size=64,
    num_moe_experts=16, moe_router_topk=4, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1, 1, 1],
    moe_enable_routing_replay=True, moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
    add_bias_linear=False, gated_linear_unit=True, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
    recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
)  # fmt: skip
spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
model = GPTModel(config, spec, vocab_size=100, max_sequence_length=64, position_embedding_type="rope")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
replay = mr.attach(model)  # 1. or the list of this rank's pipeline chunks

WIDTH = 16
micro_batches = [[torch.randint(100, (length,)).tolist() for length in lengths] for lengths in ((9, 16), (5, 12))]


def inputs_of(layout: mr.TokenLayout, ids: list[list[int]]) -> dict[str, torch.Tensor]:
    tokens = torch.tensor(layout.fed_token_ids(ids, pad=0)).long()
    mask = torch.ones(1, 1, WIDTH, WIDTH, dtype=torch.bool).triu(1)
    return {"input_ids": tokens, "position_ids": torch.arange(WIDTH).expand_as(tokens), "attention_mask": mask}


routes, agreements = [], []
for ids in micro_batches:  # R2; with R3 the traces come from the rollout
    layout = layout_for(config, [len(one) for one in ids], width=WIDTH)  # 2. the rows of this rank
    with torch.no_grad(), replay.record() as recording:  # 3.
        model(**inputs_of(layout, ids))
    routes.append(recording.traces(layout, ids))


def forward_step(iterator, model):
    """One micro-batch through one chunk."""
    ids, traces = next(iterator)
    layout = layout_for(config, [len(trace) for trace in traces], width=WIDTH)
    batch = mr.RouteBatch.from_traces(traces, layout, replay.layers_of(model))  # 4. the layers of this chunk
    with replay.replay(batch, observe=True) as replaying:  # 5.
        logits = model(**inputs_of(layout, ids))
    agreements.append(route_agreement(batch, replaying.native()).mean())

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict]:
        value = output.logsumexp(-1).mean()
        return value, {"loss": value.detach()}

    return logits, loss


for step in range(3):
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(zip(micro_batches, routes, strict=True)),
        model=model,
        num_microbatches=len(micro_batches),
        seq_length=WIDTH,
        micro_batch_size=2,
        forward_only=False,
    )
    optimizer.step()
    optimizer.zero_grad()
    mean = torch.stack([one["loss"] for one in losses]).mean()
    print(f"step {step}  loss {mean:.4f}  native routes agree {torch.stack(agreements).mean():.1%}")
    agreements.clear()
dist.destroy_process_group()
