"""LoRA in the layers of Megatron-Core itself: attention, experts, dense MLPs and routers, under every parallel layout.

An adapter of a parameter (out, in) adds `scale * up(down(x))` to its output. It is sharded as its layer is: where the
layer shards its output, `up` is sharded and `down` replicated; where it shards its input, the other way round. Tensors
exchanged between ranks have the width of the LoRA rank, not of the layer.

A parameter may hold several weights of the checkpoint (`linear_qkv`: q_proj, k_proj, v_proj). Each has its own `down`,
as in PEFT; gate and up of an expert share one, as in PEFT's adapter of a fused expert tensor. Where the experts of a
rank are one parameter (`GroupedExperts`), their adapters are grouped GEMMs beside it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from moe_replay.errors import MoeReplayError
from moe_replay.megatron.grouped_experts import ROW_BYTES, GroupedExperts, grouped_linear
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.loading import Chunks, WeightMap
from moe_replay.megatron.weights.local_shards import LocalModel, ParameterSpec, export_order, gather
from moe_replay.megatron.weights.tensor_slices import ParameterShard, Shape, TensorSlice, WeightMapError
from moe_replay.replay.adapters.megatron import language_model
from moe_replay.weights.lora_adapter import module_names

# ---- targets ---------------------------------------------------------------------------------------------------------

ALL_LINEAR = "all-linear"
ROUTER = "router"
_LINEAR = re.compile(r"^decoder\.layers\.\{layer\}\..*\.linear_\w+\.weight$")
_ROUTER = re.compile(r"^decoder\.layers\.\{layer\}\..*\.router\.weight$")


class Part(NamedTuple):
    """A checkpoint weight inside a parameter."""

    name: str  # in the checkpoint, with a tensor per expert
    rows: Tensor  # (rows,) indices of its rows in the parameter
    group: int  # parts of a group share their `down`
    slices: tuple[TensorSlice, ...]  # from the checkpoint tensor to the parameter


@dataclass(frozen=True)
class LoraPlan:
    """Rank and scale of the adapters, and their target layers (see docs/lora.md)."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    weight_map: WeightMap

    @classmethod
    def of(cls, rank: int, alpha: float, targets: tuple[str, ...], checkpoint: Checkpoint, family: Family) -> LoraPlan:
        """Return the plan for a checkpoint's model; names are those of checkpoints with a tensor per expert."""
        rules = family.rules_for(fused=False, tied=False)
        return cls(rank, alpha, targets, WeightMap(family, checkpoint.model_type, rules))

    def parts(self, shard: ParameterShard) -> tuple[Part, ...]:
        """Return the weights in a shard that get an adapter; empty for other parameters."""
        is_router = bool(_ROUTER.search(shard.key))
        if not is_router and not _LINEAR.search(shard.key):
            return ()
        names = dict.fromkeys(part.name for part in self.weight_map.slices(shard.unsharded()))
        targets = [name for name in names if self._is_target(name, is_router=is_router)]
        shard_slices = self.weight_map.slices(shard)
        parts = []
        for group, name in enumerate(targets):
            slices = tuple(part for part in shard_slices if part.name == name)
            parts.append(Part(name, _rows(slices), 0 if shard.expert is not None else group, slices))
        return tuple(parts)

    def _is_target(self, name: str, *, is_router: bool) -> bool:
        return (ROUTER if is_router else ALL_LINEAR) in self.targets or _leaf(name) in self.targets

    def check(self, model: LocalModel) -> None:
        """Raise, on every rank, if a target matches no layer of the whole model."""
        names: set[str] = set()
        has_router = False
        for shard in model.unsharded():
            is_router = bool(_ROUTER.search(shard.key))
            has_router |= is_router
            if is_router or _LINEAR.search(shard.key):
                slices = self.weight_map.slices(shard)
                names |= {_leaf(part.name) for part in slices}
                targeted = [part for part in slices if self._is_target(part.name, is_router=is_router)]
                self._check_matrices(shard, targeted)
        valid = {*names, ALL_LINEAR, *([ROUTER] if has_router else [])}
        for target in self.targets:
            if target not in valid:
                raise WeightMapError(
                    "model.lora_target_modules: no layer of this model on Megatron-Core has this name",
                    expected=f"some of {', '.join(sorted(valid))}",
                    found=repr(target),
                )

    @staticmethod
    def _check_matrices(shard: ParameterShard, slices: Sequence[TensorSlice]) -> None:
        for part in slices:
            if len(part.tensor_shape) != 2 or part.transposed:
                raise WeightMapError(
                    "model.lora_target_modules: checkpoints of this family have no separate matrix for this layer",
                    layer=shard.layer,
                    expected="a tensor (out, in) per expert",
                    found=f"{part.name} of shape {part.tensor_shape}",
                    remedy="Leave experts out of model.lora_target_modules, or set backend.kind = fsdp",
                )


