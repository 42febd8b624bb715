"""vLLM's worker with route capture, named to vLLM as its `worker_cls`: `GpuWorker` or `CpuWorker`.

Expert ids are kept on the device, one row for each slot of the KV cache. A slot holds the keys and values of one token,
and its row the experts of that token, so prefix caching, chunked prefill, preemption, rejected drafts and several
samples of a prompt need no bookkeeping. A step costs one scatter on the device; rows are read when a request ends.
`GpuWorkerWithoutCapture` is for vLLM's own capture.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_replay.engines.vllm.capture import EndedRequest, RouteSender, needs_routes
from moe_replay.engines.vllm.console import StartupProgress, mute_known_warnings
from moe_replay.engines.vllm.cpu import CpuLoraWithoutExperts, ParallelExperts
from moe_replay.engines.vllm.lora import AdaptedRouters
from moe_replay.engines.vllm.shared import LastingWeights
from moe_replay.utils.device import to_device


class RouteCapture:
    """Records the routers' choices in every step, and sends them when a request ends. Mixed into a worker of vLLM."""

    model_runner: Any  # vLLM's
    vllm_config: Any
    replay_routes: SlotRoutes | None = None
    replay_sender: RouteSender | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache, and one row of expert ids for each of its slots; CUDA graphs are captured later."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        self.replay_routes = capture_routes(self.model_runner, self.vllm_config, kv_cache_config)

    def replay_send_routes_to(self, path: str) -> None:
        """Connect to the engine. All ranks of a tensor-parallel group route identically: only its first rank sends."""
        from vllm.distributed.parallel_state import get_tp_group

        if get_tp_group().is_first_rank and self.replay_routes is not None:
            self.replay_sender = RouteSender(path, self.replay_routes.shape)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step. Routes of requests that have ended are read before its forward can overwrite their slots."""
        routes, sender = self.replay_routes, self.replay_sender
        if routes is None or sender is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc]
        final = sorted(filter(needs_routes, scheduler_output.finished_req_ids))
        preempted = sorted(filter(needs_routes, scheduler_output.preempted_req_ids or ()))
        copies = getattr(scheduler_output, "kv_cache_block_copies", None)
        if final or preempted:
            self.replay_read(routes, sender, final, preempted)
        if copies:
            with torch.inference_mode():
                routes.copy_blocks(copies)
        output = super().execute_model(scheduler_output)  # type: ignore[misc]
        if scheduler_output.total_num_scheduled_tokens:
            self.replay_store(routes, scheduler_output)
        return output

    # Methods, so that benchmarks can time them.

    def replay_read(
        self, routes: SlotRoutes, sender: RouteSender, final: Sequence[str], preempted: Sequence[str]
    ) -> None:
        with torch.inference_mode():
            sender.send(*routes.read(final, preempted))

    def replay_store(self, routes: SlotRoutes, scheduler_output: Any) -> None:
        with torch.inference_mode():
            routes.store(scheduler_output.total_num_scheduled_tokens, scheduler_output.num_scheduled_tokens)


# ---- routes by KV slot -----------------------------------------------------------------------------------------------


class Runner(Protocol):
    """State that route capture reads from one of vLLM's two model runners."""

    def slots(self, tokens: int) -> Tensor:
        """(tokens,) int64 on the device: KV slots of the tokens that the last forward computed."""

    def blocks(self, request_ids: Sequence[str]) -> tuple[list[int], Tensor]:
        """Return how many KV blocks each request has (0: unknown), and the ids of all of them, in order."""

    def progress(self, request_id: str) -> tuple[int, int]:
        """Return the tokens computed before the last step of a request that was resumed, and those it had before."""


