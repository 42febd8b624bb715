"""Tiny models and helpers that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

import moe_replay as mr


def tiny_qwen3_moe(seed: int = 0, **overrides) -> nn.Module:
    """A Qwen3-MoE of 4 layers with a dense first one, 8 experts, top 2."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "use_cache": False,  # a cache would be filled twice by a recomputation that Transformers knows nothing of
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | overrides)))
    return model.eval()


def perturb_routers(replay: mr.RouterReplay, scale: float = 1.0, seed: int = 1) -> None:
    """Move the router weights so far that native routing changes for most tokens."""
    generator = torch.Generator().manual_seed(seed)
    for site in replay.sites.values():
        for parameter in site.module.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.data.add_(scale * parameter.data.std(correction=0) * noise + 1e-3 * noise)


def recorded(
    replay: mr.RouterReplay, run: Callable[[torch.Tensor], object], inputs: Sequence[torch.Tensor]
) -> list[mr.RouteBatch]:
    """Return the routes of a forward of each input; the routers are moved afterwards, so that replay matters."""
    batches = []
    for ids in inputs:
        with torch.no_grad(), replay.record() as recording:
            run(ids)
        batches.append(recording.batch())
    perturb_routers(replay)
    return batches


def random_ids(batch: int, width: int, seed: int = 0, vocabulary: int = 97) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, width), generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model, taken off it."""
    found = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"gradients differ: {different}"


def loss(output):
    return output.logits.float().pow(2).mean()


def uncover(batch: mr.RouteBatch, every: int) -> mr.RouteBatch:
    """The batch without routes in every n-th row."""
    lengths = [batch.fed_token_ids.shape[1]] * batch.fed_token_ids.shape[0]
    layout = mr.TokenLayout.padded(lengths)
    traces = batch.to_traces([row.tolist() for row in batch.fed_token_ids], layout)
    cut = []
    for trace in traces:
        valid = trace.valid.copy()
        valid[::every] = False
        cut.append(
            mr.RouteTrace(trace.token_ids, trace.routed_experts, trace.layers, valid, num_experts=trace.num_experts)
        )
    return mr.RouteBatch.from_traces(cut, layout)
