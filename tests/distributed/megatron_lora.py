"""What a rank does with a policy that has LoRA adapters: given ones, so that every backend starts with the same."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.train.backends.base import Backend, Routing
from moe_replay.train.backends.fsdp_loading import row_offset
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.lora_adapter import module_names
from tests.distributed.megatron_training import REPLAY, _counted_update, batches_of, by_row, make_config, open_backend
from tests.support.policy import all_weights, save_state

RANK, ALPHA = 4, 6.0


def lora_config(folder: str, kind: str, targets: list[str], **settings: Any) -> TrainConfig:
    made = make_config(folder, kind, **settings).model_dump()
    made["model"] |= {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_target_modules": targets}
    made["algorithm"] |= {"beta": 0.1}
    return TrainConfig.model_validate(made)


def adapter_of(backend: Backend) -> dict[str, Tensor]:
    adapter = backend.adapter()
    assert adapter is not None
    return {name: tensor.clone() for name, tensor in adapter.tensors}


def start(folder: str, targets: list[str]) -> dict[str, Tensor]:
    """An adapter that is not zero, under PEFT's names, as FSDP2 and peft make it."""
    torch.manual_seed(3)
    backend = open_backend(lora_config(folder, "fsdp", targets))
    drawn = {name: torch.randn(tensor.shape) * 0.1 for name, tensor in adapter_of(backend).items()}
    for name in drawn:  # gate and up of an expert share their `lora_A`
        if ".experts." in name and "up_proj.lora_A" in name:
            drawn[name] = drawn[name.replace("up_proj", "gate_proj")].clone()
    backend.close()
    return drawn


@torch.no_grad()
def give(backend: Any, adapter: dict[str, Tensor]) -> None:
    """Put an adapter into a policy."""
    if hasattr(backend, "_adapted"):
        _give_to_fsdp(backend, adapter)
    else:
        _give_to_megatron(backend, adapter)
    found = adapter_of(backend)
    assert found.keys() == adapter.keys()
    assert all(torch.equal(found[name], adapter[name]) for name in adapter)


def _give_to_fsdp(backend: Any, adapter: dict[str, Tensor]) -> None:
    from moe_replay.weights.checkpoint import checkpoint_tensors

    parameters = dict(backend.model.named_parameters())
    for one in backend._adapted:
        shape = parameters[one.weight].shape
        names = [name for name, _ in checkpoint_tensors(backend.model, [(one.plain, torch.empty(shape))])]
        pairs = [[adapter[name] for name in module_names(weight)] for weight in names]
        if one.num_experts == 1:
            down, up = pairs[0]
        else:
            of_expert = [
                [pairs[names.index(n)] for n in names if f".experts.{e}." in n] for e in range(one.num_experts)
            ]
            down = torch.cat([parts[0][0] for parts in of_expert])  # (E r, in)
            up = torch.stack([torch.cat([b for _, b in parts]) for parts in of_expert], dim=-1).flatten(1)  # (out, r E)
        for name, value in ((one.down, down), (one.up, up)):
            target = parameters[name]
            assert target.shape == value.shape
            local, first = target.to_local(), row_offset(target)  # a rank beyond the last row has none
            local.copy_(value[first : first + len(local)])


def _give_to_megatron(backend: Any, adapter: dict[str, Tensor]) -> None:
    for spec, own in backend._adapters.items():
        for part in own.parts:
            name_down, name_up = module_names(part.name)
            down, up, first = adapter[name_down], adapter[name_up], part.group * RANK
            columns = part.slices[0].source[1] if spec.partition_dim == 1 else slice(None)
            own.down[first : first + RANK].copy_(down[:, columns])
            for piece in part.slices:
                own.up[piece.target[0]].copy_(up[piece.source[0]])
    backend._optimizer.reload_model_params()


def two_updates(
    folder: str, data: bytes, kind: str, targets: list[str], adapter: dict[str, Tensor], settings: dict[str, Any]
) -> dict[str, Any]:
    """Replay the routes of the trajectories: losses, norms, log-probs before, adapter and merged weights after."""
    config = lora_config(folder, kind, targets, **settings)
    backend = open_backend(config)
    give(backend, adapter)
    minis = batches_of(backend, data, config.batch.packed)
    native = [backend.score(mini, Routing()) for mini in minis]
    reference = [backend.score_reference(mini) for mini in minis]
    losses: list[float] = []
    norms = [_counted_update(backend, mini, losses, REPLAY).grad_norm for mini in minis]
    found = {
        "losses": losses if backend.reports_metrics else [0.0] * len(minis),
        "norms": norms,
        "native": by_row(backend, minis, native),
        "reference": sum(
            float(scores.sum())
            for batch, scores in zip(chain(*minis), chain(*reference), strict=True)
            if scores is not None and backend.reports_metrics and not batch.is_dummy
        ),
        "adapter": adapter_of(backend),
        "weights": {name: tensor.clone() for name, tensor in all_weights(backend)},
    }
    backend.close()
    return found if dist.get_rank() == 0 else found | {"adapter": {}, "weights": {}}


def stop_and_go_on(
    folder: str,
    data: bytes,
    targets: list[str],
    adapter: dict[str, Tensor],
    settings: dict[str, Any],
    saved: str,
    resumed: dict[str, Any] | None = None,
) -> list[str]:
    """Which tensors of the adapter differ if all of it is saved, thrown away and loaded between two updates.

    resumed   settings of the second update; then only differences beyond rounding count
    """
    config = lora_config(folder, "megatron", targets, **settings)
    backend = open_backend(config)
    give(backend, adapter)
    minis = batches_of(backend, data, config.batch.packed)
    _counted_update(backend, minis[0], [])
    save_state(backend, Path(saved))
    _counted_update(backend, minis[1], [])
    at_once = adapter_of(backend)
    backend.close()
    again = open_backend(config if resumed is None else lora_config(folder, "megatron", targets, **resumed))
    again.load(Path(saved))
    _counted_update(again, batches_of(again, data, config.batch.packed)[1], [])
    later = adapter_of(again)
    again.close()
    tolerance = 0.0 if resumed is None else 1e-4
    return [name for name in at_once if (at_once[name] - later[name]).norm() > tolerance * at_once[name].norm()]


def initial(folder: str, targets: list[str], settings: dict[str, Any]) -> dict[str, Tensor]:
    """The adapter that a run starts with."""
    backend = open_backend(lora_config(folder, "megatron", targets, **settings))
    found = adapter_of(backend)
    backend.close()
    return found if dist.get_rank() == 0 else {}