class RunnerV1:
    """vLLM's first model runner, which CPUs use."""

    def __init__(self, runner: Any, group: int) -> None:
        self._runner, self._group = runner, group

    def slots(self, tokens: int) -> Tensor:
        return self._runner.input_batch.block_table[self._group].slot_mapping.gpu[:tokens]

    def blocks(self, request_ids: Sequence[str]) -> tuple[list[int], Tensor]:
        states = [self._runner.requests.get(request_id) for request_id in request_ids]
        block_ids = [[] if state is None else state.block_ids[self._group] for state in states]
        return [len(ids) for ids in block_ids], torch.tensor(list(chain(*block_ids)), dtype=torch.int64)

    def progress(self, request_id: str) -> tuple[int, int]:
        state = self._runner.requests[request_id]
        return state.num_computed_tokens, state.num_tokens - 1


class RunnerV2:
    """vLLM's second model runner, which GPUs use."""

    def __init__(self, runner: Any, group: int) -> None:
        self._runner, self._group = runner, group

    def slots(self, tokens: int) -> Tensor:
        return self._runner.block_tables.slot_mappings[self._group, :tokens]

    def blocks(self, request_ids: Sequence[str]) -> tuple[list[int], Tensor]:
        # The table is on the device, so its entries are gathered there.
        tables = self._runner.block_tables
        index = self._runner.req_states.req_id_to_index
        rows = np.array([index.get(request_id, -1) for request_id in request_ids], np.int64)
        counts = np.where(rows >= 0, tables.num_blocks.np[self._group, rows], 0).astype(np.int64)
        columns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        table = tables.block_tables[self._group].gpu
        where = to_device(np.stack([np.repeat(rows, counts), columns]), table.device)
        return counts.tolist(), table[where[0], where[1]].long()

    def progress(self, request_id: str) -> tuple[int, int]:
        states = self._runner.req_states
        row = states.req_id_to_index[request_id]
        return int(states.num_computed_prefill_tokens[row]), int(states.prefill_len.np[row])


class SlotRoutes:
    """Expert ids of every KV slot of one worker.

    shape   (layers, K) of a token, all decoder layers counted
    """

    def __init__(self, runner: Runner, routed_experts: Tensor, blocks: tuple[int, int]) -> None:
        """Allocate a row for every slot.

        routed_experts   (tokens, layers, K), of `id_dtype`: the buffer that the routers write to in each forward
        blocks           number of KV blocks, and slots of each
        """
        self._runner = runner
        self._routed_experts = routed_experts.flatten(1)
        self.shape: tuple[int, int] = (routed_experts.shape[1], routed_experts.shape[2])
        self._by_block = torch.zeros(
            (*blocks, self.shape[0] * self.shape[1]), dtype=routed_experts.dtype, device=routed_experts.device
        )
        self._by_slot = self._by_block.flatten(0, 1)
        self._preempted: dict[str, int] = {}  # request -> tokens in its last step since it was resumed

    def store(self, tokens: int, scheduled: Mapping[str, int]) -> None:
        """Keep the routes of the last forward, of this many tokens of the scheduled requests."""
        for request_id in self._preempted.keys() & scheduled.keys():
            self._preempted[request_id] = scheduled[request_id]
        # The only kernel of a step outside the CUDA graph: at small batches the host has no time to lose.
        self._by_slot.index_copy_(0, self._runner.slots(tokens), self._routed_experts[:tokens])

    def forget_forward(self) -> None:
        """Forget the last forward, so that a router that writes nothing in the next one leaves zeros."""
        self._routed_experts.zero_()

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Follow the KV cache where vLLM copies blocks, (source, destination)."""
        source, destination = torch.tensor(list(pairs), dtype=torch.int64).to(self._by_block.device).unbind(1)
        self._by_block[destination] = self._by_block[source]

    def read(self, final: Sequence[str], preempted: Sequence[str]) -> tuple[list[EndedRequest], Tensor]:
        """Return the requests that end now, and routed_experts (blocks, block size, layers * K) of all their blocks."""
        request_ids = [*final, *preempted]
        counts, blocks = self._runner.blocks(request_ids)
        ended = [
            EndedRequest(request_id, index < len(final), self._is_complete(request_id, count), count)
            for index, (request_id, count) in enumerate(zip(request_ids, counts, strict=True))
        ]
        for request_id in final:
            self._preempted.pop(request_id, None)
        self._preempted |= dict.fromkeys(preempted, 0)
        return ended, self._by_block[blocks.to(self._by_block.device)]

    def _is_complete(self, request_id: str, blocks: int) -> bool:
        if not blocks or request_id not in self._preempted:
            return bool(blocks)
        computed, needed = self._runner.progress(request_id)
        return computed + self._preempted[request_id] >= needed


def capture_routes(runner: Any, vllm_config: Any, kv_cache_config: Any) -> SlotRoutes:
    """Attach route capture to a worker's model: its routers write to the capture buffer from now on."""
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [index for index, spec in enumerate(groups) if is_full_attention_spec(spec)]
    if not full:
        raise ValueError("no layer attends to all tokens, so the KV cache forgets slots before a request ends")
    return SlotRoutes(
        (RunnerV2 if hasattr(runner, "block_tables") else RunnerV1)(runner, full[0]),
        _capturer(runner, vllm_config, kv_cache_config).device_buffer,
        (kv_cache_config.num_blocks, groups[full[0]].block_size),
    )


