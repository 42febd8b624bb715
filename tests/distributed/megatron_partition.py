"""A partitioned Megatron-Core model, and how far its losses and gradients are from those of the whole one.

Everything here runs on a rank; tests/distributed/megatron_models.py has the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import moe_replay as mr
from tests.distributed.megatron_models import (
    LENGTHS,
    WIDTH,
    Case,
    by_name,
    case_layout,
    enable,
    experts_of,
    fed,
    make_chunk,
    make_config,
    packed_params,
    sequences,
    start,
)

HUGE = 1e6
LEARNING_RATE = 1e6  # so that a step is large beside the weights, and rounding small beside the step


def global_name(name: str, chunk: nn.Module, experts_here: int) -> str:
    """The name that a parameter of a chunk has in the whole model."""
    from megatron.core import parallel_state

    def layer(match: re.Match) -> str:
        return f"decoder.layers.{chunk.decoder.layers[int(match[1])].layer_number - 1}."

    def expert(match: re.Match) -> str:
        first = parallel_state.get_expert_model_parallel_rank() * experts_here
        return f"local_experts.{int(match[1]) + first}."

    name = re.sub(r"decoder\.layers\.(\d+)\.", layer, name)
    return re.sub(r"local_experts\.(\d+)\.", expert, name)


def shard_of(name: str, whole: Tensor, shape: torch.Size) -> Tensor:
    """This rank's part of a parameter of the whole model, or of its gradient."""
    from megatron.core import parallel_state as ps

    if whole.shape == shape:
        return whole
    if "local_experts" in name:
        rank, size = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    else:
        rank, size = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    if "linear_fc1" in name:  # gate and up projection are each cut
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    (dim,) = (i for i in range(whole.dim()) if whole.shape[i] != shape[i])
    return whole.chunk(size, dim)[rank]


