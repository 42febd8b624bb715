"""Megatron-Core backend: tensor, expert, pipeline, context and data parallel.

Every pass, scoring included, runs through Megatron's pipeline schedules; they call `loss.backward()`. The last stage
returns hidden states instead of logits, and the output layer, whose vocabulary tensor-parallel ranks share, is applied
here in slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_replay.distributed.ranks import raise_on_all_ranks
from moe_replay.megatron import lora
from moe_replay.megatron.lora import LoraPlan, adapter_tensors
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.local_shards import ParameterSpec
from moe_replay.megatron.weights.source import MegatronSource
from moe_replay.records import MicroBatch
from moe_replay.replay.adapters.megatron import language_model
from moe_replay.replay.adapters.megatron_settings import layout_for
from moe_replay.replay.controller import attach
from moe_replay.routes.layout import Prefix, TokenLayout
from moe_replay.train.backends import megatron_build as build
from moe_replay.train.backends.base import (
    Backend,
    ExpertExchange,
    LossFunction,
    OldPass,
    Routing,
    Scores,
    UpdateResult,
    apply_routing,
)
from moe_replay.train.backends.logprobs import Head, head_logprobs
from moe_replay.train.backends.megatron_plans import counts_every_row, give_plans
from moe_replay.train.backends.megatron_state import MegatronState
from moe_replay.train.backends.offload import TrainerOffload
from moe_replay.train.backends.ulysses import sum_over_ranks
from moe_replay.train.config.sections import BackendConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.lora_adapter import Adapter


@contextmanager
def hidden_states_only(chunk: nn.Module) -> Iterator[None]:
    """Have the forward of this chunk end before its output layer, if it has one: hidden states (W, B, H)."""
    model = language_model(chunk)
    has_head, model.post_process = model.post_process, False
    try:
        yield
    finally:
        model.post_process = has_head


def token_scores(
    hidden: Tensor, chunk: nn.Module, batch: MicroBatch, *, temperature: float, rows: int, entropy: bool = True
) -> Scores:
    """Score hidden states (W, B, H) of the last chunk: log-probs (N,) with gradient; entropy (N,) without, or zeros.

    All N tokens of the micro-batch, also those of other context-parallel ranks: each of these ranks computes the whole
    loss, but its gradient flows to its own tokens only, so that the sum over ranks is the gradient.

    hidden   with sequence parallelism, this rank's part of the columns
    rows     whose logits are held together
    """
    from megatron.core import parallel_state, tensor_parallel

    model = language_model(chunk)
    if model.config.sequence_parallel:
        hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden)
    else:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
    targets = hidden.transpose(0, 1).flatten(0, 1)[batch.target_positions]
    shares = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if shares else model.output_layer.weight
    head = Head(weight, model.output_layer.bias, parallel_state.get_tensor_model_parallel_group())
    local = head_logprobs(
        targets, head, batch.target_ids, temperature=temperature, chunk=rows, entropy=entropy, mask=batch.logit_mask
    )
    zeros = torch.zeros_like(batch.loss_weights)
    scores = [zeros.index_copy(0, batch.target_index, values) for values in local]
    context_group: Any = parallel_state.get_context_parallel_group()
    if context_group.size() > 1:
        scores = [sum_over_ranks(values, context_group) for values in scores]
    return Scores(*scores)


Forward = Callable[[MicroBatch, int, nn.Module], Tensor]
"""(micro-batch, chunk, model) -> output of the chunk."""
Finish = Callable[[int, Tensor], Tensor]
"""(index of the micro-batch, hidden states) -> scalar, on the last stage."""


class MegatronBackend(Backend):
    """The chunks of the policy on this rank, its optimizer, and the chunks of the reference model if there is one."""

    def __init__(self, config: TrainConfig, folder: str, device: torch.device) -> None:
        build.start_parallel(config, device)
        from megatron.core import parallel_state

        super().__init__(device)
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.data_size = parallel_state.get_data_parallel_world_size()
        is_first_of_shards = (
            parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_context_parallel_rank() == 0
        )
        self.reports_metrics = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and is_first_of_shards
        self.expert_exchange = _expert_exchange(config.backend, reports=is_first_of_shards)
        if config.backend.virtual_pipeline:
            self.micro_batch_multiple = config.backend.pipeline_parallel
        self._packed = config.batch.packed
        self._temperature = config.rollout.temperature
        self._max_grad_norm = config.optim.max_grad_norm
        self._logit_chunk = config.batch.logit_chunk

        recipe = build.recipe_for(config, folder)
        self._config = recipe.config
        self._family = recipe.family
        chunks = build.load_chunks(recipe, folder, device, packed=self._packed)
        like, model = Checkpoint(folder), config.model
        self._lora: LoraPlan | None = None
        self._adapters: dict[ParameterSpec, lora.WeightAdapter] = {}
        if model.lora_rank:
            self._lora = LoraPlan.of(model.lora_rank, model.lora_alpha, model.lora_target_modules, like, self._family)
            with raise_on_all_ranks("adding LoRA adapters"):
                self._adapters = lora.add_adapters(chunks, self._lora, config.seed)
        self.models = build.distributed(chunks, config)
        self._optimizer = build.make_optimizer(self.models, config.optim, sharded=config.backend.distributed_optimizer)
        self._reference = self._reference_chunks(config, folder) if config.has_reference else None
        self.replay = attach(self.models)
        self.topology = self.replay.topology
        self.replay.takes_stand_ins = not counts_every_row(recipe.config)
        give_plans(self.models, self.replay, device)
        layout = {
            **build.parallel_sizes(config.backend),
            "distributed_optimizer": config.backend.distributed_optimizer,
            "dtype": model.dtype,
        }
        self._state = MegatronState(
            *(self.models, self._optimizer, layout, like, self._family, self._adapters),
            moments=config.checkpoint.optimizer,
        )
        self._state_bytes = self._state.bytes_of_all_ranks()
        self._source = MegatronSource(self.models, like, self._family, self._adapters)
        self._offload = TrainerOffload(
            config.backend.offload,
            device,
            weights=self._weight_tensors,
            gradients=self._gradient_buffers,
            optimizer=self._optimizer_state,
        )

    def _reference_chunks(self, config: TrainConfig, folder: str) -> list[nn.Module]:
        source = config.model.reference or folder
        recipe = build.recipe_for(config, source)
        return [
            chunk.requires_grad_(False) for chunk in build.load_chunks(recipe, source, self.device, packed=self._packed)
        ]

    # ---- passes -------------------------------------------------------------------------------------------------

    def layout(self, lengths: Sequence[int], prefixes: Sequence[Prefix] = ()) -> TokenLayout:
        """Return a packed (thd) or right-padded layout; sequence-major, this context-parallel rank's columns."""
        assert not prefixes, self.sharing_problem
        return layout_for(self._config, lengths, packed=self._packed)

    @property
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.replay.layers_of(model) for model in self.models)

    def score(
        self, batches: Sequence[MicroBatch], routing: Routing, temperature: float | None = None
    ) -> list[Scores | None]:
        """Return log-probs and entropies on the last pipeline stage, None on the others."""
        return self._scored(self.models, batches, self._policy_forward(routing), temperature or self._temperature)

    def score_reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        if self._reference is not None:
            scores = self._scored(self._reference, batches, self._native_forward, self._temperature)
        elif self._lora is not None:
            with lora.adapters_off(self._adapters):
                scores = self._scored(self.models, batches, self._native_forward, self._temperature)
        else:
            raise ValueError("there is a reference model only where algorithm.beta > 0")
        return [None if score is None else score.logprobs for score in scores]

    def update(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction,
        routing: Routing,
        lr: float,
        old_pass: OldPass | None = None,
    ) -> UpdateResult:
        # Megatron divides the loss by the number of micro-batches and gradients by the number of data-parallel ranks.
        scale = len(batches) * self.data_size

        def scaled_loss(number: int, hidden: Tensor) -> Tensor:
            batch = batches[number]
            scores = token_scores(
                *(hidden, self.models[-1], batch),
                temperature=self._temperature,
                rows=self._logit_chunk,
                entropy=old_pass is not None,
            )
            if old_pass is not None:
                old_pass.take(batch, scores.detached())
            return loss(batch, scores.logprobs) * scale

        with self._offload.gradients_on_device():
            self._zero_gradients()
            self._run(self.models, batches, self._policy_forward(routing), scaled_loss, forward_only=False)
            if old_pass is not None:
                old_pass.finish()
            with self._offload.optimizer_on_device():
                overflowed = self._optimizer.prepare_grads()
                norm = float(self._optimizer.get_grad_norm())
                applied = self._on_all_ranks(math.isfinite(norm) and not overflowed)
                if applied:
                    self._step(norm, lr)
            self._zero_gradients()
        return UpdateResult(norm, applied)

    def _step(self, norm: float, lr: float) -> None:
        from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for part in self._optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self._max_grad_norm, norm)
        self._optimizer.step_with_ready_grads()

    def _zero_gradients(self) -> None:
        for model in self.models:
            model.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _on_all_ranks(self, flag: bool) -> bool:
        """Whether the flag is set on every rank: ranks that disagree about a step would hold different weights."""
        everywhere = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        return bool(everywhere)

    # ---- Megatron's schedules -----------------------------------------------------------------------------------

    def _policy_forward(self, routing: Routing) -> Forward:
        def forward(batch: MicroBatch, chunk: int, model: nn.Module) -> Tensor:
            with apply_routing(self.replay, batch, chunk, routing):
                return self._native_forward(batch, chunk, model)

        return forward

    def _native_forward(self, batch: MicroBatch, chunk: int, model: nn.Module) -> Tensor:
        half = self._config.bf16 or self._config.fp16
        with hidden_states_only(model):
            return model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                attention_mask=None,  # causal, and padding comes last
                packed_seq_params=self._packed_params(batch.layout) if self._packed else None,
                **({"fp32_output": False} if half else {}),
            )

    def _packed_params(self, layout: TokenLayout) -> Any:
        """Return the boundaries of packed sequences, padding included, over all context-parallel ranks."""
        from megatron.core.packed_seq_params import PackedSeqParams

        widths = torch.tensor([0, *layout.segments], dtype=torch.int32) * self._config.context_parallel_size
        bounds = widths.cumsum(0, dtype=torch.int32).to(self.device)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=int(widths.max()),
            max_seqlen_kv=int(widths.max()),
        )

    def _scored(
        self, models: list[nn.Module], batches: Sequence[MicroBatch], forward: Forward, temperature: float
    ) -> list[Scores | None]:
        scores: list[Scores | None] = [None] * len(batches)

        def keep(number: int, hidden: Tensor) -> Tensor:
            scores[number] = token_scores(
                hidden, models[-1], batches[number], temperature=temperature, rows=self._logit_chunk
            )
            return torch.zeros((), device=self.device)

        with torch.no_grad():
            self._run(models, batches, forward, keep, forward_only=True)
        return scores

    def _run(
        self,
        models: list[nn.Module],
        batches: Sequence[MicroBatch],
        forward: Forward,
        finish: Finish,
        *,
        forward_only: bool,
    ) -> None:
        if not batches:
            return
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number = next(numbers)
            output = forward(batches[number], models.index(model), model)
            return output, lambda hidden: (finish(number, hidden), {})

        interleaved = self._config.virtual_pipeline_model_parallel_size is not None
        numbers = [iter(range(len(batches))) for _ in models]
        rows, width = batches[0].input_ids.shape
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=numbers if interleaved else numbers[0],
            model=models if interleaved else models[0],
            num_microbatches=len(batches),
            seq_length=width * self._config.context_parallel_size,
            micro_batch_size=rows,
            forward_only=forward_only,
        )

    # ---- host memory --------------------------------------------------------------------------------------------

    def _weight_tensors(self) -> Iterator[Tensor]:
        for chunk in [*self.models, *(self._reference or ())]:
            yield from chunk.parameters()

    def _gradient_buffers(self) -> Iterator[Tensor]:
        for model in self.models:
            yield from (buffer.grad_data for buffer in [*model.buffers, *model.expert_parallel_buffers])

    def _optimizer_state(self) -> Iterator[Tensor]:
        for parameter, state, _ in self._state.optimized():
            yield parameter
            yield from (value for value in state.values() if torch.is_tensor(value))

    # ---- weights and state --------------------------------------------------------------------------------------

    def weight_source(self) -> MegatronSource:
        return self._source

    def adapter(self) -> Adapter | None:
        if self._lora is None:
            return None
        return Adapter(adapter_tensors(self.models, self._lora, self._adapters), self._lora.rank, self._lora.alpha)

    def state_bytes(self) -> int:
        """Return the size of weights, moments and float32 copies on all ranks."""
        return self._state_bytes

    def close(self) -> None:
        """Detach routing replay from the model, and end Megatron-Core's process groups."""
        from megatron.core import parallel_state

        super().close()
        parallel_state.destroy_model_parallel()


def _expert_exchange(backend: BackendConfig, *, reports: bool) -> ExpertExchange | None:
    """Return how tokens travel: an exchange has consecutive ranks, those of a data rank are consecutive too."""
    if backend.expert_parallel == 1:
        return None
    expert_tensor = backend.expert_tensor_parallel or backend.tensor_parallel
    of_data_rank = backend.tensor_parallel * backend.context_parallel
    data_ranks = max(backend.expert_parallel * expert_tensor // of_data_rank, 1)
    return ExpertExchange(backend.expert_parallel, data_ranks, reports)
