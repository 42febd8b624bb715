"""What a rank does with an FSDP2 backend whose ranks share sequences: updates, with every gradient kept."""

from __future__ import annotations

import os
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_replay.errors import AlignmentError, MoeReplayError
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends.base import Routing, Scores
from moe_replay.train.backends.fsdp import FsdpBackend
from moe_replay.train.config.train_config import TrainConfig
from tests.distributed.megatron_training import batches_of, by_row, loss_sum
from tests.train.runs import closeness, train_on_rank

LEARNING_RATE = 0.01  # a step that hardly amplifies the rounding of small gradients
ROLLOUT = Routing("replay", "rollout", observe=True)
SCORING = {"off": Routing(), "r2": Routing("record"), "r3": ROLLOUT}
TRAINING = {"off": Routing(), "r2": Routing("replay", "recorded"), "r3": ROLLOUT}


def make_config(folder: str, settings: dict[str, Any]) -> TrainConfig:
    """A float32 run; `settings` has keys like "model.lora_rank"."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": folder, "dtype": "float32"},
        "data": {"path": "prompts.jsonl"},
        "rollout": {"temperature": 1.3},
        "backend": {"device": "cpu"},
        "optim": {"eps": 0.1, "weight_decay": 0.1, "max_grad_norm": 1e9},
        "batch": {"packed": True, "logit_chunk": 5},
        "algorithm": {},
    }
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    return TrainConfig.model_validate(sections)


def open_backend(folder: str, settings: dict[str, Any]) -> FsdpBackend:
    """The backend, with the same adapters in every run."""
    torch.manual_seed(0)
    return FsdpBackend(make_config(folder, settings), folder, torch.device("cpu"))


def updates_of(folder: str, data: bytes, cases: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Two updates for each case, a mode of replay and settings."""
    return {name: _updates(folder, data, mode, settings) for name, (mode, settings) in cases.items()}


def _updates(folder: str, data: bytes, mode: str, settings: dict[str, Any]) -> dict[str, Any]:
    backend = open_backend(folder, settings)
    minis = batches_of(backend, data, settings.get("batch.packed", True))
    scores = [backend.score(mini, SCORING[mode]) for mini in minis]
    references = {}
    if settings.get("algorithm.beta"):
        scored = [[Scores(one, one) for one in backend.score_reference(mini) if one is not None] for mini in minis]
        references = by_row(backend, minis, [[*mini] for mini in scored])
    gradients: list[dict[str, Tensor]] = []
    backend._optimizer.register_step_pre_hook(lambda *_: gradients.append(_whole_gradients(backend)))
    losses, norms = [], []
    for mini in minis:
        losses.append(0.0)
        updated = backend.update(mini, loss_sum(losses), TRAINING[mode], lr=LEARNING_RATE)
        assert updated.applied
        norms.append(updated.grad_norm)
    backend.close()
    return {
        "losses": losses if backend.reports_metrics else [0.0] * len(minis),
        "norms": norms,
        "scores": by_row(backend, minis, scores),
        "references": references,
        "gradients": gradients if dist.get_rank() == 0 else [],
    }


def _whole_gradients(backend: FsdpBackend) -> dict[str, Tensor]:
    named = [(name, parameter.grad) for name, parameter in backend.model.named_parameters() if parameter.requires_grad]
    assert all(isinstance(gradient, DTensor) for _, gradient in named)
    return {name: gradient.full_tensor().clone() for name, gradient in named if isinstance(gradient, DTensor)}


def with_routes_of_the_next_rank(folder: str, data: bytes, settings: dict[str, Any]) -> str:
    """What an update says if every rank of the group replays the routes of the next one's columns."""
    backend = open_backend(folder, settings)
    minis = batches_of(backend, data, packed=True)
    for batch in chain(*minis):
        assert batch.layout.context_shard is not None
        rank, size = batch.layout.context_shard
        whole = TokenLayout.packed(batch.layout.lengths, pad_to_multiple_of=size)
        shifted = whole.context_parallel((rank + 1) % size, size, "contiguous")
        traces = [one.trace for one in batch.trajectories]
        batch.rollout_routes = {0: RouteBatch.from_traces(traces, shifted, backend.chunk_layers[0])}
    try:
        backend.update(minis[0], loss_sum([0.0]), ROLLOUT, lr=LEARNING_RATE)
    except AlignmentError as error:
        return str(error)
    return "nothing"


def refusal(folder: str, settings: dict[str, Any]) -> str:
    """What the start of a backend says."""
    try:
        open_backend(folder, settings)
    except MoeReplayError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


_CHECKPOINTS: list[Path] = []


def train_until_killed(folder: str, prompts: str, output: str, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """A run whose first rank is killed while it computes rewards, as soon as there is a checkpoint."""
    _CHECKPOINTS.append(Path(output, "checkpoints"))
    reward = {"functions": ["tests.distributed.context_parallel:deadly"], "workers": 0}
    return train_on_rank(folder, prompts, output, overrides | {"reward": reward})


def deadly(prompts: list, completions: list[str], solution: list[str], **columns: Any) -> list[float | None]:
    """`closeness`, unless there is a checkpoint."""
    if any(path for folder in _CHECKPOINTS for path in folder.glob("step-*")):
        os.kill(os.getpid(), signal.SIGKILL)
    return closeness(prompts, completions, solution, **columns)