def _rows(slices: Sequence[TensorSlice]) -> Tensor:
    ranges = [torch.arange(part.target[0].start, part.target[0].stop) for part in slices]
    return torch.cat(ranges) if ranges else torch.empty(0, dtype=torch.long)


def _leaf(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


# ---- layers ----------------------------------------------------------------------------------------------------------


class MegatronLoraError(MoeReplayError):
    """Adapters that cannot be added to a Megatron-Core model."""


class Sharding(NamedTuple):
    """Sharding of a layer and its input over the ranks of `group`."""

    kind: str  # "column": the output is sharded, "row": the input, "whole": neither
    group: Any
    sequence: bool  # input and output of the layer are shards of the sequence
    expert: bool  # the dispatcher moves tokens to and from the experts, and sums partial outputs of ranks

    @property
    def size(self) -> int:
        return self.group.size()


class Adapter(nn.Module):
    """The matrices of an adapter on this rank; `enabled`: whether its layer adds it."""

    def __init__(
        self, weight: nn.Parameter, down: Shape, up: Shape, sharding: Sharding, rank: int, scale: float
    ) -> None:
        super().__init__()
        self.sharding = sharding
        self.rank = rank
        self.scale = scale
        self.enabled = True
        self.down = nn.Parameter(torch.empty(down, dtype=weight.dtype, device=weight.device))
        self.up = nn.Parameter(torch.zeros(up, dtype=weight.dtype, device=weight.device))

    def matrices(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return `down` and `up`, of experts that are sharded over ranks with the gradients of all of them."""
        down, up, sharding = self.down.to(dtype), self.up.to(dtype), self.sharding
        if sharding.expert and sharding.size > 1:  # every rank has all tokens, and the gradient of its shard
            if sharding.kind == "column":
                return _summed_over_ranks(down, sharding), up
            return down, _summed_over_ranks(up, sharding)
        return down, up


class LoraAdapter(Adapter):
    """The adapter of one layer's weight on this rank.

    down   (groups * rank, in), `rank` rows per group of parts
    up     (out, rank)
    """

    def __init__(
        self, weight: nn.Parameter, parts: Sequence[Part], sharding: Sharding, rank: int, scale: float
    ) -> None:
        groups = 1 + max(part.group for part in parts)
        out, width = weight.shape
        super().__init__(weight, (groups * rank, width), (out, rank), sharding, rank, scale)
        covered = sum(len(part.rows) for part in parts)
        self._is_plain = groups == 1 and covered == out
        self._blocks = [(part.rows.to(weight.device), part.group * rank) for part in parts]

    def forward(self, hidden: Tensor) -> Tensor:
        from megatron.core.tensor_parallel import mappings

        sharding = self.sharding
        down, up = self.matrices(hidden.dtype)
        inner = linear(hidden, down)
        if not sharding.expert and sharding.size > 1:
            if sharding.kind == "column" and sharding.sequence:
                inner = mappings.gather_from_sequence_parallel_region(inner, group=sharding.group)
            elif sharding.kind == "column":
                inner = mappings.copy_to_tensor_model_parallel_region(inner, group=sharding.group)
            elif sharding.kind == "row" and sharding.sequence:
                inner = mappings.reduce_scatter_to_sequence_parallel_region(inner, group=sharding.group)
            elif sharding.kind == "row":
                inner = mappings.reduce_from_tensor_model_parallel_region(inner, group=sharding.group)
        return self._project_up(inner, up) * self.scale

    def _project_up(self, inner: Tensor, up: Tensor) -> Tensor:
        if self._is_plain:
            return linear(inner, up)
        output = inner.new_zeros(*inner.shape[:-1], len(up))
        for rows, first in self._blocks:
            output = output.index_copy(-1, rows, linear(inner[..., first : first + self.rank], up[rows]))
        return output


def _summed_over_ranks(matrix: Tensor, sharding: Sharding) -> Tensor:
    from megatron.core.tensor_parallel import mappings

    copied = mappings.copy_to_tensor_model_parallel_region(matrix, group=sharding.group)
    if copied.requires_grad:  # Megatron-Core 0.16.1 sums a copy of a gradient that is not contiguous
        copied.register_hook(Tensor.contiguous)
    return copied


class GroupedAdapter(Adapter):
    """The adapters of one projection of all experts on this rank.

    down   (experts, rank, in)
    up     (experts, out, rank)
    """

    def __init__(self, weight: nn.Parameter, sharding: Sharding, rank: int, scale: float) -> None:
        experts, out, width = weight.shape
        super().__init__(weight, (experts, rank, width), (experts, out, rank), sharding, rank, scale)

    def forward(self, rows: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
        """Return the adapters' addition to the projection of rows (rows, in), sorted by expert."""
        down, up = self.matrices(rows.dtype)
        padding = -self.rank % (ROW_BYTES // rows.element_size())
        down, up = pad(down, (0, 0, 0, padding)), pad(up, (0, padding))
        return grouped_linear(grouped_linear(rows, down, counts, ends), up, counts, ends) * self.scale


@dataclass(frozen=True)
class WeightAdapter:
    """The adapter of one weight on this rank: that of its layer, or of one expert in it."""

    layer: Adapter
    parts: tuple[Part, ...]
    expert: int | None = None

    @property
    def rank(self) -> int:
        return self.layer.rank

    @property
    def down(self) -> Tensor:
        """(groups * rank, in), `rank` rows per group of parts."""
        return self.layer.down if self.expert is None else self.layer.down[self.expert]

    @property
    def up(self) -> Tensor:
        """(out, rank)."""
        return self.layer.up if self.expert is None else self.layer.up[self.expert]

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's weight with the adapter added in float32."""
        total, up, down = weight.detach().float().clone(), self.up.float(), self.down.float()
        for part in self.parts:
            rows, first = part.rows.to(weight.device), part.group * self.rank
            total[rows] += self.layer.scale * (up[rows] @ down[first : first + self.rank])
        return total.to(weight.dtype)

    @torch.no_grad()
    def initialize(self, columns: slice, width: int, seed: int) -> None:
        """Initialize `down` as PEFT does, equally in every layout: `columns` of a (rank, width) draw per group."""
        bound = 1 / math.sqrt(width)
        for part in reversed(self.parts):  # the first part of a group names it
            digest = hashlib.sha256(f"{seed} {part.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
            values = torch.empty(self.rank, width).uniform_(-bound, bound, generator=generator)
            first = part.group * self.rank
            self.down[first : first + self.rank].copy_(values[:, columns])


def add_adapters(chunks: Chunks, plan: LoraPlan, seed: int = 0) -> dict[ParameterSpec, WeightAdapter]:
    """Freeze a loaded model and add the plan's adapters in place; returns those of this rank."""
    local = LocalModel.of(chunks)
    plan.check(local)
    models = [language_model(chunk) for chunk in ([chunks] if isinstance(chunks, nn.Module) else chunks)]
    modules = [module for model in models for module in model.modules()]
    owners = {id(module.weight): module for module in modules if hasattr(module, "weight")}
    grouped = {
        parameter.untyped_storage().data_ptr(): (module, name)
        for module in modules
        if isinstance(module, GroupedExperts)
        for name, parameter in module.named_parameters(recurse=False)
    }
    adapters = {}
    for spec, weight in local.parameters:
        parts = plan.parts(local.local_shard(spec))
        if not parts:
            continue
        experts = grouped.get(weight.untyped_storage().data_ptr())
        if experts is None:
            layer: Any = _add_to_layer(owners.get(id(weight)), spec, weight, parts, plan, local)
            adapters[spec] = WeightAdapter(layer, parts)
        else:
            layer = _add_to_experts(*experts, spec, parts, plan, local)
            adapters[spec] = WeightAdapter(layer, parts, spec.expert)
        shard = local.local_shard(spec)
        width, length = shard.full_shape[1], shard.shape[1]
        first = shard.rank * length if spec.partition_dim == 1 else 0
        adapters[spec].initialize(slice(first, first + length), width, seed)
    trained = {id(parameter) for adapter in adapters.values() for parameter in (adapter.layer.down, adapter.layer.up)}
    for model in models:
        _freeze(model, trained)
    return adapters


@contextmanager
def adapters_off(adapters: dict[ParameterSpec, WeightAdapter]) -> Iterator[None]:
    """Disable the adapters inside this context, which gives the base model."""
    for adapter in adapters.values():
        adapter.layer.enabled = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.layer.enabled = True


def _add_to_layer(
    owner: Any, spec: ParameterSpec, weight: Any, parts: Sequence[Part], plan: LoraPlan, local: LocalModel
) -> LoraAdapter:
    adapter = LoraAdapter(weight, parts, _sharding(owner, spec, local), plan.rank, plan.alpha / plan.rank)
    _mark(adapter, weight)
    owner.lora = adapter
    if adapter.sharding.kind == "whole":
        _extend_router(owner, adapter)
    else:
        # before hooks that change the layout of the output
        owner.register_forward_hook(_add_to_output, prepend=True)
    return adapter


def _add_to_experts(
    experts: GroupedExperts, name: str, spec: ParameterSpec, parts: Sequence[Part], plan: LoraPlan, local: LocalModel
) -> GroupedAdapter:
    """Return the adapters of a parameter of experts, which the first of its experts adds."""
    if sum(len(part.rows) for part in parts) < spec.shape[0]:
        raise MegatronLoraError(
            "model.lora_target_modules: gate and up of grouped experts have one adapter",
            layer=spec.layer,
            expected="both of them, or none",
            found=", ".join(part.name for part in parts),
            remedy="Name both, or set backend.megatron = { moe_grouped_gemm = false }",
        )
    if name in experts.lora:
        return cast(GroupedAdapter, experts.lora[name])
    weight = getattr(experts, name)
    sharding = Sharding(_EXPERT_KINDS[name], local.groups.expert_tensor, sequence=False, expert=True)
    adapter = GroupedAdapter(weight, sharding, plan.rank, plan.alpha / plan.rank)
    _mark(adapter, weight)
    experts.lora[name] = adapter
    return adapter


_EXPERT_KINDS = {"weight1": "column", "weight2": "row"}


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
        "model.lora_target_modules: this layer of Megatron-Core cannot have an adapter",
        layer=spec.layer,
        expected="a ColumnParallelLinear, RowParallelLinear or router",
        found=f"{spec.key} in {type(owner).__name__}",
        remedy="Leave it out of model.lora_target_modules",
    )


def _mark(adapter: Adapter, weight: Any) -> None:
    """Set the attributes by which Megatron-Core reduces gradients and counts each parameter once in their norm."""
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    sharding = adapter.sharding
    sharded = {"column": (adapter.up, -2), "row": (adapter.down, -1)}.get(sharding.kind)
    parameters: tuple[Any, ...] = (adapter.down, adapter.up)
    for parameter in parameters:
        parameter.allreduce = getattr(weight, "allreduce", True)
        if sharded is not None and parameter is sharded[0]:
            set_tensor_model_parallel_attributes(
                parameter, is_parallel=True, dim=parameter.dim() + sharded[1], stride=1
            )
            continue
        if sharding.expert:  # replicated over the group: only the first rank counts
            set_tensor_model_parallel_attributes(parameter, is_parallel=sharding.group.rank() == 0, dim=0, stride=1)
        else:  # each rank has the gradient of its part of the sequence
            parameter.sequence_parallel = sharding.sequence


def _add_to_output(layer: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    adapter: LoraAdapter = layer.lora
    return (output[0] + adapter(inputs[0]), output[1]) if adapter.enabled else output


def _extend_router(router: Any, adapter: LoraAdapter) -> None:
    """Add the adapter to the logits, in the dtype in which the router computes them."""
    native_gating = router.gating

    def gating(hidden: Tensor) -> Tensor:
        logits = native_gating(hidden)
        return logits + adapter(hidden.to(logits.dtype)) if adapter.enabled else logits

    router.gating = gating


def _freeze(model: Any, trained: set[int]) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    if getattr(model, "pre_process", False):
        # Recomputed layers and pipeline stages need an input with a gradient, which a frozen embedding does not give.
        model.embedding.register_forward_hook(_with_gradient)


def _with_gradient(embedding: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


# ---- export ----------------------------------------------------------------------------------------------------------


def adapter_tensors(
    chunks: Chunks, plan: LoraPlan, adapters: Mapping[ParameterSpec, WeightAdapter]
) -> Iterator[tuple[str, Tensor]]:
    """Yield all adapters under PEFT's names, unsharded in float32, on every rank.

    Collective: all ranks must iterate to the end.
    """
    local = LocalModel.of(chunks)
    for stage, spec in export_order(local):
        sample = plan.parts(local.shard(spec, 0, 0))
        if not sample:
            continue
        groups = 1 + max(part.group for part in sample)
        adapter = adapters.get(spec) if stage == local.groups.pipeline.rank() else None
        up_spec = spec._replace(shape=(spec.shape[0], plan.rank), partition_dim=0 if spec.partition_dim == 0 else None)
        down_spec = spec._replace(
            shape=(groups * plan.rank, spec.shape[1]), partition_dim=1 if spec.partition_dim == 1 else None
        )
        ups = gather(local, up_spec, stage, None if adapter is None else adapter.up)
        downs = gather(local, down_spec, stage, None if adapter is None else adapter.down)
        for expert_rank in range(len(ups)):
            down = torch.cat(list(downs[expert_rank]), dim=1).float()
            yield from _adapters_of_parameter(local, plan, up_spec, expert_rank, ups[expert_rank], down)


def _adapters_of_parameter(
    local: LocalModel,
    plan: LoraPlan,
    up_spec: ParameterSpec,
    expert_rank: int,
    ups: Tensor,
    down: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters of one parameter's weights on one expert-parallel rank."""
    assembled: dict[str, Tensor] = {}
    for rank, up in enumerate(ups):
        shard: ParameterShard = local.shard(up_spec, expert_rank, rank)
        for part in plan.parts(shard):
            for region in part.slices:
                whole = assembled.setdefault(part.name, up.new_empty(region.tensor_shape, dtype=torch.float32))
                whole[region.source] = up[region.target].float()
    for part in plan.parts(local.shard(up_spec, expert_rank, 0)):
        first = part.group * plan.rank
        name_down, name_up = module_names(part.name)
        yield name_down, down[first : first + plan.rank]
        yield name_up, assembled[part.name]
