"""FSDP2 backend: a Transformers model sharded over all ranks; a rank or a context-parallel group trains a sequence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from moe_replay.distributed.collectives import Exchange
from moe_replay.records import MicroBatch
from moe_replay.replay.controller import attach
from moe_replay.routes.layout import Prefix, TokenLayout
from moe_replay.train.backends import lora
from moe_replay.train.backends.attention import forward_arguments, sharing_problem
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
from moe_replay.train.backends.compilation import CompiledLayers
from moe_replay.train.backends.expert_parallel import give_plans, is_divided, rows_of_rank
from moe_replay.train.backends.fp8_base import plain_value
from moe_replay.train.backends.fp8_weights import CODES
from moe_replay.train.backends.fsdp_loading import (
    EXPERT_ID,
    free_gathered,
    named_layers,
    row_offset,
    sharded_model,
    tied_names,
)
from moe_replay.train.backends.logprobs import EAGER, HeadMath, HeadScores
from moe_replay.train.backends.lora import AdaptedWeight, plain_name
from moe_replay.train.backends.offload import TrainerOffload, local_part
from moe_replay.train.backends.rank_state import Optimized, RankState
from moe_replay.train.backends.regions import RegionMap, Rows
from moe_replay.train.backends.shared_base import SharedBase
from moe_replay.train.backends.ulysses import ContextParallel
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.device import to_device
from moe_replay.weights.checkpoint import CheckpointForm
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.model_folder import ModelError
from moe_replay.weights.source import Group, HandedGroup, TensorInfo

logger = logging.getLogger(__name__)

COMPILED_CHUNKS = 4
"""Slices of `batch.logit_chunk` rows in one: compiled, the head holds logits once and in `model.dtype`, not float32."""
LENGTHS = (7, 12)
"""Of sequences that models are tried with: no dimension of a model has them, nor their sum."""
COMPILED_LENGTHS = (251, 509) * 10
"""The same to compile for a GPU, as far as a micro-batch takes them: the compiler chooses kernels for the sizes that it
sees first, e.g. whether a sum over tokens is split."""
PLANS_ALONE = False
"""Whether rows are planned without expert parallel too: on one H200 that saved nothing, and more had to be compiled."""


class FsdpSource:
    """A `WeightSource` of a Transformers model that is sharded over all ranks.

    dtype     of the weights that are sent, the one that FSDP2 computes in
    adapted   weights with LoRA adapters, which are merged
    scale     of the adapters

    Buffers are not cast in training and travel as they are: a bfloat16 correction bias would choose other experts.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, adapted: Sequence[AdaptedWeight] = (), scale: float = 1.0
    ) -> None:
        self._model, self._dtype, self._scale = model, dtype, scale
        self._adapted = {weight.weight: weight for weight in adapted}
        self._factors = {name for weight in adapted for name in (weight.down, weight.up)}
        self._form = CheckpointForm(model)
        self._metadata: list[TensorInfo] | None = None

    def metadata(self) -> Sequence[TensorInfo]:
        if self._metadata is None:
            state = self._state()
            self._metadata = [
                TensorInfo.of(name, tensor)
                for parts in self._parts(state)
                for part in parts
                for name, tensor in self._named(part, _empty(state[part.name], part, self._dtype)).items()
            ]
        return self._metadata

    def groups(self, receivers: Collection[int] = (0,)) -> Iterator[Group]:
        """Yield the tensors of each layer on `receivers`, and of what lies before and behind the layers.

        Divided experts come after their layer, those of each rank of an expert-parallel group in another list. A list
        that has been yielded is emptied when the next one is requested.
        """
        state = self._state()
        for parts in self._parts(state):
            group = self._group(state, parts, receivers)
            yield group
            group.clear()

    def owners(self) -> tuple[int, ...]:
        """Return the ranks that hold whole experts: all, where experts are divided and there are enough."""
        divided = [tensor for tensor in self._state().values() if isinstance(tensor, DTensor) and is_divided(tensor)]
        ranks = range(dist.get_world_size())
        return tuple(rank for rank in ranks if any(len(rows_of_rank(tensor, rank)) for tensor in divided))

    def owned_groups(
        self, receivers: Collection[int], copies: Callable[[int], Collection[int]], *, parts: bool
    ) -> Iterator[HandedGroup]:
        """Yield the tensors of each layer without its experts on `receivers`, then the experts of each rank there."""
        state = self._state()
        for owner, of_owner in self._owned_parts(state, parts):
            holders = receivers if owner is None else {owner, *copies(owner)}
            group = self._group(state, of_owner, holders)
            names = {self._plain_name(part.name): part for part in of_owner if part.experts is not None}
            rows = {
                name: (part.experts.start, state[part.name].shape[0])
                for name, _ in group
                if (part := names.get(name)) is not None and part.experts is not None
            }
            yield HandedGroup(owner, group, rows)
            group.clear()

    def _parts(self, state: Mapping[str, Tensor]) -> Iterator[list[_Part]]:
        """Yield what each group has."""
        for names, divided in self._layers(state, parts=False):
            yield [_Part(name) for name in names]
            if divided:
                experts = range(state[divided[0]].shape[0])
                size = len(experts) // state[divided[0]].device_mesh.size(1)  # type: ignore[attr-defined]  a DTensor
                for first in experts[::size]:
                    yield [_Part(name, experts[first : first + size]) for name in divided]

    def _owned_parts(self, state: Mapping[str, Tensor], parts: bool) -> Iterator[tuple[int | None, list[_Part]]]:
        """Yield what each group has, and the rank that holds it alone."""
        for names, divided in self._layers(state, parts):
            yield None, [_Part(name) for name in names]
            for owner in range(dist.get_world_size()) if divided else ():
                owned = [_Part(name, rows_of_rank(state[name], owner)) for name in divided]  # type: ignore[arg-type]
                if any(part.experts for part in owned):
                    yield owner, owned

    def _layers(self, state: Mapping[str, Tensor], parts: bool) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the names of each layer, and those of its divided experts; `parts`: of fused ones too."""
        layers = [name for name, _ in named_layers(self._model)]
        layer_of = {name: layer for layer in layers for name in state if name.startswith(f"{layer}.")}
        for _, group in groupby(state, key=lambda name: layer_of.get(name, "")):
            names = [name for name in group if name not in self._factors]
            divided = [name for name in names if is_divided(state[name]) and self._can_be_cut(state[name], name, parts)]
            yield [name for name in names if name not in divided], divided

    def _can_be_cut(self, tensor: Tensor, name: str, parts: bool) -> bool:
        """Return whether some experts alone make up tensors of the checkpoint; `parts`: or rows of them."""
        whole, alone = _Part(name), _Part(name, range(1))
        of_all = self._named(whole, _empty(tensor, whole, self._dtype))
        of_one = self._named(alone, _empty(tensor, alone, self._dtype))
        if parts and [*of_all] == [*of_one] == [self._plain_name(name)]:  # as the model has it
            (all_rows,), (one_row,) = of_all.values(), of_one.values()
            return all_rows.shape == tensor.shape and one_row.shape == (1, *tensor.shape[1:])
        return len(of_all) == len(of_one) * tensor.shape[0] and all(
            key in of_all and of_all[key].shape == part_tensor.shape and EXPERT_ID.search(key)
            for key, part_tensor in of_one.items()
        )

    def _named(self, part: _Part, values: Tensor) -> dict[str, Tensor]:
        """Return what a part of a parameter is in the checkpoint."""
        tensors = self._form.tensors(self._plain_name(part.name), values)
        if part.experts is None:
            return tensors
        first = part.experts.start
        return {
            EXPERT_ID.sub(lambda match: str(int(match[0]) + first), name): tensor for name, tensor in tensors.items()
        }

    def _state(self) -> dict[str, Tensor]:
        """Return the parameters and buffers of the model by name, tied parameters once."""
        tied = tied_names(self._model)
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in tied}

    def _plain_name(self, name: str) -> str:
        adapted = self._adapted.get(name)
        return plain_name(name) if adapted is None else adapted.plain

    def _group(self, state: Mapping[str, Tensor], parts: Sequence[_Part], receivers: Collection[int]) -> Group:
        """Return the tensors of some parameters, one after the other: the checkpoint's form of one may be a copy."""
        group: Group = []
        for part in parts:
            adapted = self._adapted.get(part.name)
            if adapted is not None:
                whole = self._merged(adapted, state, receivers, part.experts)
            else:
                tensor = self._value(state, part.name)
                (whole,) = _gathered([(tensor, part.experts, _sent_dtype(tensor, self._dtype))], receivers)
                del tensor
            if whole is not None:
                group.extend(self._named(part, whole).items())
        return group

    def _merged(
        self, adapted: AdaptedWeight, state: Mapping[str, Tensor], receivers: Collection[int], experts: range | None
    ) -> Tensor | None:
        weight, down, up = (self._value(state, name) for name in (adapted.weight, adapted.down, adapted.up))
        whole = _gathered([(weight, experts, weight.dtype), (down, None, down.dtype), (up, None, up.dtype)], receivers)
        weight, down, up = whole
        if weight is None or down is None or up is None:
            return None
        return adapted.merged(weight, down, up, self._scale, experts).to(self._dtype)

    def _value(self, state: Mapping[str, Tensor], name: str) -> Tensor:
        return plain_value(self._model, name, state[name].detach(), self._dtype)


