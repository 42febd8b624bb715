"""A guard for ms-swift's own replay in Megatron GRPO, or our replay in its place (`MOE_REPLAY_GUARD`).

ms-swift has no registry of trainers, so that methods of them are replaced. Its collator leaves the routes of whole
micro-batches (R3); on their way to the routers ms-swift cuts them for this rank, and we do not follow: where tokens are
is known from `prepare_batch` of ms-swift, through which an index of the tokens is sent. With R2 the old-log-prob pass
is observed, and updates are compared with what was seen there. On Ray, updates are given the routes of all layers.

The verdict on a step comes when its backward has ended, before the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.distributed.ranks import all_gather_json
from moe_replay.integrations.hosts import MS_SWIFT, HostError, ReplaySettings, printed_before_raised
from moe_replay.integrations.megatron_guard import RouterGuard, token_layout, without_own_replay
from moe_replay.interop import from_ms_swift
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace

PARAMETERS = {
    "MegatronGRPOTrainer._maybe_compute_logps": ("self", "batch", "teacher_inputs"),
    "MegatronGRPOTrainer.forward_step": ("self", "data_iterator", "model"),
    "MegatronGRPOTrainer.train_step": ("self", "train_data_iterator"),
    "MegatronGRPOTrainer.compute_per_token_logps": ("self", "model", "data_iterator", "no_grad", "temperature"),
    "RouterReplayHelper.is_replay_forward_action": ("tf_config", "vp_rank"),
    "RouterReplayHelper.is_r2_record_action": ("tf_config", "vp_rank"),
    "RouterReplay.get_replay_topk": ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
}
PREPARE = {"prepare_batch": ("args", "data", "vp_stage")}
WORKER = {"MegatronWorker._compute_logps": ("self", "model_inputs", "model", "output_key")}
CALLBACK = "moe_replay"  # in ms-swift's --callbacks


def install(module: ModuleType) -> None:
    """Change the trainers of ms-swift. `module` is swift.megatron.trainers.grpo_trainer."""
    from swift.megatron.callbacks import megatron_callbacks_map
    from swift.megatron.trainers import base, rlhf_mixin, utils

    MS_SWIFT.check_parameters(module, PARAMETERS)
    MS_SWIFT.check_parameters(utils, PREPARE)
    grpo, scoring = module.MegatronGRPOTrainer, rlhf_mixin.MegatronRLHFTrainer
    grpo._maybe_compute_logps = _keeping_traces(grpo._maybe_compute_logps)
    grpo.forward_step = _guarded_update(grpo.forward_step)
    scoring.compute_per_token_logps = _guarded_scoring(scoring.compute_per_token_logps)
    base.BaseMegatronTrainer.train_step = _judged(base.BaseMegatronTrainer.train_step)
    base.get_forward_backward_func = _judging(base.get_forward_backward_func)
    megatron_callbacks_map[CALLBACK] = _callback()


def install_on_ray(module: ModuleType) -> None:
    """Change the workers of ms-swift on Ray. `module` is swift.ray.megatron.megatron_worker."""
    MS_SWIFT.check_parameters(module, WORKER)
    module.MegatronWorker._compute_logps = _replaying_policy_only(module.MegatronWorker._compute_logps)


def _callback() -> type:
    from swift.megatron.callbacks import MegatronCallback

    class MoeReplayCallback(MegatronCallback):
        """Puts the metrics of a step among those that ms-swift logs."""

        def on_step_end(self) -> None:
            guard = guards.get(self.trainer)
            if guard is None:
                return
            for name, value in guard.latest.items():
                pair = torch.tensor([value, 1.0], device=guard.device)  # ms-swift divides the sum by the count
                before = self.trainer._train_metrics.get(name)
                self.trainer._train_metrics[name] = pair if before is None else before + pair

    return MoeReplayCallback


# ---- the guard of a process ------------------------------------------------------------------------------------------


class SwiftGuard(RouterGuard):
    """The routers of the model that a process trains.

    latest        metrics of the last update
    is_updating   whether an update runs
    """

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        chunks = [language_model(model) for model in trainer.unwrapped_models]
        if len(chunks) > 1:
            raise HostError(
                "ms-swift replays routes in the first virtual stage of a rank only",
                expected="one chunk of the model on each pipeline rank",
                found=len(chunks),
                remedy="Leave virtual pipeline stages out, or set router_replay_mode to disabled",
            )
        if dense := _stages_without_routers(chunks[0]):
            raise HostError(
                "a pipeline stage without a router does not see ms-swift's replay, and would wait for other passes",
                expected="a layer with experts in each pipeline stage",
                found=f"dense layers only in stages {dense}",
                remedy="Set decoder_first_pipeline_num_layers, or set router_replay_mode to disabled",
            )
        device = next(chunks[0].parameters()).device
        settings = ReplaySettings.read({"mode": args.router_replay_mode})
        super().__init__("ms-swift", chunks, settings, _routers, device, compares_ids=not args.is_multimodal)
        self._args = args
        self._config = chunks[0].config
        self.latest: dict[str, float] = {}
        self.is_updating = False
        self._compared = False  # whether a micro-batch of this update has run without replay too

    def compares_next(self) -> bool:
        """Return whether the next micro-batch of the old-log-prob pass runs without replay too: one of an update.

        An evaluation is scored as well, and on Ray scoring is no part of updates: neither is compared.
        """
        if not self.is_updating:
            return False
        compares = self.metrics.compares and not self._compared
        self._compared = True
        return compares

    def inputs(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the micro-batch for ms-swift's forward: without routes if it leaves them to us."""
        return data if self.controller is None else _without_routes(data)

    def micro_batch(self, data: dict[str, Any]) -> MicroBatch:
        """Return where ms-swift puts the tokens of a collated micro-batch."""
        return MicroBatch.of(self._args, self._config, data)

    def finish(self) -> None:
        """Judge the update. Collective: misaligned routes raise on every rank, before the optimizer steps."""
        from megatron.core import parallel_state

        ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_context_parallel_rank()
        reports = ranks == (0, 0) and parallel_state.is_pipeline_last_stage()
        self.latest = self.metrics.finish(is_update=True, report_tokens=reports)
        self._compared = False


