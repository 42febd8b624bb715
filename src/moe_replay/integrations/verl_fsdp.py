"""R2 and R3 for verl's FSDP engine, which drops the routes that it is given.

R3: the rollout's routes are replayed in the old-log-prob pass and in updates. R2: the old-log-prob pass records routes
and returns them like log-probs; verl puts them into the batch of the updates. A reference model routes natively, also
one that is the actor without its adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_replay.distributed.ranks import raise_on_all_ranks
from moe_replay.distributed.traces import merge_traces
from moe_replay.integrations import verl_batch
from moe_replay.integrations.hosts import VERL, ReplaySettings
from moe_replay.integrations.step_metrics import StepMetrics
from moe_replay.interop import to_verl
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.trace import RouteTrace

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead as _Engine
else:
    _Engine = object

PARAMETERS = {
    "FSDPEngineWithLMHead.initialize": ("self",),
    "FSDPEngineWithLMHead.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    "FSDPEngineWithLMHead.forward_step": ("self", "micro_batch", "loss_function", "forward_only"),
    "FSDPEngineWithLMHead.disable_adapter": ("self",),
}


def install(module: ModuleType) -> None:
    """Put an engine that replays in the place of verl's."""
    VERL.check_parameters(module, PARAMETERS)
    verl_batch.replace_engine(module.EngineRegistry, module.FSDPEngineWithLMHead, FsdpReplayMixin)


class FsdpReplayMixin(verl_batch.KnowsReference, _Engine):
    """What is added to verl's engine, where the model routes and `router_replay.mode` is R2 or R3."""

    _replay: RouterReplay | None = None
    _traces: list[RouteTrace] | None = None  # of the batch; None: this pass records
    _compares = False  # whether a micro-batch of this update runs without replay too

    def initialize(self) -> None:
        super().initialize()
        settings = ReplaySettings.read(self.engine_config.router_replay)
        if settings.mode == "disabled" or self.engine_config.forward_only:
            return
        self._replay_settings = settings
        self._replay = attach(_language_model(self.module))
        self._step_metrics = StepMetrics(self._replay.topology, verl_batch.compute_device(), settings)

    def forward_backward_batch(self, data: Any, loss_function: Callable | None, forward_only: bool = False) -> Any:
        if self._replay is None or self._is_reference:
            return super().forward_backward_batch(data, loss_function, forward_only)
        mode, self._traces = self._replay_settings.mode, None
        if mode == "R3" or not forward_only:
            with raise_on_all_ranks("reading the routes in verl's batch"):
                self._traces = verl_batch.read_traces(data, mode, self._controller.topology)
        self._compares = not forward_only and self._step_metrics.compares and "rollout_log_probs" in data
        routed_experts = data.pop("routed_experts", None)  # verl would only move them to the device
        try:
            with verl_batch.numbered(data):
                output = super().forward_backward_batch(data, loss_function, forward_only)
        finally:
            if routed_experts is not None:
                data["routed_experts"] = routed_experts
        if self._traces is not None:
            metrics = self._step_metrics.finish(is_update=not forward_only, report_tokens=self._ulysses[0] == 0)
            output["metrics"] |= {} if forward_only else {name: [value] for name, value in metrics.items()}
        return output

    def forward_step(self, micro_batch: Any, loss_function: Callable | None, forward_only: bool) -> Any:
        if verl_batch.SAMPLE not in micro_batch:
            return super().forward_step(micro_batch, loss_function, forward_only)
        layout = self._token_layout(micro_batch)
        if self._traces is None:
            return self._recording_step(micro_batch, loss_function, forward_only, layout)
        if self._compares:
            self._compares = False
            with torch.no_grad():
                _, native_output = super().forward_step(micro_batch, None, True)
            verl_batch.add_logprobs(self._step_metrics, micro_batch, native_output["model_output"], replayed=False)
        traces = verl_batch.of_micro_batch(micro_batch, self._traces)
        batch = RouteBatch.from_traces(traces, layout, device=verl_batch.compute_device())
        observes = self._step_metrics.checks(is_update=not forward_only)
        with self._controller.replay(batch, observe=observes) as replaying:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        native = replaying.native() if observes else None
        verl_batch.measure(self._step_metrics, micro_batch, layout, traces, batch, native)
        if not forward_only:
            verl_batch.add_logprobs(self._step_metrics, micro_batch, output["model_output"], replayed=True)
        return loss, output

    def _recording_step(
        self, micro_batch: Any, loss_function: Callable | None, forward_only: bool, layout: TokenLayout
    ) -> Any:
        with self._controller.record() as recording:
            loss, output = super().forward_step(micro_batch, loss_function, forward_only)
        traces = recording.traces(layout, [ids.tolist() for ids in micro_batch["input_ids"].unbind()])
        if self.use_ulysses_sp:
            traces = merge_traces(traces, self.ulysses_parallel_group)
        output["model_output"]["routed_experts"] = to_verl(traces, self._controller.topology)
        return loss, output

    # ---- where tokens are -----------------------------------------------------------------------------------------

    @property
    def _controller(self) -> RouterReplay:
        assert self._replay is not None
        return self._replay

    @property
    def _ulysses(self) -> tuple[int, int]:
        """(rank, size) of Ulysses sequence parallelism."""
        if not self.use_ulysses_sp:
            return 0, 1
        return self.ulysses_device_mesh["sp"].get_local_rank(), self.ulysses_sequence_parallel_size

    def _token_layout(self, micro_batch: Any) -> TokenLayout:
        """Return where verl puts the tokens: `prepare_model_inputs` of its engine. The ids fed are compared with it."""
        from verl.utils import tensordict_utils

        lengths = micro_batch["input_ids"].offsets().diff().tolist()
        if not tensordict_utils.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            return TokenLayout.padded(lengths, side="right")
        layout = TokenLayout.packed(lengths)
        if hasattr(self, "_get_packed_pad_size"):  # from 0.9.0 on
            layout = layout.pad_to(layout.num_rows + self._get_packed_pad_size(layout.num_rows))
        rank, size = self._ulysses
        layout = layout.pad_to(multiple_of=size)
        if size == 1:
            return layout
        if hasattr(_language_model(self.module).config, "vision_config"):  # verl cuts after the embedding
            return layout.sequence_parallel(rank, size)
        return layout.context_parallel(rank, size, "contiguous")


def _language_model(module: Any) -> nn.Module:
    """Return the model without the wrappers of FSDP1 and PEFT."""
    inner = getattr(module, "_fsdp_wrapped_module", module)
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner
