"""A Qwen3-MoE with random weights, written layer by layer: the device holds one layer at a time, the host too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def write_random_model(folder: Path, config: Any, device: torch.device) -> int:
    """Write the config and a shard for each layer, under the names of a checkpoint; return the number of parameters."""
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    draw = torch.Generator(device).manual_seed(0)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype)
    shard_of: dict[str, str] = {}
    parameters = size = 0
    for number, shapes in enumerate(_shards(config)):
        file = f"model-{number:05d}.safetensors"
        tensors = _random(shapes, config.initializer_range, dtype, device, draw)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        shard_of |= dict.fromkeys(tensors, file)
        parameters += sum(tensor.numel() for tensor in tensors.values())
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": shard_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return parameters


def _random(
    shapes: Shapes, std: float, dtype: torch.dtype, device: torch.device, draw: torch.Generator
) -> dict[str, Tensor]:
    """Return norms of ones and normal values for all else, drawn together."""
    drawn = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    sizes = [torch.Size(shape).numel() for shape in drawn.values()]
    values = torch.empty(sum(sizes), dtype=dtype, device=device).normal_(0.0, std, generator=draw).cpu().split(sizes)
    tensors = {name: part.view(shape) for (name, shape), part in zip(drawn.items(), values, strict=True)}
    return tensors | {name: torch.ones(shape, dtype=dtype) for name, shape in shapes.items() if name not in drawn}


def _shards(config: Any) -> Iterator[Shapes]:
    """Yield the shapes of what is in each file: embeddings and head, then each layer."""
    vocabulary = (config.vocab_size, config.hidden_size)
    outer: Shapes = {"model.embed_tokens.weight": vocabulary, "model.norm.weight": (config.hidden_size,)}
    yield outer | ({} if config.tie_word_embeddings else {"lm_head.weight": vocabulary})
    for layer in range(config.num_hidden_layers):
        is_dense = layer in config.mlp_only_layers
        shapes = {**_attention(config), **(_mlp("mlp", config, config.intermediate_size) if is_dense else _moe(config))}
        yield {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def _attention(config: Any) -> Shapes:
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    norms: Shapes = {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return norms | {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
    }


def _moe(config: Any) -> Shapes:
    shapes: Shapes = {"mlp.gate.weight": (config.num_experts, config.hidden_size)}
    for expert in range(config.num_experts):
        shapes |= _mlp(f"mlp.experts.{expert}", config, config.moe_intermediate_size)
    return shapes


def _mlp(prefix: str, config: Any, width: int) -> Shapes:
    hidden = config.hidden_size
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