class _Guards:
    """The guard of this process: its trainer may have others beside it that only compute losses, as on Ray."""

    def __init__(self) -> None:
        self.current: SwiftGuard | None = None

    def get(self, trainer: Any) -> SwiftGuard | None:
        """Return the guard; made for this trainer if there is none."""
        if self.current is None and trainer.enable_routing_replay:
            with printed_before_raised():
                self.current = SwiftGuard(trainer)
        return self.current


guards = _Guards()


def language_model(model: Any) -> Any:
    """Return the Megatron-Core language model inside wrappers and multimodal models."""
    for module in model.modules():
        if hasattr(module, "decoder") and hasattr(module, "pre_process"):
            return module
    raise HostError("no language model of Megatron-Core in this model", found=type(model).__name__)


def _stages_without_routers(chunk: Any) -> list[int]:
    """Return the pipeline stages whose layers are all dense. Collective: call on every stage."""
    from megatron.core import parallel_state

    counts = all_gather_json(len(_routers(chunk)), parallel_state.get_pipeline_model_parallel_group())
    return [stage for stage, count in enumerate(counts) if not count]


def _routers(chunk: Any) -> list[tuple[int, Any]]:
    """Return (decoder layer, Megatron's RouterReplay) of a pipeline chunk."""
    routers = [layer.mlp.router for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")]
    return [(router.layer_number - 1, router.router_replay) for router in routers]


# ---- where tokens are ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Tokens of a micro-batch of ms-swift.

    ids      of each sample
    starts   (row, column) of each sample in the collated ids
    layout   where this rank has the tokens
    """

    ids: list[list[int]]
    starts: list[tuple[int, int]]
    layout: TokenLayout

    @classmethod
    def of(cls, args: Any, config: Any, data: dict[str, Any]) -> MicroBatch:
        """Read a micro-batch as ms-swift's collator leaves it."""
        ids, lengths = data["input_ids"].cpu(), [int(length) for length in data["seq_lens"]]
        positions = data.get("text_position_ids")
        positions = data["position_ids"] if positions is None else positions
        starts = [(row, 0) for row in range(len(lengths))]
        if args.padding_free:
            starts = [(0, int(column)) for column in (positions.flatten() == 0).nonzero()[: len(lengths)]]
        index = torch.zeros_like(ids)  # 0 is padding
        count = 0
        for (row, column), length in zip(starts, lengths, strict=True):
            index[row, column : column + length] = torch.arange(count + 1, count + length + 1)
            count += length
        samples = [ids[row, col : col + size].tolist() for (row, col), size in zip(starts, lengths, strict=True)]
        return cls(samples, starts, _layout(args, config, data, positions, index, lengths))

    def traces(self, routed_experts: Any, guard: SwiftGuard) -> list[RouteTrace]:
        """Return the routes of the samples from what ms-swift has collated of a rollout."""
        if routed_experts is None:
            raise HostError(
                "router_replay_mode is R3, and the micro-batch has no routes",
                remedy="The rollout must return routes: vLLM 0.14 or later, enable_return_routed_experts",
            )
        rows = routed_experts.cpu()
        return [
            from_ms_swift(rows[row, col : col + len(ids)], ids, guard.topology, sample=sample)
            for sample, ((row, col), ids) in enumerate(zip(self.starts, self.ids, strict=True))
        ]

    def sampled(self, completion_mask: Tensor) -> np.ndarray:
        """Return (num_tokens,) bool: which tokens were sampled. ms-swift's mask (B, T) has the next token's."""
        mask = completion_mask.cpu()
        parts = [
            torch.cat([torch.zeros(1, dtype=torch.bool), row[: len(ids) - 1].bool()])
            for ids, row in zip(self.ids, mask[: len(self.ids)], strict=True)  # padding is one more row, where packed
        ]
        return torch.cat(parts).numpy()


def _layout(
    args: Any, config: Any, data: dict[str, Any], positions: Tensor, index: Tensor, lengths: Sequence[int]
) -> TokenLayout:
    """Return where `prepare_batch` of ms-swift puts the tokens: the index goes through it as positions."""
    from swift.megatron.trainers.utils import prepare_batch

    sent = {
        "input_ids": data["input_ids"].clone(),
        "labels": data["input_ids"].clone(),
        "position_ids": index.to(data["input_ids"].device),
        "text_position_ids": positions,
    }
    return token_layout(prepare_batch(args, sent)["position_ids"], lengths, config)


# ---- methods of ms-swift ---------------------------------------------------------------------------------------------

Method = Callable[..., Any]


def _keeping_traces(original: Method) -> Method:
    @wraps(original)
    def _maybe_compute_logps(self: Any, batch: dict[str, Any], teacher_inputs: Any = None) -> dict[str, Any]:
        if not self.enable_routing_replay:
            return original(self, batch, teacher_inputs)
        self.moe_replay_traces = self.moe_replay_native = None
        result = original(self, batch, teacher_inputs)
        if self.moe_replay_native is not None:
            _add_native_logprobs(self, result["grpo_batch"], self.moe_replay_native)
            self.moe_replay_native = None
        result["grpo_batch"].moe_replay_traces = self.moe_replay_traces
        return result

    return _maybe_compute_logps


def _guarded_scoring(original: Method) -> Method:
    """The pass for old log-probs: R3 replays, R2 records. Reference and teacher route natively."""

    @wraps(original)
    def compute_per_token_logps(
        self: Any, model: Any, data_iterator: Iterator[Any], no_grad: bool = True, temperature: float = 1.0
    ) -> Any:
        from swift.megatron.utils import RouterReplayHelper

        guard = guards.get(self) if self.enable_routing_replay else None
        records = guard is not None and RouterReplayHelper.is_r2_record_action(model.config)
        if guard is None or not (records or RouterReplayHelper.is_replay_forward_action(model.config)):
            return original(self, model, data_iterator, no_grad, temperature)
        data, chunk = next(data_iterator), language_model(model)

        def run() -> Any:
            return original(self, model, iter([guard.inputs(data)]), no_grad, temperature)

        with printed_before_raised():
            batch = guard.micro_batch(data)
            traces = None if records else batch.traces(data.get("routed_experts"), guard)
        if guard.compares_next():
            with without_own_replay(self), _routers_choose():
                native_data = _without_routes(deepcopy(data))
                self.moe_replay_native, _ = original(self, model, iter([native_data]), True, temperature)
        if traces is None:
            result, traces = guard.record(run, self, chunk, batch.layout, batch.ids)
        else:
            expected = guard.expected(traces, batch.layout, chunk)
            result, _ = guard.follow(run, self, chunk, expected, batch.ids, observes=False)
        self.moe_replay_traces = traces
        return result

    return compute_per_token_logps


def _replaying_policy_only(original: Method) -> Method:
    """On Ray: ms-swift sets the routers' action for reference and teacher too, whose routes are not the rollout's."""

    @wraps(original)
    def _compute_logps(self: Any, model_inputs: dict[str, Any], model: Any, output_key: str) -> Any:
        if output_key == "per_token_logps":
            return original(self, model_inputs, model, output_key)
        with without_own_replay(self._megatron):
            return original(self, model_inputs, model, output_key)

    return _compute_logps


@contextmanager
def _routers_choose() -> Iterator[None]:
    """Let the routers neither replay nor record: ms-swift has set the action of all of them for this pass."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    routers = RouterReplay.global_router_replay_instances
    actions = [router.router_replay_action for router in routers]
    RouterReplay.clear_global_router_replay_action()
    try:
        yield
    finally:
        for router, action in zip(routers, actions, strict=True):
            router.router_replay_action = action


def _guarded_update(original: Method) -> Method:
    @wraps(original)
    def forward_step(self: Any, data_iterator: Iterator[Any], model: Any) -> Any:
        guard = guards.current
        if guard is None or not guard.is_updating or not self.enable_routing_replay:
            return original(self, data_iterator, model)
        data, chunk = next(data_iterator), language_model(model)
        grpo_batch = data["grpo_batch"]
        with printed_before_raised():
            batch = guard.micro_batch(data)
            traces = getattr(grpo_batch, "moe_replay_traces", None)
            if traces is None:  # on Ray
                traces = batch.traces(data.get("routed_experts"), guard)

        def run() -> Any:
            return original(self, iter([guard.inputs(data)]), model)

        expected = guard.expected(traces, batch.layout, chunk)
        observes = guard.metrics.checks(is_update=True)
        result, native = guard.follow(run, self, chunk, expected, batch.ids, observes=observes)
        guard.metrics.add_routes(expected, native, batch.layout, batch.sampled(grpo_batch.completion_mask))
        guard.metrics.add_samples([not trace.covered_fraction for trace in traces])
        _add_logprobs(guard, grpo_batch, result[0])
        return result

    return forward_step


def _add_native_logprobs(trainer: Any, grpo_batch: Any, scored: Tensor) -> None:
    """Add log-probs of the old-log-prob pass without replay beside those of the rollout."""
    from swift.rlhf_trainers.utils import pad_logps_back_to_batch

    mask, guard = grpo_batch.completion_mask, guards.current
    if trainer.template.padding_free:
        scored, _ = pad_logps_back_to_batch(
            logps_rmpad=scored,
            logits_to_keep=mask.shape[1],
            batch_size=mask.shape[0],
            seq_lengths=grpo_batch.seq_lengths,
        )
    if grpo_batch.rollout_per_token_logps is not None and guard is not None:
        guard.metrics.add_logprobs(grpo_batch.rollout_per_token_logps, scored, mask.bool(), replayed=False)


def _add_logprobs(guard: SwiftGuard, grpo_batch: Any, scored: Any) -> None:
    """Add the log-probs of the update, which the last stage has, beside those of the rollout."""
    from megatron.core import parallel_state

    sampled = grpo_batch.rollout_per_token_logps
    if sampled is not None and parallel_state.is_pipeline_last_stage():
        mask = grpo_batch.completion_mask.bool()
        guard.metrics.add_logprobs(sampled, scored.detach(), mask, replayed=True)


def _judged(original: Method) -> Method:
    @wraps(original)
    def train_step(self: Any, train_data_iterator: Any) -> Any:
        guard = guards.get(self)
        if guard is None or not self.enable_routing_replay:
            return original(self, train_data_iterator)
        guard.is_updating = True
        try:
            return original(self, train_data_iterator)
        finally:
            guard.is_updating = False

    return train_step


def _judging(original: Method) -> Method:
    @wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Method:
        forward_backward = original(*args, **kwargs)
        guard = guards.current
        if guard is None or not guard.is_updating:
            return forward_backward

        def judged(*args: Any, **kwargs: Any) -> Any:
            result = forward_backward(*args, **kwargs)
            guard.finish()
            return result

        return judged

    return get_forward_backward_func


def _without_routes(data: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name != "routed_experts"}