class Partition:
    """This rank's chunks of a model, with the weights of the whole one, wrapped as in training, and attached."""

    def __init__(self, case: Case, reference: dict[str, Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.module import Float16Module

        enable()
        start(case.tp, case.pp, case.vpp, case.cp, case.ep, case.etp)
        self.case = case
        self.reference = reference
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.config = make_config(case.variant, **experts_of(case.variant), **case.parallel_settings())
        stages = [None] if case.vpp is None else range(case.vpp)
        plain = case.packed or case.cp > 1
        self.chunks = [make_chunk(self.config, stage, plain) for stage in stages]
        self.parameters = [
            (name, parameter)
            for chunk in self.chunks
            for local, parameter in chunk.named_parameters()
            for name in [global_name(local, chunk, self.config.num_moe_experts // case.ep)]
        ]
        weights = by_name(reference["weights"], reference["shapes"])
        for name, parameter in self.parameters:
            parameter.data.copy_(shard_of(name, weights[name], parameter.shape))
        inner = [Float16Module(self.config, chunk) for chunk in self.chunks] if self.config.bf16 else self.chunks
        self.models = [self._distributed(chunk) for chunk in inner]
        self.optimizer = self._optimizer() if case.optimizer else None
        self._connect()
        self.replay = mr.attach(self.models)

    def _distributed(self, model: nn.Module) -> nn.Module:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=self.case.overlap,
            overlap_param_gather=self.case.overlap and self.case.optimizer == "sharded",
            use_distributed_optimizer=self.case.optimizer == "sharded",
        )
        return DistributedDataParallel(self.config, settings, model)

    def _optimizer(self) -> Any:
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        settings = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE * HUGE,
            adam_eps=HUGE,  # beside which gradients vanish: a step is the gradient times the learning rate
            weight_decay=0.0,
            clip_grad=0.0,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=self.case.optimizer == "sharded",
            overlap_param_gather=self.case.overlap and self.case.optimizer == "sharded",
        )
        return get_megatron_optimizer(settings, self.models)

    def _connect(self) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.config.finalize_model_grads_func = finalize_model_grads
        if self.case.overlap:
            self.config.no_sync_func = [model.no_sync for model in self.models]
            self.config.grad_sync_func = [model.start_grad_sync for model in self.models]
            if self.case.vpp is None:
                self.config.no_sync_func = self.models[0].no_sync
                self.config.grad_sync_func = self.models[0].start_grad_sync

    # ---- micro-batches ----------------------------------------------------------------------------------------------

    def numbers(self) -> range:
        """The micro-batches of this data-parallel rank."""
        count = self.case.micro_batches
        return range(self.dp_rank * count, (self.dp_rank + 1) * count)

    def traces(self, number: int) -> list[mr.RouteTrace]:
        return [mr.RouteTrace.from_bytes(data) for data in self.reference["traces"][number]]

    def inputs(self, number: int) -> tuple[mr.TokenLayout, dict[str, Any]]:
        token_ids = sequences(number, self.case.varying)
        layout = case_layout(self.case, self.config, [len(ids) for ids in token_ids])
        inputs: dict[str, Any] = fed(layout, token_ids)
        if self.case.packed:
            inputs["packed_seq_params"] = packed_params([width * self.case.cp for width in layout.segments])
        return layout, inputs

    def forward_step(self, numbers: Iterator[int], model: nn.Module) -> tuple[Tensor, Any]:
        """One forward of one chunk, as Megatron's schedules call it."""
        number = next(numbers)
        layout, inputs = self.inputs(number)
        batch = mr.RouteBatch.from_traces(self.traces(number), layout, self.replay.layers_of(model))
        with self.replay.replay(batch):
            output = model(**inputs)
        return output, lambda losses: self.loss(losses, inputs["loss_mask"], layout.num_tokens)

    def loss(self, losses: Tensor, mask: Tensor, total: int) -> tuple[Tensor, dict[str, Tensor]]:
        """This context-parallel rank's part of the micro-batch's loss."""
        part = (losses.float() * mask).sum() / total
        return part, {"loss": part.detach().clone()}

    def run(self, forward_only: bool = False) -> list[float]:
        """All micro-batches, forward and backward: the losses, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for model in self.models:
            model.zero_grad_buffer()
        iterators = [iter(self.numbers()) for _ in self.models]
        width = 3 * WIDTH if self.case.packed else WIDTH
        results = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=iterators if self.case.vpp else iterators[0],
            model=self.models if self.case.vpp else self.models[0],
            num_microbatches=self.case.micro_batches,
            seq_length=width,
            micro_batch_size=1 if self.case.packed else len(LENGTHS),
            forward_only=forward_only,
        )
        return [result["loss"].item() for result in results]

    # ---- comparing --------------------------------------------------------------------------------------------------

    def expected_gradients(self) -> dict[str, Tensor]:
        """Of the mean loss over all micro-batches of all data-parallel ranks."""
        gradients = self.reference["gradients"][: self.case.micro_batches * self.case.dp]
        return by_name(gradients.mean(0), self.reference["shapes"])

    def gradients(self) -> list[Tensor]:
        """Of each parameter: what the optimizer takes off it, where there is one, as each rank may hold a part only."""
        if self.optimizer is None:
            return [parameter.main_grad.float() for _, parameter in self.parameters]
        before = [parameter.detach().float().clone() for _, parameter in self.parameters]
        stepped, _, _ = self.optimizer.step()
        assert stepped
        if self.case.overlap:
            for model in self.models:
                model.start_param_sync(force_sync=True)
        after = [parameter.detach().float() for _, parameter in self.parameters]
        return [(old - new) / LEARNING_RATE for old, new in zip(before, after, strict=True)]

    def distance(self) -> tuple[float, str]:
        """The largest relative difference of a parameter's gradient, and the name of that parameter."""
        worst, whole = (0.0, ""), self.expected_gradients()
        for (name, parameter), found in zip(self.parameters, self.gradients(), strict=True):
            expected = shard_of(name, whole[name], parameter.shape)
            assert expected.norm() > 0, f"no token has a say in {name}"
            worst = max(worst, (((found - expected).norm() / expected.norm()).item(), name))
        return worst


def run_case(case: Case, path: str) -> dict[str, Any]:
    """On each rank: the layout's losses, and how far its gradients are from those of the whole model."""
    reference = torch.load(path, weights_only=True)
    partition = Partition(case, reference)
    losses = partition.run()
    worst, name = partition.distance()
    return {"dp": partition.dp_rank, "losses": losses, "worst": worst, "name": name, "layers": partition.replay.layers}
