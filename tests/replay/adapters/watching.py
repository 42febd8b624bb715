"""Tiny models whose routers are worth watching, and what their routers do, seen without the help of the library.

Transformers has many ways to hand out a choice. Each is read into the same two tables, one column for each logit of the
router: the gates (R, E), and whether the expert was taken (R, E).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import moe_replay as mr
from moe_replay.replay.site import RouterSite
from tests.replay.adapters.families import RELEASE, tiny_inputs, tiny_model
from tests.replay.adapters.gates import GATES, Config

# ---- models in which choice and gate are not the same ---------------------------------------------------------------

_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases", "router.bias")  # start with zeros
_SCALES = ("per_expert_scale", "global_scale", "router.scale")  # start with ones
_FAINT = "router_mlp.out_proj.weight"  # zaya: behind three layers the logits of all tokens are nearly the same


def lively_model(model_type: str, **changes: Any) -> nn.Module:
    """The family's tiny model, made such that each token chooses for itself, and not by the gates alone."""
    model = tiny_model(model_type, **changes)
    generator = torch.Generator().manual_seed(2)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith(_BIASES):
            value.data = 0.1 * noise
        elif name.endswith(_SCALES):
            value.data += 0.3 * noise
        elif name.endswith(_FAINT):
            value.data *= 40
    return model


def forward_arguments(model_type: str) -> dict[str, Any]:
    """`input_ids` (2, 6) and what keeps a forward plain; glm4v_moe of release 4 needs to be told that all is text."""
    inputs = tiny_inputs(model_type)
    return inputs | {"attention_mask": torch.ones_like(inputs["input_ids"]), "use_cache": False}


# ---- routes that no router chose ------------------------------------------------------------------------------------


def random_routes(replay: mr.RouterReplay, token_ids: Tensor, seed: int = 4) -> Tensor:
    """(R, L, K) different experts for each token and layer, zero- and skip-experts among them."""
    topology, generator = replay.topology, torch.Generator().manual_seed(seed)
    scores = torch.rand(token_ids.numel(), len(topology.layers), topology.num_experts, generator=generator)
    return scores.argsort(-1)[..., : topology.top_k]


def route_batch(
    replay: mr.RouterReplay, token_ids: Tensor, experts: Tensor, valid: Tensor | None = None
) -> mr.RouteBatch:
    """token_ids (B, W) without padding, experts (R, L, K), valid (R, L) -> the batch to replay."""
    topology, (sequences, width) = replay.topology, token_ids.shape
    ids = experts.numpy().astype(np.uint8).reshape(sequences, width, len(topology.layers), topology.top_k)
    covered = np.ones(ids.shape[:3], bool) if valid is None else valid.numpy().reshape(ids.shape[:3])
    traces = [
        mr.RouteTrace(tokens, chosen, topology.layers, mask, num_experts=topology.num_experts)
        for tokens, chosen, mask in zip(token_ids.numpy(), ids, covered, strict=True)
    ]
    return mr.RouteBatch.from_traces(traces, mr.TokenLayout.padded([width] * sequences))


# ---- what a router really did ---------------------------------------------------------------------------------------


@dataclass
class Call:
    """The last call of one router, seen from outside.

    hidden  (R, H) what it projects to logits
    output  what it returned; of a dbrx block that keeps it to itself, what its experts were given
    """

    hidden: Tensor
    output: Any = None


@contextmanager
def watched(model_type: str, sites: Iterable[RouterSite]) -> Iterator[dict[int, Call]]:
    """The calls of the routers inside this context: layer -> call, in the order in which the routers ran."""
    calls: dict[int, Call] = {}

    def is_given(layer: int, args: tuple[Any, ...]) -> None:
        calls[layer] = Call(args[0].detach().flatten(end_dim=-2))

    def gives(layer: int, output: Any) -> None:
        calls[layer].output = output

    handles = []
    for site in sites:
        start = site.module.get_submodule(GATES[model_type].input_of)
        handles.append(start.register_forward_pre_hook(lambda m, args, layer=site.layer: is_given(layer, args)))
        if _keeps_its_choice(site.module):
            experts = site.module.get_submodule("experts")
            handles.append(experts.register_forward_pre_hook(lambda m, args, layer=site.layer: gives(layer, args)))
        else:
            handles.append(
                site.module.register_forward_hook(lambda m, args, output, layer=site.layer: gives(layer, output))
            )
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _keeps_its_choice(router: nn.Module) -> bool:
    return type(router).__name__ == "DbrxFFN"


