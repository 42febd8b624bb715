"""What a rank does with an FSDP2 policy whose experts are divided among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_replay.errors import MoeReplayError
from moe_replay.records import MicroBatch
from moe_replay.routes.batch import RouteBatch
from moe_replay.train.backends.base import Routing
from moe_replay.train.backends.fsdp import _gathered
from moe_replay.train.config.train_config import TrainConfig
from tests.distributed.megatron_lora import ALPHA, RANK, adapter_of, give
from tests.distributed.megatron_training import (
    REPLAY,
    Routes,
    _counted_update,
    batches_of,
    by_row,
    make_config,
    open_backend,
    without_last_routes,
)
from tests.support.policy import all_weights, save_state

MODES = ("off", "r2", "r3")
LORA = ["q_proj", "gate_proj", "up_proj", "down_proj", "router"]


def ep_config(folder: str, settings: dict[str, Any]) -> TrainConfig:
    """Settings of the backend, and `recomputed`, `lora` and `compile` of the model."""
    own = ("recomputed", "lora", "compile", "context_parallel")
    made = make_config(folder, "fsdp", **{key: settings[key] for key in settings if key not in own}).model_dump()
    made["backend"]["context_parallel"] = settings.get("context_parallel", 1)
    made["model"] |= {
        "gradient_checkpointing": settings.get("recomputed", False),
        "compile": settings.get("compile", False),
        "attn_implementation": "auto" if settings.get("context_parallel") else "eager",
    }
    if settings.get("lora"):
        made["model"] |= {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_target_modules": LORA}
    return TrainConfig.model_validate(made)


def ep_backend(folder: str, settings: dict[str, Any], adapter: dict[str, Tensor] | None = None) -> Any:
    backend: Any = open_backend(ep_config(folder, settings))
    if adapter is not None:
        give(backend, adapter)
    return backend


def first_adapter(folder: str) -> dict[str, Tensor]:
    """An adapter that is not zero."""
    torch.manual_seed(3)
    backend = ep_backend(folder, {"lora": True})
    drawn = {name: torch.randn(tensor.shape) * 0.1 for name, tensor in adapter_of(backend).items()}
    for name in drawn:  # gate and up of an expert share their `lora_A`
        if ".experts." in name and "up_proj.lora_A" in name:
            drawn[name] = drawn[name.replace("up_proj", "gate_proj")].clone()
    backend.close()
    return drawn


def whole_gradients(backend: Any) -> dict[str, Tensor]:
    everyone = range(dist.get_world_size())
    found = {}
    for name, parameter in backend._state._trained.items():
        (whole,) = _gathered([(parameter.grad, None, parameter.grad.dtype)], everyone)
        assert whole is not None
        found[name] = whole.clone()
    return found


def updates(
    folder: str,
    data: bytes,
    settings: dict[str, Any],
    modes: Sequence[str] = MODES,
    adapter: dict[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Two updates in each mode: losses, norms, log-probs before, gradients of each (clipped), weights after."""
    found = {}
    for mode in modes:
        backend = ep_backend(folder, settings, adapter)
        gradients: list[dict[str, Tensor]] = []
        backend._optimizer.register_step_pre_hook(
            lambda *_, backend=backend, gradients=gradients: gradients.append(whole_gradients(backend))
        )
        minis = batches_of(backend, data, settings.get("packed", False))
        before = Routing("record") if mode == "r2" else REPLAY if mode == "r3" else Routing()
        scores = [backend.score(mini, before) for mini in minis]
        routing = Routing("replay", "recorded") if mode == "r2" else before
        losses: list[float] = []
        norms = [_counted_update(backend, mini, losses, routing).grad_norm for mini in minis]
        is_first = dist.get_rank() == 0
        weights = {name: tensor.clone() for name, tensor in all_weights(backend)}
        found[mode] = {
            "losses": losses if backend.reports_metrics else [0.0] * len(minis),
            "norms": norms,
            "scores": by_row(backend, minis, scores),
            "gradients": gradients if is_first else [],
            "weights": weights if is_first else {},
            "held": sum(parameter.to_local().numel() for parameter in backend.model.parameters()),
        }
        backend.close()
    return found


