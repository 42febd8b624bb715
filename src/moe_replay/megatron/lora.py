"""LoRA in the layers of Megatron-Core itself: attention, experts, dense MLPs and routers, under every parallel layout.

An adapter of a parameter (out, in) computes `scale * up(down(x))` beside it. It is sharded as its layer is: where the
layer shards its output, `up` is sharded and `down` replicated; where it shards its input, the other way round. What
is exchanged between ranks has the width of the rank, not of the layer.

A parameter may hold several weights of the checkpoint (`linear_qkv`: q_proj, k_proj, v_proj). Each has a `down` of its
own, as with peft; gate and up of an expert share one, as in peft's adapter of a fused expert tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe_replay.errors import MoeReplayError
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec
from moe_replay.megatron.weights.lora_plan import LoraPlan, Part
from moe_replay.megatron.weights.transfer import Chunks
from moe_replay.replay.adapters.megatron import language_model


class MegatronLoraError(MoeReplayError):
    """Adapters that cannot be added to a Megatron-Core model."""


class Sharding(NamedTuple):
    """Sharding of a layer and its input over the ranks of `group`.

    kind       "column": the output is sharded, "row": the input, "whole": neither
    sequence   input and output of the layer are shards of the sequence
    expert     tokens come to the experts and go from them by the dispatcher, which sums what ranks leave partial
    """

    kind: str
    group: Any
    sequence: bool
    expert: bool

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()


class LoraAdapter(nn.Module):
    """The adapter of one parameter on this rank.

    down   (groups * rank, in), one block of `rank` rows for each group of parts
    up     (out, rank)
    """

    def __init__(
        self, weight: nn.Parameter, parts: Sequence[Part], sharding: Sharding, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.sharding = sharding
        self.rank = rank
        self.scale = scale
        self.enabled = True
        groups = 1 + max(part.group for part in parts)
        options: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
        self.down = nn.Parameter(torch.empty(groups * rank, weight.shape[1], **options))
        self.up = nn.Parameter(torch.zeros(weight.shape[0], rank, **options))
        covered = sum(len(part.rows) for part in parts)
        self._is_plain = groups == 1 and covered == weight.shape[0]
        self._blocks = [(part.rows.to(weight.device), part.group * rank) for part in parts]

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what is added to the output of the layer for its input."""
        from megatron.core.tensor_parallel import mappings

        how = self.sharding
        down, up = self.down.to(hidden.dtype), self.up.to(hidden.dtype)
        if how.expert and how.size > 1:  # every rank has all tokens, and the gradient of its shard of the layer
            if how.kind == "column":
                down = mappings.copy_to_tensor_model_parallel_region(down, group=how.group)
            else:
                up = mappings.copy_to_tensor_model_parallel_region(up, group=how.group)
        inner = linear(hidden, down)
        if not how.expert and how.size > 1:
            if how.kind == "column" and how.sequence:
                inner = mappings.gather_from_sequence_parallel_region(inner, group=how.group)
            elif how.kind == "column":
                inner = mappings.copy_to_tensor_model_parallel_region(inner, group=how.group)
            elif how.kind == "row" and how.sequence:
                inner = mappings.reduce_scatter_to_sequence_parallel_region(inner, group=how.group)
            elif how.kind == "row":
                inner = mappings.reduce_from_tensor_model_parallel_region(inner, group=how.group)
        return self._upwards(inner, up) * self.scale

    def _upwards(self, inner: Tensor, up: Tensor) -> Tensor:
        if self._is_plain:
            return linear(inner, up)
        output = inner.new_zeros(*inner.shape[:-1], len(up))
        for rows, first in self._blocks:
            output = output.index_copy(-1, rows, linear(inner[..., first : first + self.rank], up[rows]))
        return output

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight of this rank with the adapter added in float32."""
        total = weight.detach().float().clone()
        for rows, first in self._blocks:
            total[rows] += self.scale * (self.up[rows].float() @ self.down[first : first + self.rank].float())
        return total.to(weight.dtype)

    @torch.no_grad()
    def initialize(self, columns: slice, width: int, seed: int) -> None:
        """Draw `down` as peft does, alike in every layout: `columns` of (rank, width) for each group."""
        bound = 1 / math.sqrt(width)
        for part in reversed(self.parts):  # the first part of a group names it
            digest = hashlib.sha256(f"{seed} {part.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
            drawn = torch.empty(self.rank, width).uniform_(-bound, bound, generator=generator)
            first = part.group * self.rank
            self.down[first : first + self.rank].copy_(drawn[:, columns])


def add_adapters(chunks: Chunks, plan: LoraPlan, seed: int = 0) -> dict[ParameterSpec, LoraAdapter]:
    """Freeze a loaded model and add adapters to the layers of a plan, in place; return those of this rank."""
    local = LocalModel.of(chunks)
    plan.check(local)
    models = [language_model(chunk) for chunk in ([chunks] if isinstance(chunks, nn.Module) else chunks)]
    owners = {id(module.weight): module for model in models for module in model.modules() if hasattr(module, "weight")}
    adapters = {}
    for spec, weight in local.parameters:
        parts = plan.parts(local.local_shard(spec))
        if parts:
            owner = owners.get(id(weight))
            adapters[spec] = _adapter(owner, spec, weight, parts, plan, local, seed)
    for model in models:
        _freeze(model, {id(adapter.down) for adapter in adapters.values()} | {id(a.up) for a in adapters.values()})
    return adapters


@contextmanager
def adapters_off(adapters: dict[ParameterSpec, LoraAdapter]) -> Iterator[None]:
    """Disable the adapters inside this context: the model that training started from."""
    for adapter in adapters.values():
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.enabled = True


def _adapter(
    owner: Any, spec: ParameterSpec, weight: Any, parts: Sequence[Part], plan: LoraPlan, local: LocalModel, seed: int
) -> LoraAdapter:
    adapter = LoraAdapter(weight, parts, _sharding(owner, spec, local), plan.rank, plan.alpha / plan.rank)
    shard = local.local_shard(spec)
    width, length = shard.full_shape[1], shard.shape[1]
    first = shard.rank * length if spec.partition_dim == 1 else 0
    adapter.initialize(slice(first, first + length), width, seed)
    _mark(adapter, weight)
    owner.lora = adapter
    if adapter.sharding.kind == "whole":
        _extend_router(owner, adapter)
    else:
        # before hooks that change the layout of the output
        owner.register_forward_hook(_add_to_output, prepend=True)
    return adapter


def _sharding(owner: Any, spec: ParameterSpec, local: LocalModel) -> Sharding:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.moe.router import Router

    group = local.groups.tensor if spec.expert is None else local.groups.expert_tensor
    if isinstance(owner, Router):
        return Sharding("whole", group, bool(owner.config.sequence_parallel), expert=False)
    for kind, layer in (("column", ColumnParallelLinear), ("row", RowParallelLinear)):
        if isinstance(owner, layer):
            return Sharding(kind, group, bool(owner.sequence_parallel), expert=spec.expert is not None)
    raise MegatronLoraError(
        "model.lora_targets: this layer of Megatron-Core cannot have an adapter",
        layer=spec.layer,
        expected="a ColumnParallelLinear, RowParallelLinear or router",
        found=f"{spec.key} in {type(owner).__name__}",
        remedy="Leave it out of model.lora_targets, or set moe_grouped_gemm = false where it is an expert",
    )


def _mark(adapter: LoraAdapter, weight: Any) -> None:
    """Set the attributes by which Megatron-Core reduces gradients and counts each parameter once in their norm."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    how = adapter.sharding
    sharded = {"column": (adapter.up, 0), "row": (adapter.down, 1)}.get(how.kind)
    both: tuple[Any, ...] = (adapter.down, adapter.up)
    for parameter in both:
        parameter.allreduce = getattr(weight, "allreduce", True)
        if sharded is not None and parameter is sharded[0]:
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=sharded[1], stride=1)
            continue
        if how.expert:  # a replica on each rank of the group: the first one counts
            set_tensor_model_parallel_attributes(parameter, is_parallel=how.group.rank() == 0, dim=0, stride=1)
        else:  # each rank has the gradient of its part of the sequence
            parameter.sequence_parallel = how.sequence


def _add_to_output(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    adapter: LoraAdapter = layer.lora
    return (output[0] + adapter(inputs[0]), output[1]) if adapter.enabled else output


def _extend_router(router: Any, adapter: LoraAdapter) -> None:
    """Add the adapter to the logits, in the type that the router computes them in."""
    logits_of = router.gating

    def gating(hidden: Tensor) -> Tensor:
        logits = logits_of(hidden)
        return logits + adapter(hidden.to(logits.dtype)) if adapter.enabled else logits

    router.gating = gating


def _freeze(model: Any, trained: set[int]) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    if getattr(model, "pre_process", False):
        # Recomputed layers and pipeline stages need an input with a gradient, which a frozen embedding has not.
        model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(embedding: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output