Handed = tuple[Tensor, Tensor]


def _weights_then_ids(output: Any, columns: int) -> Handed:
    return _in_columns(output[1], output[2], columns)


def _ids_then_weights(output: Any, columns: int) -> Handed:
    return _in_columns(output[1], output[0], columns)


def _dbrx_experts_input(output: Any, columns: int) -> Handed:
    _, ids, weights = output
    return _in_columns(weights, ids, columns)


def _with_shared(output: Any, columns: int) -> Handed:
    """inkling: the gates of the shared experts follow."""
    _, weights, ids, shared = output
    gates, taken = _in_columns(weights, ids, columns - shared.shape[-1])
    return torch.cat([gates, shared], -1), torch.cat([taken, torch.ones_like(shared, dtype=torch.bool)], -1)


def _without_skipped(output: Any, columns: int) -> Handed:
    """zaya: a row that skips names expert 0 with gate 0."""
    gates, taken = _weights_then_ids(output, columns)
    return gates, taken & (gates != 0)


def _columns_alone(output: Any, columns: int) -> Handed:
    """llama4: a gate in every column, zero where not taken."""
    return output[0], output[0] != 0


def _columns_and_ids(output: Any, columns: int) -> Handed:
    """gpt_oss of release 4."""
    return output[0], _one_hot(output[1], columns)


def _grouped_by_expert(output: Any, columns: int) -> Handed:
    """jetmoe, granite of release 4: the rows in the order of the experts they go to, and how many go to each."""
    in_order, row, gates, sizes, logits = output
    top_k = len(in_order) // len(logits)
    expert = torch.repeat_interleave(torch.arange(columns), torch.tensor(sizes))
    place = torch.empty_like(in_order).scatter_(0, in_order, torch.arange(len(in_order)))
    assert torch.equal(row, in_order // top_k)
    return _in_columns(gates[place].view(-1, top_k), expert[place].view(-1, top_k), columns)


def _in_columns(weights: Tensor, ids: Tensor, columns: int) -> Handed:
    return weights.new_zeros(len(ids), columns).scatter_add(-1, ids, weights), _one_hot(ids, columns)


def _one_hot(ids: Tensor, columns: int) -> Tensor:
    return torch.zeros(len(ids), columns, dtype=torch.bool).scatter(-1, ids, True)


Reader = Callable[[Any, int], Handed]

_READERS_5: dict[str, Reader] = dict.fromkeys(GATES, _weights_then_ids) | {
    "dbrx": _dbrx_experts_input,
    "inkling_text": _with_shared,
    "jetmoe": _grouped_by_expert,
    "llama4_text": _columns_alone,
    "zaya": _without_skipped,
}
# The other families of release 4 choose in the middle of their sparse block and hand no gates out.
_READERS_4: dict[str, Reader] = {
    "dbrx": _weights_then_ids,
    "gpt_oss": _columns_and_ids,
    "llama4_text": _columns_alone,
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "glm4v_moe_text"), _ids_then_weights),
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared", "jetmoe"), _grouped_by_expert),
    "longcat_flash": _ids_then_weights,
}
READERS = _READERS_5 if RELEASE >= 5 else _READERS_4


def handed_out(model_type: str, call: Call, site: RouterSite, config: Config) -> Handed:
    """The gates that the router handed out, and the experts that it took, one column for each logit."""
    return READERS[model_type](call.output, site.num_experts + GATES[model_type].shared(config))


def taken_by(model_type: str, experts: Tensor, site: RouterSite, config: Config) -> Tensor:
    """(R, K) -> (R, E): what `handed_out` shows when these experts were taken."""
    taken = _one_hot(experts, site.num_experts)
    if model_type == "zaya":
        taken[:, config.num_experts] = False
    return torch.cat([taken, torch.ones(len(experts), GATES[model_type].shared(config), dtype=torch.bool)], -1)