def one_sided(folder: str, data: bytes, settings: dict[str, Any]) -> dict[str, Any]:
    """Two updates with every token at the experts 0 and 1: most ranks have no row at all."""
    backend = ep_backend(folder, settings)
    minis = batches_of(backend, data, False)
    for batch in (batch for mini in minis for batch in mini):
        for routes in batch.rollout_routes.values():
            routes.routed_experts[...] = torch.arange(routes.routed_experts.shape[-1])
    losses: list[float] = []
    norms = [_counted_update(backend, mini, losses).grad_norm for mini in minis]
    return {"losses": losses, "norms": norms}


def shifted(folder: str, data: bytes, settings: dict[str, Any]) -> str:
    """What a rank says to the routes of the next rank's micro-batch."""
    backend = ep_backend(folder, settings)
    mini: list[MicroBatch] = batches_of(backend, data, False)[0]
    real = backend.data_rank
    backend.data_rank = (real + 1) % backend.data_size
    other: list[MicroBatch] = batches_of(backend, data, False)[0]
    backend.data_rank = real
    for batch, wrong in zip(mini, other, strict=True):
        batch.rollout_routes = wrong.rollout_routes
    try:
        backend.update(mini, lambda _, found: found.sum(), REPLAY, lr=0.0)
    except MoeReplayError as error:
        return str(error)
    return ""


def saved_between(folder: str, data: bytes, settings: dict[str, Any], saved: str) -> dict[str, Tensor]:
    """The weights after two updates; what there was between them is saved."""
    backend = ep_backend(folder, settings)
    minis = batches_of(backend, data, False)
    _counted_update(backend, minis[0], [])
    save_state(backend, Path(saved))
    _counted_update(backend, minis[1], [])
    weights = {name: tensor.clone() for name, tensor in all_weights(backend)}
    return weights if dist.get_rank() == 0 else {}


def resumed(folder: str, data: bytes, settings: dict[str, Any], saved: str) -> dict[str, Tensor]:
    """The weights after the second update, from what ranks of another layout saved after the first."""
    backend = ep_backend(folder, settings)
    minis = batches_of(backend, data, False)
    backend.load(Path(saved))
    _counted_update(backend, minis[1], [])
    weights = {name: tensor.clone() for name, tensor in all_weights(backend)}
    return weights if dist.get_rank() == 0 else {}


class Counted(TorchDispatchMode):
    """Bytes of this rank in all-gathers, in reduce-scatters and in exchanges of rows, its own part included."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = self.exchanged = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if "c10d._allgather_base" in name:
            self.gathered += args[0].nbytes
        elif "c10d._reduce_scatter_base" in name:
            self.reduced += args[1].nbytes
        elif "c10d.alltoall_base" in name and args[0].is_floating_point():
            self.exchanged += args[0].nbytes
        return function(*args, **(kwargs or {}))


def traffic(folder: str, data: bytes, settings: dict[str, Any]) -> dict[str, int]:
    """Bytes of the first micro-batch of an update, and its tokens with padding."""
    backend = ep_backend(folder, settings)
    batch = batches_of(backend, data, False)[0][0]
    with Counted() as counted:
        backend.update([batch], lambda _, found: found.sum(), REPLAY, lr=0.0)
    return {
        "gathered": counted.gathered,
        "reduced": counted.reduced,
        "exchanged": counted.exchanged,
        "tokens": batch.input_ids.numel(),
    }


class CountExchanges(TorchDispatchMode):
    """Counts exchanges of counts, and orders of rows that experts make themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges = self.orders = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Rows are floating-point numbers, and bytes between context-parallel ranks.
        self.exchanges += "c10d.alltoall_base" in str(function) and args[0].dtype in (torch.int32, torch.int64)
        self.orders += function.overloadpacket is torch.ops.moe_replay.dispatch
        return function(*args, **(kwargs or {}))