class _Part(NamedTuple):
    """A parameter or buffer of the model, or some experts of it."""

    name: str
    experts: range | None = None


def _empty(tensor: Tensor, part: _Part, dtype: torch.dtype) -> Tensor:
    """Return a part of a tensor without values, as it is sent."""
    rows = tensor.shape[:1] if part.experts is None else (len(part.experts),)
    return torch.empty((*rows, *tensor.shape[1:]), dtype=_sent_dtype(tensor, dtype), device="meta")


def _sent_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if isinstance(tensor, DTensor) or tensor.dtype == CODES else tensor.dtype


def _gathered(
    tensors: Sequence[tuple[Tensor, range | None, torch.dtype]], receivers: Collection[int]
) -> list[Tensor | None]:
    """Return tensors, or some rows of them, in a dtype; None on ranks that do not receive them."""
    exchange = Exchange()
    whole = [_gather(tensor, rows, dtype, receivers, exchange) for tensor, rows, dtype in tensors]
    exchange.run()
    return whole


def _gather(
    tensor: Tensor, requested: range | None, dtype: torch.dtype, receivers: Collection[int], exchange: Exchange
) -> Tensor | None:
    """Return what is there once the exchange has run; None on ranks that do not receive it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if not isinstance(tensor, DTensor):
        return tensor if rank in receivers else None
    if set(receivers) >= set(range(size)) and not is_divided(tensor):
        return _whole(tensor.to(dtype))
    requested = range(tensor.shape[0]) if requested is None else requested
    held = [_common(rows_of_rank(tensor, peer), requested) for peer in range(size)]
    first = rows_of_rank(tensor, rank).start
    local = tensor.to_local()[held[rank].start - first : held[rank].stop - first].to(dtype)
    for receiver in sorted(set(receivers) - {rank}):
        exchange.send(local, receiver)
    if rank not in receivers:
        return None
    whole = torch.empty((len(requested), *tensor.shape[1:]), dtype=dtype, device=local.device)
    for peer, rows in enumerate(held):
        part = whole[rows.start - requested.start : rows.stop - requested.start]
        if peer == rank:
            part.copy_(local)
        else:
            exchange.receive(part, peer)
    return whole


def _common(a: range, b: range) -> range:
    """Return the rows that are in both; an empty range starts at the later of the two starts."""
    first = max(a.start, b.start)
    return range(first, max(first, min(a.stop, b.stop)))


class FsdpState(RankState):
    """The trained parameters and the buffers of a sharded model, and the optimizer's state.

    Frozen parameters come from `model.path`, the settings of the optimizer from the configuration.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, moments: bool = True) -> None:
        super().__init__({"kind": "fsdp"}, moments=moments)
        self._model = model
        self._optimizer = optimizer
        # Between passes the root module holds gathered parameters in place of these, which the optimizer steps.
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}

    def weights(self) -> Iterator[tuple[Tensor, RegionMap]]:
        """Yield trained parameters, tied ones once, and the buffers that a checkpoint of the model holds."""
        state = self._model.state_dict()  # gathered parameters are freed, so that what is restored is used
        parameters = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        yield from ((parameter, _rows(f"model.{name}", parameter)) for name, parameter in self._trained.items())
        yield from (
            (tensor, _rows(f"model.{name}", tensor)) for name, tensor in state.items() if name not in parameters
        )

    def optimized(self) -> Iterator[Optimized]:
        for name, parameter in self._trained.items():
            yield Optimized(parameter, self._optimizer.state[parameter], _rows(f"optimizer.{name}", parameter))


