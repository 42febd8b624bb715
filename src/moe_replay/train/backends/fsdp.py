"""FSDP2 backend: a Transformers model sharded over all ranks, each of which trains its own sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moe_replay.replay.controller import attach
from moe_replay.rollout.adapter import Adapter
from moe_replay.routes.layout import TokenLayout
from moe_replay.train.backends import lora
from moe_replay.train.backends.base import Backend, LossFunction, Routing, Scores, UpdateResult
from moe_replay.train.backends.fsdp_source import FsdpSource
from moe_replay.train.backends.fsdp_state import FsdpState
from moe_replay.train.backends.offload import TrainerOffload
from moe_replay.train.backends.routing import apply_routing
from moe_replay.train.backends.sharded_model import sharded_model
from moe_replay.train.backends.transformers_logprobs import HeadScores
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.utils.files import Write


class FsdpBackend(Backend):
    """The policy on this rank: float32 weights, computation in `model.dtype`."""

    def __init__(self, config: TrainConfig, folder: str, device: torch.device) -> None:
        super().__init__(device)
        self.data_rank, self.data_size = dist.get_rank(), dist.get_world_size()
        self.reports_metrics = True
        self._packed = config.batch.packed
        self._temperature = config.rollout.temperature
        self._max_grad_norm = config.optim.max_grad_norm
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._lora = config.model if config.model.lora_rank else None
        self.model = sharded_model(folder, config.model, device, trained=True)
        self._adapted = () if self._lora is None else lora.adapted_weights(self.model)
        self._reference = self._reference_model(config, folder)
        self.replay = attach(self.model, config.model.router_family or ())
        self.topology = self.replay.topology
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.optim.lr,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            foreach=False,  # all at once, it would hold another copy of every moment
        )
        self._state = FsdpState(self.model, self._optimizer, moments=config.checkpoint.optimizer)
        self._offload = TrainerOffload(
            config.backend.offload, device, weights=self._sharded_parameters, optimizer=self._optimizer_state
        )
        self._scores = HeadScores(self.model, config.batch.logit_chunk)
        self._reference_scores = HeadScores(self._reference, config.batch.logit_chunk) if self._reference else None
        for model in (self.model, self._reference):
            if isinstance(model, FSDPModule):
                model.reshard()  # the forward inside `HeadScores` leaves gathered parameters in the root module

    def _reference_model(self, config: TrainConfig, folder: str) -> nn.Module | None:
        """Return the reference model; None if beta is 0, or if the policy without its adapters is the reference."""
        own = config.model.reference is None and self._lora is not None
        if config.algorithm.beta == 0 or own:
            return None
        return sharded_model(config.model.reference or folder, config.model, self.device, trained=False)

    # ---- passes -------------------------------------------------------------------------------------------------

    def layout(self, lengths: Sequence[int]) -> TokenLayout:
        """Return a packed layout (one row), or one sequence a row with padding on the right."""
        return TokenLayout.packed(lengths) if self._packed else TokenLayout.padded(lengths)

    @property
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers with a router; the whole model is one chunk."""
        return (self.replay.layers,)

    def score(
        self, batches: Sequence[MicroBatch], routing: Routing, temperature: float | None = None
    ) -> list[Scores | None]:
        """Return log-probs and entropies, micro-batch by micro-batch."""
        scores: list[Scores | None] = []
        self.model.eval()
        with torch.no_grad():
            for batch in batches:
                with apply_routing(self.replay, batch, 0, routing):
                    scores.append(self._scores(batch, temperature or self._temperature))
        return scores

    def score_reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return log-probs of the reference model, or of the policy without its adapters."""
        scores, model = self._reference_scores or self._scores, self._reference or self.model
        model.eval()
        with torch.no_grad(), lora.adapters_off(model) if model is self.model else nullcontext():
            return [scores(batch, self._temperature, entropy=False).logprobs for batch in batches]

    def update(self, batches: Sequence[MicroBatch], loss: LossFunction, routing: Routing, lr: float) -> UpdateResult:
        """Run forward and backward of each micro-batch in turn, then one AdamW step."""
        self.model.train()
        self._optimizer.zero_grad()
        for batch in batches:
            with apply_routing(self.replay, batch, 0, routing):
                logprobs = self._scores(batch, self._temperature, entropy=False).logprobs
            # FSDP averages gradients over ranks, but the loss is a sum over ranks
            (loss(batch, logprobs) * self.data_size).backward()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = _whole(nn.utils.get_total_norm(gradients))
        applied = bool(norm.isfinite())
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            nn.utils.clip_grads_with_norm_(self._parameters, self._max_grad_norm, norm)
            with self._offload.optimizer_on_device():
                self._optimizer.step()
        self._optimizer.zero_grad()
        return UpdateResult(float(norm), applied)

    # ---- host memory --------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move the shards of this rank and their moments to host memory."""
        self._offload.offload()

    def reload(self) -> None:
        """Move the shards back; moments are moved for each step."""
        self._offload.reload()

    def _sharded_parameters(self) -> Iterator[Tensor]:
        """Yield the shards of policy and reference, after freeing what is gathered of them."""
        for model in filter(None, (self.model, self._reference)):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            yield from model.parameters()

    def _optimizer_state(self) -> Iterator[Tensor]:
        for state in self._optimizer.state.values():
            yield from state.values()

    # ---- weights and state --------------------------------------------------------------------------------------

    def weight_source(self) -> FsdpSource:
        """Return the weights as an engine reads them; adapters are merged."""
        scale = 1.0 if self._lora is None else self._lora.lora_alpha / self._lora.lora_rank
        return FsdpSource(self.model, self._dtype, self._adapted, scale)

    def adapter(self) -> Adapter | None:
        """Return the adapter, gathered one tensor at a time when it is read; None if all weights are trained."""
        if self._lora is None:
            return None
        tensors = lora.adapter_state(self.model, self.model.state_dict(), self._adapted, _whole)
        fused = lora.fused_parameters(self.model, self._adapted)
        return Adapter(tensors, self._lora.lora_rank, self._lora.lora_alpha, fused)

    def stage(self) -> Write:
        """Copy the shards and moments of this rank to host memory."""
        return self._state.stage(self._offload.content_of)

    def load(self, folder: Path) -> None:
        """Restore the shards and moments of this rank, from files of any number of ranks."""
        with self._offload.optimizer_on_device():
            self._state.load(folder)

    def state_bytes(self) -> int:
        """Return the size of trained weights and, unless they are left out, their two moments, in float32."""
        return sum((12 if self._state.saves_moments else 4) * p.numel() for p in self._parameters)

    def close(self) -> None:
        """Detach routing replay from the model."""
        self.replay.detach()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
