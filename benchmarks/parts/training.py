"""Helpers for benchmarks of training steps: a model with random weights, synthetic sequences, settings, a timer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.random_weights import write_random_model

from moe_replay.records import FinishReason, Trajectory
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.config.train_config import TrainConfig


def write_model(folder: Path, sizes: dict[str, Any], device: torch.device) -> None:
    """Write a Qwen3-MoE, top 8, with random weights."""
    from transformers import Qwen3MoeConfig

    settings = Qwen3MoeConfig(
        **sizes,
        intermediate_size=2 * sizes["hidden_size"],
        num_experts_per_tok=8,
        norm_topk_prob=True,
        dtype=getattr(torch, dtype_on(device)),
    )
    write_random_model(folder, settings, device)


def dtype_on(device: torch.device) -> str:
    """Return the precision that is trained in there."""
    return "bfloat16" if device.type == "cuda" else "float32"


def config_of(folder: Path, device: torch.device, **sections: dict[str, Any]) -> TrainConfig:
    """Return the settings of a backend on this device; what is not about a step does not matter here."""
    settings: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": dtype_on(device)},
        "data": {"path": "unused"},
        "backend": {"device": device.type},
    }
    for name, section in sections.items():
        settings[name] = settings.get(name, {}) | section
    return TrainConfig.model_validate(settings)


def made_up(number: int, ids: np.ndarray, trace: RouteTrace, vocabulary: int) -> Trajectory:
    """Return a sequence that is half prompt and half completion, in a group of two."""
    return Trajectory(
        row=number,
        group=number // 2,
        token_ids=ids,
        logprobs=np.full(len(ids), -np.log(vocabulary), np.float32),
        versions=np.where(np.arange(len(ids)) < len(ids) // 2, -1, 0),
        trace=trace,
        finish_reason=FinishReason.STOP,
        reward=float(number % 2),
        advantage=float(number % 2) - 0.5,
    )


def random_ids(vocabulary: int, sequences: int, tokens: int) -> list[np.ndarray]:
    """Return the token ids of each sequence, the same ones for the same sizes."""
    return list(np.random.default_rng(0).integers(0, vocabulary, (sequences, tokens)).astype(np.int32))


def unrouted(config: Any, sequences: int, tokens: int) -> list[Trajectory]:
    """Return the sequences of `routed` without routes, for a model with this config."""
    topology, vocabulary = MoeTopology.from_config(config), config.vocab_size
    model = (topology.layers, topology.top_k)
    return [
        made_up(number, ids, RouteTrace.uncovered(ids, *model, num_experts=topology.num_experts), vocabulary)
        for number, ids in enumerate(random_ids(vocabulary, sequences, tokens))
    ]


def routed(model: Any, replay: RouterReplay, sequences: int, tokens: int) -> list[Trajectory]:
    """Return random sequences, routed as this model of Transformers routes them."""
    vocabulary = model.config.vocab_size
    device = next(model.parameters()).device
    found = []
    for number, ids in enumerate(random_ids(vocabulary, sequences, tokens)):
        fed = torch.from_numpy(ids[None]).long().to(device)
        with torch.no_grad(), replay.record() as recording:
            model(input_ids=fed, use_cache=False, logits_to_keep=1)
        (trace,) = recording.traces(TokenLayout.packed([tokens]), [ids])
        found.append(made_up(number, ids, trace, vocabulary))
    return found


def routed_by_folder(folder: Path, device: torch.device, sequences: int, tokens: int) -> list[Trajectory]:
    """Return what `routed` does, by the model of a folder, which is gone afterwards."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype_on(device))).to(device)
    return routed(model, attach(model), sequences, tokens)


def now(device: torch.device) -> float:
    """Return the time at which the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
