"""vLLM's worker with route capture, named to vLLM as its `worker_cls`: `GpuWorker` or `CpuWorker`.

`GpuWorkerWithoutCapture` is for vLLM's own capture. `GpuTimedWorker` and `CpuTimedWorker` have none, for comparisons:
their steps can be timed as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from moe_replay.rollout.vllm.console import ToldStart, leave_out_what_means_nothing
from moe_replay.rollout.vllm.cpu_parallel import ParallelExperts
from moe_replay.rollout.vllm.lora_worker import AdaptedRouters, LoraBesideExperts
from moe_replay.rollout.vllm.route_channel import RouteSender, wants_routes
from moe_replay.rollout.vllm.slot_routes import SlotRoutes, capture_routes
from moe_replay.rollout.vllm.step_timers import TimedSteps


class RouteCapture(TimedSteps):
    """Keeps what the routers choose in every step, and sends it when a request ends. Mixed into a worker of vLLM."""

    vllm_config: Any
    replay_routes: SlotRoutes | None = None
    replay_sender: RouteSender | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and one row of expert ids for each of its slots; CUDA graphs are captured later."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.replay_routes = capture_routes(self.model_runner, self.vllm_config, kv_cache_config)

    def replay_send_routes_to(self, path: str) -> None:
        """Connect to the engine. All ranks of a tensor-parallel group choose alike: the first one of each sends."""
        from vllm.distributed.parallel_state import get_tp_group

        if get_tp_group().is_first_rank and self.replay_routes is not None:
            self.replay_sender = RouteSender(path, self.replay_routes.shape)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step. Routes of requests that have ended are read before its forward can overwrite their slots."""
        routes, sender = self.replay_routes, self.replay_sender
        if routes is None or sender is None:
            return super().execute_model(scheduler_output)
        final = sorted(filter(wants_routes, scheduler_output.finished_req_ids))
        preempted = sorted(filter(wants_routes, scheduler_output.preempted_req_ids or ()))
        copies = getattr(scheduler_output, "kv_cache_block_copies", None)
        if final or preempted or copies:
            with self.replay_timed("read"), torch.inference_mode():
                if final or preempted:
                    sender.send(*routes.read(final, preempted))
                if copies:
                    routes.copy_blocks(copies)
        output = super().execute_model(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens:
            with self.replay_timed("store"), torch.inference_mode():
                routes.store(tokens, scheduler_output.num_scheduled_tokens)
        return output


_MIXED_IN: dict[str, tuple[type, ...]] = {
    "GpuWorker": (RouteCapture, ToldStart, AdaptedRouters),
    "GpuWorkerWithoutCapture": (ToldStart, AdaptedRouters),
    "CpuWorker": (RouteCapture, ToldStart, LoraBesideExperts, ParallelExperts),
    "GpuTimedWorker": (TimedSteps,),
    "CpuTimedWorker": (TimedSteps,),
}


def __getattr__(name: str) -> type:
    """Return a worker class; vLLM is imported only where one is used."""
    if name not in _MIXED_IN:
        raise AttributeError(name)
    return _worker_class(name)


@cache
def _worker_class(name: str) -> type:
    if name.startswith("Gpu"):
        from vllm.v1.worker.gpu_worker import Worker
    else:
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    leave_out_what_means_nothing()  # before the worker is made
    return type(name, (*_MIXED_IN[name], Worker), {"__module__": __name__})
