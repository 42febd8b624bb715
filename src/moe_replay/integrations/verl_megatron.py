"""A guard for verl's own replay in its Megatron engine, or our replay in its place (`MOE_REPLAY_GUARD`).

check: verl replays. In every micro-batch, what it has put on each router is compared with the routes of the tokens that
the routers will see. Where these are is known from verl's own packing, through which an index of the tokens is sent: if
verl packs tokens in another way, the index follows. What the routers would choose goes to the alignment check.
fix: the same index gives a layout, and `RouterReplay` of this library replays; verl's replay stays off.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_replay.distributed.ranks import raise_on_all_ranks
from moe_replay.distributed.traces import merge_traces
from moe_replay.integrations import verl_batch
from moe_replay.integrations.hosts import VERL, HostError, ReplaySettings
from moe_replay.integrations.megatron_guard import RouterGuard, token_layout, without_own_replay
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace

if TYPE_CHECKING:
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead as _Engine
else:
    _Engine = object

PARAMETERS = {
    "MegatronEngineWithLMHead.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "MegatronEngineWithLMHead.forward_step": (
        "self",
        "batch_iter",
        "model",
        "logits_processor_func",
        "postprocess_micro_batch_func",
    ),
    "MegatronEngineWithLMHead.disable_adapter": ("self",),
    "RouterReplay.get_replay_topk": ("self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"),
}


def install(module: ModuleType) -> None:
    """Put an engine with the guard in the place of verl's, if it replays: from 0.9.0 on."""
    if not hasattr(module.RouterReplay, "get_replay_topk"):
        return
    VERL.check_parameters(module, PARAMETERS)
    verl_batch.replace_engine(module.EngineRegistry, module.MegatronEngineWithLMHead, MegatronGuardMixin)


