"""verl's batches and its registry of engines, as all engines of verl have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moe_replay.integrations.hosts import HostError, ReplaySettings
from moe_replay.integrations.step_metrics import StepMetrics
from moe_replay.interop import from_verl
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace

if TYPE_CHECKING:
    from verl.workers.engine import BaseEngine as _Engine
else:
    _Engine = object

SAMPLE = "moe_replay_sample"  # our entry in verl's batches: index of each sample, which its micro-batches keep


def replace_engine(registry: Any, replaced: type, mixin: type) -> None:
    """Put a subclass in the place of an engine in verl's registry, for all its backends and devices."""
    engine = type(f"Replaying{replaced.__name__}", (mixin, replaced), {})
    count = 0
    for backends in registry._engines.values():
        for by_device in backends.values():
            for device in [key for key, found in by_device.items() if found is replaced]:
                by_device[device] = engine
                count += 1
    if not count:
        raise HostError("an engine is not in verl's registry", expected=replaced.__name__, found="others only")


def refuse_replay(module: ModuleType) -> None:
    """Let the engines of a module of verl, which ignore `router_replay.mode`, refuse it."""
    names = [name for name in vars(module) if name.endswith("EngineWithLMHead")]
    own = [engine for name in names if (engine := getattr(module, name)).__module__ == module.__name__]
    for engine in own:
        replace_engine(module.EngineRegistry, engine, WithoutReplay)


class WithoutReplay(_Engine):
    """What is added to an engine of verl that has no replay."""

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        mode = ReplaySettings.read(engine_config.router_replay).mode
        if mode != "disabled" and not engine_config.forward_only:
            raise HostError(
                f"verl's {type(self).__name__.removeprefix('Replaying')} ignores router_replay.mode",
                expected="disabled",
                found=mode,
                remedy="Set actor_rollout_ref.actor.strategy=fsdp2 or megatron, or leave the mode out",
            )
        super().__init__(model_config, engine_config, *args, **kwargs)


class KnowsReference(_Engine):
    """What is added to an engine of verl that replays: whether it is the reference now, the actor without adapters."""

    _is_reference = False

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        with super().disable_adapter():
            self._is_reference = True
            try:
                yield
            finally:
                self._is_reference = False


def compute_device() -> torch.device:
    """Return the device that verl computes on in this process."""
    from verl.utils.device import get_device_id, get_device_name

    device = get_device_id()  # of a GPU a number
    return torch.device(get_device_name(), device) if isinstance(device, int) else torch.device(device)


def read_traces(data: Any, mode: str, topology: MoeTopology) -> list[RouteTrace]:
    """Return the routes of a batch; samples without a response may be without any."""
    if data.get("routed_experts", None) is None:
        remedy = {
            "R2": "R2 needs verl's old-log-prob pass: set algorithm.rollout_correction.bypass_mode=False",
            "R3": "Set actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
        }[mode]
        raise HostError(
            f"router_replay.mode is {mode}, and the batch has no routes",
            expected="routed_experts",
            found=", ".join(sorted(data.keys())),
            remedy=remedy,
        )
    may_be_empty = [not bool(mask.any()) for mask in response_masks(data)]
    return from_verl(data["routed_experts"], data["input_ids"], topology=topology, may_be_empty=may_be_empty)


@contextmanager
def numbered(data: Any) -> Iterator[None]:
    """Let the micro-batches of a batch know which of its samples they have."""
    data[SAMPLE] = torch.arange(len(data))
    try:
        yield
    finally:
        del data[SAMPLE]


def of_micro_batch(micro_batch: Any, traces: Sequence[RouteTrace]) -> list[RouteTrace]:
    """Return those of the traces of a batch that belong to a micro-batch."""
    return [traces[sample] for sample in micro_batch[SAMPLE].tolist()]


def response_masks(data: Any) -> list[Tensor]:
    """Return for each sample of a batch which tokens of its response were sampled, (response,) bool."""
    mask = data["response_mask"]
    if mask.is_nested:
        return [sample.bool() for sample in mask.unbind()]
    lengths = data["attention_mask"][:, data["prompts"].shape[1] :].sum(1).tolist()
    return [sample[:length].bool() for sample, length in zip(mask, lengths, strict=True)]


def sampled_tokens(data: Any, layout: TokenLayout) -> np.ndarray:
    """Return (num_tokens,) bool: which tokens of a micro-batch were sampled."""
    parts = [
        torch.cat([mask.new_zeros(length - len(mask)), mask])
        for mask, length in zip(response_masks(data), layout.lengths, strict=True)
    ]
    return torch.cat(parts).cpu().numpy()


def measure(
    metrics: StepMetrics,
    micro_batch: Any,
    layout: TokenLayout,
    traces: Sequence[RouteTrace],
    replayed: RouteBatch,
    native: RouteBatch | None,
) -> None:
    """Add what a micro-batch has replayed, and native choices where they were observed."""
    metrics.add_routes(replayed, native, layout, sampled_tokens(micro_batch, layout))
    metrics.add_samples([not trace.covered_fraction for trace in traces])


def add_logprobs(metrics: StepMetrics, micro_batch: Any, model_output: dict[str, Any], *, replayed: bool) -> None:
    """Add the log-probs of a micro-batch beside those of the rollout, where there are both."""
    from verl.workers.utils.padding import no_padding_2_padding

    scored = model_output.get("log_probs")
    if scored is None or "rollout_log_probs" not in micro_batch:
        return
    fields = micro_batch.select("response_mask", "rollout_log_probs").to_padded_tensor().to(scored.device)
    responses = no_padding_2_padding(scored.detach(), micro_batch)
    metrics.add_logprobs(fields["rollout_log_probs"], responses, fields["response_mask"].bool(), replayed=replayed)
