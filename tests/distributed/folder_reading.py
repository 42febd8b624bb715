"""What a rank does with a model folder: reads the shards that it holds."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.train.backends import fsdp_loading as sharded_model
from tests.distributed.megatron_training import make_config, open_backend
from tests.distributed.weight_sources import LiveMemory
from tests.support.policy import all_weights


def never(*_: Any, **__: Any) -> None:
    raise AssertionError("the whole model was loaded")


def read_shards(folder: str) -> dict[str, Any]:
    """Bytes that this rank reads and holds at once, and the tensors that all have together."""
    sharded_model.load_model = never  # type: ignore[assignment]
    read_bytes, read = [], Checkpoint.read

    def counting(self: Checkpoint, name: str, slices: Any) -> Tensor:
        values = read(self, name, slices)
        read_bytes.append(values.nbytes)
        return values

    Checkpoint.read = counting  # type: ignore[method-assign]
    config = make_config(folder, "fsdp").model
    with LiveMemory() as memory:
        model = sharded_model.sharded_model(folder, config, torch.device("cpu"), trained=True)
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    state = {name: _whole(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return {
        "read": sum(read_bytes),
        "peak": memory.peak,
        "held": held,
        "state": state if dist.get_rank() == 0 else {},
    }


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def exported(folder: str, kind: str, settings: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a policy that was loaded from a folder."""
    backend = open_backend(make_config(folder, kind, **settings))
    weights = {name: tensor.clone() for name, tensor in all_weights(backend)}
    backend.close()
    return weights if dist.get_rank() == 0 else {}
