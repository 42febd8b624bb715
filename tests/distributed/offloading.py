"""What a rank does with a backend whose memory is in turns on the device and in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_replay.train.backends.base import Backend
from tests.distributed.megatron_training import LEARNING_RATE, REPLAY, batches_of, loss_sum, make_config, open_backend
from tests.support.policy import all_weights, save_state


def storage_bytes(tensors: Any) -> int:
    """Bytes that these tensors have on the device now."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.untyped_storage().nbytes() for tensor in local)


def held(backend: Any) -> dict[str, int]:
    """Bytes of a backend on the device."""
    if hasattr(backend, "models"):
        models = backend.models
        buffers = [one for model in models for one in [*model.buffers, *model.expert_parallel_buffers]]
        weights = [p for model in models for p in model.parameters()]
        return {
            "weights": storage_bytes(weights),
            "gradients": storage_bytes(buffer.grad_data for buffer in buffers),
            "optimizer": storage_bytes(backend._optimizer_state()),
        }
    return {
        "weights": storage_bytes(backend._state._trained.values()),
        "gradients": sum(p.grad is not None for p in backend._parameters),
        "optimizer": storage_bytes(backend._optimizer_state()),
    }


def updates_in_turns(folder: str, data: bytes, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Score and update with an offload before each: losses, log-probs, weights, and what was on the device when."""
    config = make_config(folder, kind, **settings)
    backend: Backend = open_backend(config)
    minis = batches_of(backend, data, config.batch.packed)
    losses: list[float] = []
    logprobs: list[Tensor] = []
    away, back = [], []
    for mini in minis:
        backend.offload()
        away.append(held(backend))
        backend.reload()
        logprobs += [scores.logprobs for scores in backend.score(mini, REPLAY) if scores is not None]
        back.append(held(backend))
        losses.append(0.0)
        backend.update(mini, loss_sum(losses), REPLAY, lr=LEARNING_RATE)
    saved = Path(folder) / f"saved-{config.backend.offload}"
    save_state(backend, saved)
    exported = {name: tensor.clone() for name, tensor in all_weights(backend)}
    backend.load(saved)
    backend.offload()
    backend.reload()
    again = {name: tensor.clone() for name, tensor in all_weights(backend)}
    backend.close()
    assert exported.keys() == again.keys()
    assert all(torch.equal(exported[name], again[name]) for name in exported)
    return {"losses": losses, "logprobs": logprobs, "weights": exported, "away": away, "back": back}
