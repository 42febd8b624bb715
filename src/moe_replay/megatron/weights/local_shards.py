"""What this rank, and every other, holds of a Megatron-Core model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moe_replay.distributed.collectives import all_gather
from moe_replay.megatron.weights.errors import WeightMapError
from moe_replay.megatron.weights.tensor_slices import ParameterShard, Shape

# Transformer Engine puts a norm into the projection after it, and the local experts side by side.
_ENGINE_NAMES = [
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"self_attention\.linear_(q|kv)_up_proj\.layer_norm_weight$"), r"self_attention.\1_layernorm.weight"),
    (re.compile(r"mlp\.experts\.linear_(fc[12])\.weight(\d+)$"), r"mlp.experts.local_experts.\2.linear_\1.weight"),
]
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_EXPERT_BIAS = "router.expert_bias"  # a buffer that is part of the weights


class ParameterSpec(NamedTuple):
    """A parameter as the ranks of one pipeline stage hold it: plain numbers, to be sent around.

    key     with {layer} and {expert} in the place of their numbers
    layer   of the whole model
    expert  of those on one rank
    shape   of a shard
    dim     along which it is cut, or None
    """

    key: str
    layer: int | None
    expert: int | None
    shape: Shape
    dtype: torch.dtype
    dim: int | None


class ParallelGroups(NamedTuple):
    """The process groups that a model is spread over."""

    tensor: Any
    expert_tensor: Any
    expert: Any
    pipeline: Any

    @classmethod
    def of_this_process(cls) -> ParallelGroups:
        """Those that Megatron-Core was started with."""
        from megatron.core import parallel_state as ps

        return cls(
            ps.get_tensor_model_parallel_group(),
            ps.get_expert_tensor_parallel_group(),
            ps.get_expert_model_parallel_group(),
            ps.get_pipeline_model_parallel_group(),
        )


@dataclass(frozen=True)
class LocalModel:
    """The chunks of this rank.

    specs   of each pipeline stage
    tensors of the specs of this rank's stage, in their order
    """

    config: Any
    groups: ParallelGroups
    specs: tuple[tuple[ParameterSpec, ...], ...]
    tensors: tuple[Tensor, ...]
    is_tied: bool

    @classmethod
    def of(cls, chunks: nn.Module | Sequence[nn.Module]) -> LocalModel:
        """Every rank of the model must ask: they tell each other what they hold."""
        models = [_language_model(chunk) for chunk in ([chunks] if isinstance(chunks, nn.Module) else chunks)]
        groups = ParallelGroups.of_this_process()
        mine = [found for model in models for found in _named_tensors(model)]
        own = tuple(_spec(name, tensor) for name, tensor in mine)
        stages = all_gather(np.frombuffer(specs_to_json(own), np.uint8), groups.pipeline)
        return cls(
            models[0].config,
            groups,
            tuple(specs_from_json(stage.tobytes()) for stage in stages),
            tuple(tensor for _, tensor in mine),
            models[0].share_embeddings_and_output_weights,
        )

    @property
    def own(self) -> Iterator[tuple[ParameterSpec, Tensor]]:
        """The specs of this rank, and what is in them."""
        return zip(self.specs[self.groups.pipeline.rank()], self.tensors, strict=True)

    @property
    def device(self) -> torch.device:
        """Where this rank's weights are."""
        return self.tensors[0].device

    def spread(self, spec: ParameterSpec) -> tuple[Any, Any]:
        """The groups that a parameter is spread over: by experts, and by shards. None where it is not."""
        by_expert = None if spec.expert is None else self.groups.expert
        if spec.dim is None:
            return by_expert, None
        return by_expert, self.groups.tensor if spec.expert is None else self.groups.expert_tensor

    def spread_sizes(self, spec: ParameterSpec) -> tuple[int, int]:
        """How many expert ranks and how many shard ranks hold a part of a parameter."""
        by_expert, by_shard = (1 if group is None else group.size() for group in self.spread(spec))
        return by_expert, by_shard

    def shard(self, spec: ParameterSpec, expert_rank: int, rank: int) -> ParameterShard:
        """What one rank holds of a parameter, by its place among those that the parameter is spread over."""
        expert = spec.expert
        if expert is not None:
            expert += expert_rank * self.config.num_moe_experts // self.groups.expert.size()
        _, size = self.spread_sizes(spec)
        return ParameterShard(spec.key, spec.shape, spec.dim, spec.layer, expert, self.config, rank, size)

    def own_shard(self, spec: ParameterSpec) -> ParameterShard:
        """What this rank holds of a parameter."""
        expert_rank, rank = (0 if group is None else group.rank() for group in self.spread(spec))
        return self.shard(spec, expert_rank, rank)

    def whole(self) -> Iterator[ParameterShard]:
        """Every parameter of the whole model, uncut, those of all experts included."""
        for specs in self.specs:
            for spec in specs:
                for expert_rank in range(self.spread_sizes(spec)[0]):
                    yield self.shard(spec, expert_rank, 0).uncut()


def whole_model_name(name: str, layer_numbers: Sequence[int]) -> tuple[str, int | None, int | None]:
    """The key of a parameter, its layer in the whole model, and its expert among those of this rank."""
    for pattern, plain in _ENGINE_NAMES:
        name = pattern.sub(plain, name)
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    key = _EXPERT.sub("{expert}", _LAYER.sub("{layer}", name))
    return key, layer and layer_numbers[int(layer[0])] - 1, expert and int(expert[0])


def specs_to_json(specs: Sequence[ParameterSpec]) -> bytes:
    """Encode specs as JSON, to be sent to other ranks."""
    return json.dumps([[*spec[:4], str(spec.dtype).removeprefix("torch."), spec.dim] for spec in specs]).encode()


def specs_from_json(data: bytes) -> tuple[ParameterSpec, ...]:
    """Decode what `specs_to_json` has encoded."""
    return tuple(
        ParameterSpec(key, layer, expert, tuple(shape), getattr(torch, dtype), dim)
        for key, layer, expert, shape, dtype, dim in json.loads(data)
    )


def _language_model(chunk: nn.Module) -> Any:
    """The model inside DDP and Float16Module."""
    from megatron.core.models.gpt import GPTModel

    found = [module for module in chunk.modules() if isinstance(module, GPTModel)]
    if len(found) != 1:
        raise WeightMapError("a chunk must hold one model", expected="one GPTModel", found=type(chunk).__name__)
    return found[0]


def _named_tensors(model: Any) -> Iterator[tuple[tuple[str, int | None, int | None], Tensor]]:
    numbers = [layer.layer_number for layer in model.decoder.layers]
    for name, parameter in model.named_parameters():
        yield whole_model_name(name, numbers), parameter
    for name, buffer in model.named_buffers():
        if name.endswith(_EXPERT_BIAS) and buffer is not None:
            yield whole_model_name(name, numbers), buffer


def _spec(name: tuple[str, int | None, int | None], tensor: Tensor) -> ParameterSpec:
    is_cut = getattr(tensor, "tensor_model_parallel", False)  # Megatron-Core marks the parameters that are
    dim = tensor.partition_dim if is_cut else None  # type: ignore[attr-defined]
    return ParameterSpec(*name, tuple(tensor.shape), tensor.dtype, dim)