def _rows(name: str, tensor: Tensor) -> Rows:
    """Return the rows of a tensor that this rank holds: as `torch.chunk` cuts them, or all."""
    return Rows(name, tuple(tensor.shape), row_offset(tensor) if isinstance(tensor, DTensor) else 0)


class FsdpBackend(Backend):
    """The policy on this rank: float32 weights, computation in `model.dtype`."""

    def __init__(self, config: TrainConfig, folder: str, device: torch.device, base: SharedBase | None = None) -> None:
        super().__init__(device)
        self.shared_base = base
        context_size = config.backend.context_parallel
        self._context = ContextParallel.of(context_size, device)
        self.data_rank, self.data_size = dist.get_rank() // context_size, dist.get_world_size() // context_size
        self.reports_metrics = dist.get_rank() % context_size == 0
        if (ranks := config.backend.expert_parallel) > 1:
            self.expert_exchange = ExpertExchange(ranks, max(ranks // context_size, 1), self.reports_metrics)
        self._sharing = {"expert_size": config.backend.expert_parallel, "context_size": context_size}
        self._packed = config.batch.packed
        self._temperature = config.rollout.temperature
        self._max_grad_norm = config.optim.max_grad_norm
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._lora = config.model if config.model.lora_rank else None
        self._is_alone = dist.get_world_size() == 1
        self._keeps_gathered = config.backend.reshard_after_forward is False
        resharded = not self._keeps_gathered
        how: dict[str, Any] = {"resharded": resharded, "base": base, **self._sharing}
        self.model = sharded_model(folder, config.model, device, trained=True, **how)
        self._adapted = () if self._lora is None else lora.adapted_weights(self.model)
        self._reference = self._reference_model(config, folder)
        self.sharing_problem = self._sharing_problem(config)
        self.replay = attach(self.model, config.model.router_family or ())
        self.topology = self.replay.topology
        self._parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [{"params": same} for same in _by_sharding(self._parameters)],
            lr=config.optim.lr,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
            foreach=False,  # foreach would hold another copy of every moment
            fused=device.type == "cuda",
        )
        self._state = FsdpState(self.model, self._optimizer, moments=config.checkpoint.optimizer)
        self._offload = TrainerOffload(
            config.backend.offload, device, weights=self._movable_weights, optimizer=self._optimizer_state
        )
        self._layers = CompiledLayers()
        is_compiled = config.model.compile is True or (config.model.compile == "auto" and device.type == "cuda")
        math = HeadMath(*map(self._layers.function, EAGER)) if is_compiled else EAGER
        chunk = config.batch.logit_chunk * (COMPILED_CHUNKS if is_compiled else 1)
        self._scores = HeadScores(self.model, chunk, math, self._context)
        self._reference_scores = HeadScores(self._reference, chunk, math, self._context) if self._reference else None
        has_plans = (PLANS_ALONE or config.backend.expert_parallel > 1) and give_plans(
            self.model, self.replay, lambda: self.model.eval()(**self._some_tokens(self.layout(LENGTHS)))
        )
        if is_compiled and config.backend.expert_parallel == 1:
            fitting = max(2, config.batch.tokens_per_micro_batch // 380)
            lengths = LENGTHS if device.type == "cpu" else COMPILED_LENGTHS[:fitting]
            self._compile(lengths, with_plans=has_plans and config.replay.mode != "off")
        elif is_compiled and dist.get_rank() == 0:
            logger.info("layers run eagerly: they wait for other ranks (backend.expert_parallel); the head is compiled")
        for model in filter(None, (self.model, self._reference)):
            free_gathered(model)  # of these forwards, as that of `HeadScores`

    def _compile(self, lengths: Sequence[int], *, with_plans: bool) -> None:
        """Compile the layers in two passes over some tokens, outside any replay: a failure costs nothing here.

        lengths      of the sequences in these passes
        with_plans   also for experts that take plans
        """
        self.replay.keep_routers_eager()
        for model in filter(None, (self.model, self._reference)):
            self._layers.add(layer for _, layer in named_layers(model))
        layouts = [self.layout(lengths)]
        if self.sharing_problem is None:
            layouts.append(self.layout(lengths, (Prefix(), *[Prefix(0, 5)] * (len(lengths) - 1))))
        with self._layers.counted("the start"):
            for layout in layouts:
                self._run(layout)
            if with_plans:
                with self.replay.any_plan(layouts[0].num_rows):
                    self._run(layouts[0])
        self._optimizer.zero_grad()

    def _run(self, layout: TokenLayout) -> None:
        """Run the passes that are compiled over the tokens of a layout."""
        arguments = self._some_tokens(layout)
        with torch.no_grad():
            self.model.eval()(**arguments)
        logits = self.model.train()(**arguments).logits
        (0.0 * logits.float().sum()).backward()

    def _some_tokens(self, layout: TokenLayout) -> dict[str, Any]:
        """Return what the model is fed for the tokens of a layout: any, and the logits of one."""
        counted = [position for length in layout.lengths for position in range(length)]
        positions = to_device(np.array([*counted, 0])[layout.fed], self.device)
        arguments = forward_arguments(self.model, layout, self.device, self._context)
        ids = positions % 7  # of any vocabulary
        return {"input_ids": ids, "position_ids": positions, "use_cache": False, "logits_to_keep": 1, **arguments}

    def _reference_model(self, config: TrainConfig, folder: str) -> nn.Module | None:
        if not config.has_reference:
            return None
        path = config.model.reference or folder
        return sharded_model(path, config.model, self.device, trained=False, **self._sharing)

    def _sharing_problem(self, config: TrainConfig) -> str | None:
        """Return why sequences cannot share prompts; raise if they must."""
        if config.batch.share_prompts is False:
            return "batch.share_prompts = false"
        if not self._packed or self._context is not None:
            return "backend.context_parallel > 1" if self._packed else "batch.packed = false"
        models = filter(None, (self.model, self._reference))
        problem = next(filter(None, (sharing_problem(model, self.device, self._dtype) for model in models)), None)
        if problem is not None and config.batch.share_prompts is True:
            raise ModelError(
                "samples of a group cannot share the computation of their prompt",
                found=problem,
                remedy='Set batch.share_prompts = "auto", which shares prompts where it is possible',
            )
        return problem

    # ---- passes -------------------------------------------------------------------------------------------------

    def layout(self, lengths: Sequence[int], prefixes: Sequence[Prefix] = ()) -> TokenLayout:
        """Return a packed layout (one row), or one sequence a row with padding on the right; of it, its columns."""
        if prefixes:
            return TokenLayout.shared(lengths, prefixes)
        whole = TokenLayout.packed(lengths) if self._packed else TokenLayout.padded(lengths)
        if self._context is None:
            return whole
        rank, size = self._context.rank, self._context.size
        return whole.pad_to(multiple_of=size).context_parallel(rank, size, "contiguous")

    @property
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        return (self.replay.layers,)

    def score(
        self, batches: Sequence[MicroBatch], routing: Routing, temperature: float | None = None
    ) -> list[Scores | None]:
        scores: list[Scores | None] = []
        self.model.eval()
        with torch.no_grad(), self._layers.counted("scoring"):
            for batch in batches:
                with apply_routing(self.replay, batch, 0, routing):
                    scores.append(self._scores(batch, temperature or self._temperature))
        return scores

    @property
    def is_compiled(self) -> bool:
        return self._layers.is_used and not self._layers.runs_eagerly

    def score_uncompiled(self, batches: Sequence[MicroBatch], routing: Routing) -> list[Scores | None]:
        with self._layers.off():
            return self.score(batches, routing)

    def score_reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return log-probs of the reference model, or of the policy without its adapters."""
        scores, model = self._reference_scores or self._scores, self._reference or self.model
        model.eval()
        with torch.no_grad(), lora.adapters_off(model) if model is self.model else nullcontext():
            return [scores(batch, self._temperature, entropy=False).logprobs for batch in batches]

    def update(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction,
        routing: Routing,
        lr: float,
        old_pass: OldPass | None = None,
    ) -> UpdateResult:
        self.model.train()
        self._optimizer.zero_grad()
        for number, batch in enumerate(batches):
            is_last = number == len(batches) - 1
            if self._keeps_gathered:
                self.model.set_reshard_after_backward(is_last)
            if self._is_alone:  # whole gradients take no more memory than shards: copied once for all micro-batches
                self.model.set_requires_gradient_sync(is_last)
            with apply_routing(self.replay, batch, 0, routing):
                scores = self._scores(batch, self._temperature, entropy=old_pass is not None)
            if old_pass is not None:
                old_pass.take(batch, scores.detached())
            # FSDP averages gradients over ranks, but the loss is a sum over ranks; this is loss.backward()
            (loss(batch, scores.logprobs) * dist.get_world_size()).backward()
        if old_pass is not None:
            old_pass.finish()
            free_gathered(self.model)  # of forwards in it: they are out of reach of the step
        norm = _total_norm([p.grad for p in self._parameters if p.grad is not None])
        applied = bool(norm.isfinite())
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            for same in _by_sharding(self._parameters):
                nn.utils.clip_grads_with_norm_(same, self._max_grad_norm, norm)
            with self._offload.optimizer_on_device():
                self._optimizer.step()
        self._optimizer.zero_grad()
        return UpdateResult(float(norm), applied)

    # ---- host memory --------------------------------------------------------------------------------------------

    def _movable_weights(self) -> Iterator[Tensor]:
        """Yield the shards of policy and reference, after freeing what is gathered of them, and weights in 8 bits.

        Of a policy in the engine's memory (`SharedBase`) the trainer moves the shards alone: its adapters.
        """
        for model in filter(None, (self.model, self._reference)):
            free_gathered(model)
            yield from (p for p in model.parameters() if self.shared_base is None or isinstance(p, DTensor))

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

    def load(self, folder: Path) -> None:
        """Restore the shards and moments of this rank, from files of any number of ranks."""
        free_gathered(self.model)
        with self._offload.optimizer_on_device():
            self._state.load(folder)
            if self.device.type == "cuda":  # the fused step has its counters there
                for state in self._optimizer.state.values():
                    if "step" in state:  # not of a checkpoint without the optimizer's state
                        state["step"] = state["step"].to(self.device)

    def state_bytes(self) -> int:
        """Return the size of trained weights and, unless they are left out, their two moments, in float32."""
        return sum((12 if self._state.saves_moments else 4) * p.numel() for p in self._parameters)


def _by_sharding(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return tensors with the same mesh together, which one operation can take: experts that are divided, the rest."""
    parts = ([tensor for tensor in tensors if is_divided(tensor) == divided] for divided in (False, True))
    return [part for part in parts if part]


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of a gradient, each element of which one rank has."""
    norms = []
    for same in _by_sharding(gradients):
        if not is_divided(same[0]):
            norms.append(_whole(nn.utils.get_total_norm(same)))
            continue
        square = nn.utils.get_total_norm([local_part(gradient) for gradient in same]).square()
        dist.all_reduce(square)
        norms.append(square.sqrt())
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