def planned(
    folder: str, data: bytes, settings: dict[str, Any], routes: Routes, adapter: dict[str, Tensor] | None = None
) -> list[dict[str, Any]]:
    """The first update of a mini-batch with plans and without: scores, gradients, and what was counted."""
    data = without_last_routes(data) if routes == "engine" else data
    found = []
    for plans_rows in (True, False):
        backend = ep_backend(folder, settings, adapter)
        backend.replay.plans_rows = plans_rows
        (batch, *_), *_ = batches_of(backend, data, settings.get("packed", False))
        backend.score([batch], Routing("record"))
        if routes == "gap" and dist.get_rank() == dist.get_world_size() - 1:
            batch.recorded_routes = {0: _with_a_gap(batch.recorded_routes[0])}
        gradients: list[dict[str, Tensor]] = []
        backend._optimizer.register_step_pre_hook(
            lambda *_, backend=backend, gradients=gradients: gradients.append(whole_gradients(backend))
        )
        routing = Routing("replay", "rollout" if routes == "engine" else "recorded")
        with CountExchanges() as counted:
            (scores,) = backend.score([batch], routing)
            backend.update([batch], lambda _, logprobs: logprobs.sum(), routing, lr=0.0)
        found.append(
            {
                "values": {"scores": scores.logprobs, **gradients[0]},
                "exchanges": counted.exchanges,
                "orders": counted.orders,
                "layers": len(backend.replay.layers),
            }
        )
        backend.close()
    return found


def _with_a_gap(routes: RouteBatch) -> RouteBatch:
    valid = routes.valid.clone()
    valid[1, 3] = False
    return replace(routes, valid=valid, all_valid=(True, False, *routes.all_valid[2:]))


def refusal(folder: str, settings: dict[str, Any]) -> str:
    try:
        ep_backend(folder, settings)
    except MoeReplayError as error:
        return str(error)
    return ""


def families(names: list[str]) -> dict[str, list[float]]:
    """How far logits and gradients of each family are from those of all experts on one rank, for this rank's tokens."""
    from moe_replay.distributed.collectives import rank_grid
    from moe_replay.train.backends.expert_parallel import divide_experts
    from tests.replay.adapters.families import VOCABULARY, tiny_model

    ids = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(dist.get_rank()))
    found = {}
    for name in names:
        whole, divided = tiny_model(name), tiny_model(name)
        whole.set_experts_implementation("eager")
        kept = dict(whole.named_parameters())
        divide_experts(divided, rank_grid(dist.get_world_size(), torch.device("cpu"), "all ranks"))
        with torch.no_grad():
            for key, parameter in divided.named_parameters():
                if isinstance(parameter, DTensor):
                    parameter.to_local().copy_(kept[key].chunk(dist.get_world_size())[dist.get_rank()])
        outcomes = [_outcome(model, ids) for model in (divided, whole)]
        for key, gradient in outcomes[1].items():  # of all ranks' tokens, averaged as FSDP2 does
            if key != "logits":
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        for key, gradient in outcomes[0].items():
            if key in kept and ".experts." not in key:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        found[name] = [_apart(outcomes[0][key], outcomes[1][key]) for key in outcomes[1]]
    return found


def _outcome(model: Any, ids: Tensor) -> dict[str, Tensor]:
    output = model(input_ids=ids, use_cache=False)
    logits = output.last_hidden_state if getattr(output, "logits", None) is None else output.logits
    (logits.float().log_softmax(-1)[..., 7].sum() / 10).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach()} | {name: gradient.clone() for name, gradient in gradients.items()}


def _apart(found: Tensor, wanted: Tensor) -> float:
    if isinstance(found, DTensor):
        found, wanted = found.to_local(), wanted.chunk(dist.get_world_size())[dist.get_rank()]
    scale = wanted.norm().item()
    return (found - wanted).norm().item() / scale if scale > 1e-7 else 0.0


def offloaded(folder: str, data: bytes, settings: dict[str, Any]) -> list[float]:
    """Norms of two updates, and scores of the reference after them, with the weights moved away before each."""
    backend = ep_backend(folder, settings)
    minis = batches_of(backend, data, False)
    norms = []
    for mini in minis:
        backend.offload()
        backend.reload()
        norms.append(_counted_update(backend, mini, []).grad_norm)
    reference = torch.stack([scores.sum() for scores in backend.score_reference(minis[0])]).sum()
    dist.all_reduce(reference)
    return [*norms, reference.item()]
