"""The weights of vLLM's worker under the names of a Transformers model, for a trainer that computes with their memory.

Only memory is named: what is in it under a name is compared bit for bit by the trainer before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from moe_replay.weights.shared import NamedRows

SHARED = "moe_replay_share_weights"
"""Key of vLLM's `additional_config`."""
_EXPERTS = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}
_INSIDE = (".base_layer", ".routed_experts")
"""Modules of vLLM around or inside those of a Transformers model: adapters, experts."""


def checkpoint_rows(model: Any) -> Iterator[NamedRows]:
    """Yield the parameters of vLLM's model; fused ones by their parts, where the model says what these are."""
    fused = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            yield from _parts(path, leaf, parameter, module, fused)


def _parts(path: str, leaf: str, parameter: Any, module: nn.Module, fused: dict[str, list[str]]) -> Iterator[NamedRows]:
    from moe_replay.weights.shared import NamedRows  # needs pydantic, which sampling alone does not

    for inner in _INSIDE:
        path = path.replace(inner, "")
    if leaf in _EXPERTS:
        yield NamedRows(f"{path}.{_EXPERTS[leaf]}", parameter)
        return
    outer, _, inner_name = path.rpartition(".")
    names, sizes = fused.get(inner_name, ()), getattr(module, "output_partition_sizes", ())
    if len(names) < 2 or len(names) != len(sizes) or sum(sizes) != len(parameter):
        yield NamedRows(f"{path}.{leaf}", parameter)
        return
    first = 0
    for name, size in zip(names, sizes, strict=True):
        yield NamedRows(f"{outer}.{name}.{leaf}", parameter, slice(first, first + size))
        first += size


class LastingWeights:
    """Keeps weights that are shared out of the memory that vLLM frees while it sleeps. Mixed into vLLM's GPU worker.

    That memory cannot be opened by another process either.
    """

    vllm_config: Any

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "weights" and (self.vllm_config.additional_config or {}).get(SHARED):
            return nullcontext()
        return super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