class MegatronGuardMixin(verl_batch.KnowsReference, _Engine):
    """What is added to verl's engine, where `router_replay.mode` is R2 or R3."""

    _guard: MegatronGuard | None = None
    _traces: list[RouteTrace] | None = None
    _observes = False  # whether native choices of this pass are wanted
    _compares = False  # while a micro-batch of an update runs without replay too

    def forward_backward_batch(self, data: Any, loss_function: Callable | None, forward_only: bool = False) -> Any:
        if not self._is_guarded(data):
            return super().forward_backward_batch(data, loss_function, forward_only)
        if self._is_reference:
            return self._without_replay(data, loss_function, forward_only)
        guard = self._guard = self._guard or MegatronGuard(self)
        mode = self.engine_config.router_replay.mode
        if mode == "R2" and forward_only and data.get("routed_experts", None) is None:  # verl records
            return super().forward_backward_batch(data, loss_function, forward_only)
        with raise_on_all_ranks("reading the routes in verl's batch"):
            self._traces = verl_batch.read_traces(data, mode, guard.topology)
        self._observes = guard.metrics.checks(is_update=not forward_only)
        if not forward_only and guard.metrics.compares and "rollout_log_probs" in data:
            self._forward_natively(data)
        with verl_batch.numbered(data):
            output = super().forward_backward_batch(data, loss_function, forward_only)
        metrics = guard.metrics.finish(is_update=not forward_only, report_tokens=self.is_mp_src_rank_with_outputs())
        if output and not forward_only:  # on the last stage
            output["metrics"] |= {name: [value] for name, value in metrics.items()}
        return output

    def _forward_natively(self, data: Any) -> None:
        """Run a micro-batch of an update without replay, or as many as the pipeline needs."""
        from verl.utils import tensordict_utils

        count = self.tf_config.microbatch_group_size_per_vp_stage if len(self.module) > 1 else 1
        if not tensordict_utils.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
            count *= data["micro_batch_size_per_gpu"]
        first = tensordict_utils.index_select_tensor_dict(data, torch.arange(min(count, len(data))))
        self._compares = True
        try:
            with torch.no_grad():
                self._without_replay(first, None, True)
        finally:
            self._compares = False

    def _without_replay(self, data: Any, loss_function: Callable | None, forward_only: bool) -> Any:
        """Run verl's pass with its replay off: it asks the batch, the engine, and in 0.9.0 its routers."""
        from verl.utils import tensordict_utils

        tensordict_utils.assign_non_tensor(data, enable_routing_replay=False)
        with without_own_replay(self):
            return super().forward_backward_batch(data, loss_function, forward_only)

    def _is_guarded(self, data: Any) -> bool:
        from verl.utils import tensordict_utils

        is_on = tensordict_utils.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        return bool(is_on and self.enable_routing_replay)

    def forward_step(self, batch_iter: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        from verl.workers.engine.megatron.transformer_impl import unwrap_model

        batch = next(batch_iter)
        guard, chunk = self._guard, unwrap_model(model)

        def run() -> Any:
            return super(MegatronGuardMixin, self).forward_step(iter([batch]), model, *args, **kwargs)

        if guard is None:
            return run()
        if self._compares:
            result = run()
            guard.add_logprobs(batch, result[0], replayed=False)
            return result
        if verl_batch.SAMPLE in batch:
            assert self._traces is not None
            traces = verl_batch.of_micro_batch(batch, self._traces)
            return guard.follow_verl(run, self, batch, chunk, traces, observes=self._observes)
        return run() if guard.controller is None else guard.record_verl(run, self, batch, chunk)


class MegatronGuard(RouterGuard):
    """The routers of one engine."""

    def __init__(self, engine: Any) -> None:
        from verl.workers.engine.megatron.transformer_impl import unwrap_model

        settings = ReplaySettings.read({"mode": engine.engine_config.router_replay.mode})
        self._config, chunks = engine.tf_config, unwrap_model(engine.module)
        with raise_on_all_ranks("checking verl's version"):
            _check_version(settings, chunks)
        packing = engine.engine_config
        self._is_packed = bool(packing.use_remove_padding)
        self._bucket = packing.pad_to_length_bucket if packing.pad_to_length else None  # verl's replay refuses it
        compares_ids = not hasattr(engine.model_config.hf_config, "vision_config")  # packed after the embedding
        device = verl_batch.compute_device()
        super().__init__("verl", chunks, settings, _routers, device, compares_ids=compares_ids)

    def follow_verl(
        self,
        run: Callable[[], Any],
        engine: Any,
        batch: Any,
        chunk: Any,
        traces: list[RouteTrace],
        *,
        observes: bool,
    ) -> Any:
        """Run verl's forward of a micro-batch on the routes of its samples, and measure it."""
        layout = self._layout(batch)
        expected = self.expected(traces, layout, chunk)
        result, native = self.follow(run, engine, chunk, expected, _token_ids(batch), observes=observes)
        verl_batch.measure(self.metrics, batch, layout, traces, expected, native)
        self.add_logprobs(batch, result[0], replayed=True)
        return result

    def record_verl(self, run: Callable[[], Any], engine: Any, batch: Any, chunk: Any) -> Any:
        """Run verl's forward of a micro-batch without its replay: recorded by us (R2), or routed natively."""
        from verl.utils import tensordict_utils

        if not tensordict_utils.get_non_tensor_data(batch, key="record_r2_routes", default=False):
            with without_own_replay(engine):
                return run()
        tensordict_utils.assign_non_tensor(batch, record_r2_routes=False)
        result, traces = self.record(run, engine, chunk, self._layout(batch), list(_token_ids(batch)))
        parts = merge_traces(traces, _token_group(self._config))
        rows = [torch.from_numpy(trace.routed_experts.astype(np.int16)) for trace in parts]
        engine.mini_layer_topk_idx_list.append(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
        return result

    def add_logprobs(self, batch: Any, output: Any, *, replayed: bool) -> None:
        """Add the log-probs of a micro-batch, which the last stage has."""
        if isinstance(output, dict):
            verl_batch.add_logprobs(self.metrics, batch, output, replayed=replayed)

    def _layout(self, batch: Any) -> TokenLayout:
        """Return where verl puts the tokens: its own packing, given the index of each token instead of its id."""
        from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
        from verl.utils import tensordict_utils
        from verl.utils.megatron import router_replay_utils

        ids = batch["input_ids"]
        lengths = tuple(ids.offsets().diff().tolist())
        numbers = torch.arange(1, sum(lengths) + 1, device=self.device)  # 0 is padding
        index = torch.nested.nested_tensor_from_jagged(numbers, offsets=ids.offsets().to(numbers.device))
        fp8 = self._config.fp8 in ("e4m3", "hybrid")
        if self._is_packed:
            local = tensordict_utils.get_non_tensor_data(data=batch, key="local_cp_size", default=None)
            style = getattr(router_replay_utils, "_context_parallel_layout", lambda _: "zigzag")(self._config)
            packed, *_ = preprocess_thd_engine(
                index,
                pre_process=True,
                use_fp8_padding=fp8,
                local_cp_size=local,
                pad_to_length_bucket=self._bucket,
                cp_layout=style,
            )
        else:
            width = tensordict_utils.get_non_tensor_data(data=batch, key="forced_max_seqlen", default=None)
            packed, *_ = preprocess_bshd_engine(index, pre_process=True, use_fp8_padding=fp8, forced_max_seqlen=width)
        return token_layout(packed, lengths, self._config)


def _token_ids(batch: Any) -> Iterator[list[int]]:
    """Yield the token ids of each sample of a micro-batch; only then are they read from the device."""
    for sample in batch["input_ids"].unbind():
        yield sample.tolist()


def _check_version(settings: ReplaySettings, chunks: Sequence[Any]) -> None:
    """Raise for what 0.9.0 cannot do: it asks its own list of routers, and not the engine, whether it records."""
    from verl.utils.megatron.router_replay_utils import RouterReplayHelper

    if "model" in inspect.signature(RouterReplayHelper.is_replay_forward_action).parameters:
        return
    found = f"verl {metadata.version('verl')}"
    if settings.guard == "fix":
        raise HostError(
            "this version of verl cannot leave its own replay off",
            expected="verl 0.9.1 with MOE_REPLAY_GUARD=fix",
            found=found,
            remedy="Use MOE_REPLAY_GUARD=check, or install verl 0.9.1",
        )
    if settings.mode == "R2" and not _routers(chunks[0]):
        raise HostError(
            "R2 of this version of verl would wait forever: a rank whose first layers are dense gathers no routes",
            expected="verl 0.9.1",
            found=found,
            remedy="Install verl 0.9.1, use mode=R3, or give the first pipeline stage a layer with experts",
        )


def _routers(chunk: Any) -> list[tuple[int, Any]]:
    """Return (decoder layer, verl's RouterReplay) of a pipeline chunk."""
    from verl.utils.megatron.router_replay_utils import iter_model_routers

    return [(number - 1, router) for number, router in iter_model_routers(chunk)]


def _token_group(config: Any) -> Any:
    """Return the ranks that share the tokens of a micro-batch among them."""
    from megatron.core import parallel_state

    if config.sequence_parallel:
        return parallel_state.get_tensor_and_context_parallel_group()
    return parallel_state.get_context_parallel_group()