def id_dtype(num_experts: int) -> torch.dtype:
    return torch.uint8 if num_experts <= 256 else torch.int16


def _capturer(runner: Any, vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return vLLM's capturer of one forward, bound to the routers. If vLLM's own capture is on, they write to both."""
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_capture
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    model = runner.get_model()
    routers: list[Any] = [module.router for module in model.modules() if isinstance(module, MoERunner)]
    bound_before = [getattr(router, "capture_fn", None) for router in routers]
    arguments = {
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "vllm_config": vllm_config,
        "kv_cache_config": kv_cache_config,
    }
    parameters = inspect.signature(vllm_capture.RoutedExpertsCapturer).parameters  # they differ between releases
    try:
        capturer = vllm_capture.RoutedExpertsCapturer(**{name: arguments[name] for name in parameters})
        # Narrow ids from the routers on, converted where they are written, inside the CUDA graph.
        capturer.device_buffer = capturer.device_buffer.to(id_dtype(vllm_config.model_config.get_num_experts()))
        vllm_capture.bind_routed_experts_capturer(model, capturer)
    except (AttributeError, KeyError, TypeError) as error:
        raise RuntimeError(f"the hook of route capture is missing or has another name in this vLLM: {error}") from error
    for router, capture_fn in zip(routers, bound_before, strict=True):
        if capture_fn is not None:
            router.set_capture_fn(partial(_call_both, capture_fn, router.capture_fn))
    return capturer


def _call_both(first: Callable[[Tensor], None], second: Callable[[Tensor], None], routed_experts: Tensor) -> None:
    first(routed_experts)
    second(routed_experts)


# ---- worker classes --------------------------------------------------------------------------------------------------

MIXINS: dict[str, tuple[type, ...]] = {
    "GpuWorker": (RouteCapture, StartupProgress, AdaptedRouters, LastingWeights),
    "GpuWorkerWithoutCapture": (StartupProgress, AdaptedRouters, LastingWeights),
    "CpuWorker": (RouteCapture, StartupProgress, CpuLoraWithoutExperts, ParallelExperts),
}


def __getattr__(name: str) -> type:
    """Return a worker class; vLLM is imported only where one is used."""
    if name not in MIXINS:
        raise AttributeError(name)
    return worker_class(name, MIXINS[name], __name__)


@cache
def worker_class(name: str, mixins: tuple[type, ...], module: str) -> type:
    """Return vLLM's worker for GPUs or CPUs, by how `name` begins, with these classes mixed in."""
    if name.startswith("Gpu"):
        from vllm.v1.worker.gpu_worker import Worker
    else:
        from vllm.v1.worker.cpu_worker import CPUWorker as Worker
    mute_known_warnings()  # before the worker is constructed
    return type(name, (*mixins, Worker), {"__module__": module})
