"""Route capture inside a vLLM worker: expert ids are kept on the device, one row for each slot of the KV cache.

A slot holds the keys and values of one token, and its row the experts of that token. Whatever vLLM does with slots
(prefix caching, chunked prefill, preemption, rejected drafts, several samples of a prompt) is right for the routes too,
without bookkeeping. A step costs one scatter on the device; rows are read once, when a request ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that leaves the worker.

    request_id   vLLM's internal id
    final        it is done; False: preempted, and it may run again
    complete     its blocks hold routes of all its tokens; False: it was preempted, and not all were computed again
    blocks       KV blocks it had: rows of `SlotRoutes.read`
    """

    request_id: str
    final: bool
    complete: bool
    blocks: int


class Runner(Protocol):
    """State of one of vLLM's two model runners that route capture reads."""

    def slots(self, tokens: int) -> Tensor:
        """(tokens,) int64 on the device: KV slots of the tokens that the last forward computed."""
        ...

    def blocks(self, request_ids: Sequence[str]) -> tuple[list[int], Tensor]:
        """Return how many KV blocks each request has (0: unknown), and the ids of all of them, in order."""
        ...

    def progress(self, request_id: str) -> tuple[int, int]:
        """Return the tokens computed before the last step of a request that was resumed, and those it had before."""
        ...


class RunnerV1:
    """vLLM's first model runner, which CPUs use."""

    def __init__(self, runner: Any, group: int) -> None:
        self._runner, self._group = runner, group

    def slots(self, tokens: int) -> Tensor:
        """See `Runner`."""
        return self._runner.input_batch.block_table[self._group].slot_mapping.gpu[:tokens]

    def blocks(self, request_ids: Sequence[str]) -> tuple[list[int], Tensor]:
        """See `Runner`."""
        states = [self._runner.requests.get(request_id) for request_id in request_ids]
        held = [[] if state is None else state.block_ids[self._group] for state in states]
        return [len(ids) for ids in held], torch.tensor(list(chain(*held)), dtype=torch.int64)

    def progress(self, request_id: str) -> tuple[int, int]:
        """See `Runner`."""
        state = self._runner.requests[request_id]
        return state.num_computed_tokens, state.num_tokens - 1


class RunnerV2:
    """vLLM's second model runner, which GPUs use."""

    def __init__(self, runner: Any, group: int) -> None:
        self._runner, self._group = runner, group

    def slots(self, tokens: int) -> Tensor:
        """See `Runner`."""
        return self._runner.block_tables.slot_mappings[self._group, :tokens]

    def blocks(self, request_ids: Sequence[str]) -> tuple[list[int], Tensor]:
        """See `Runner`. The table is on the device, so its entries are gathered there."""
        tables = self._runner.block_tables
        index = self._runner.req_states.req_id_to_index
        rows = np.array([index.get(request_id, -1) for request_id in request_ids], np.int64)
        counts = np.where(rows >= 0, tables.num_blocks.np[self._group, rows], 0).astype(np.int64)
        columns = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        table = tables.block_tables[self._group].gpu
        where = torch.from_numpy(np.stack([np.repeat(rows, counts), columns])).to(table.device, non_blocking=True)
        return counts.tolist(), table[where[0], where[1]].long()

    def progress(self, request_id: str) -> tuple[int, int]:
        """See `Runner`."""
        states = self._runner.req_states
        row = states.req_id_to_index[request_id]
        return int(states.num_computed_prefill_tokens[row]), int(states.prefill_len.np[row])


class SlotRoutes:
    """Expert ids of every KV slot of one worker.

    shape   (layers, K) of a token, all decoder layers counted
    """

    def __init__(self, runner: Runner, captured: Tensor, blocks: tuple[int, int]) -> None:
        """Make room for every slot.

        captured   (tokens, layers, K), of `id_dtype`: what the routers write in each forward
        blocks     of the KV cache, and slots of each
        """
        self._runner = runner
        self._captured = captured.flatten(1)
        self.shape: tuple[int, int] = (captured.shape[1], captured.shape[2])
        self._routes = torch.zeros(
            (*blocks, self.shape[0] * self.shape[1]), dtype=captured.dtype, device=captured.device
        )
        self._slots = self._routes.flatten(0, 1)
        self._preempted: dict[str, int] = {}  # request -> tokens in its last step since it was resumed

    def store(self, tokens: int, scheduled: Mapping[str, int]) -> None:
        """Keep what the routers have chosen in the last forward, of this many tokens of the scheduled requests."""
        for request_id in self._preempted.keys() & scheduled.keys():
            self._preempted[request_id] = scheduled[request_id]
        # The only kernel of a step beside those in the CUDA graph: at small batches the host has no time to lose.
        self._slots.index_copy_(0, self._runner.slots(tokens), self._captured[:tokens])

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Follow the KV cache where vLLM copies blocks, (source, destination)."""
        source, destination = torch.tensor(list(pairs), dtype=torch.int64).to(self._routes.device).unbind(1)
        self._routes[destination] = self._routes[source]

    def read(self, final: Sequence[str], preempted: Sequence[str]) -> tuple[list[EndedRequest], Tensor]:
        """Return the requests that end now, and (blocks, block size, layers * K): the rows of all their blocks."""
        request_ids = [*final, *preempted]
        counts, blocks = self._runner.blocks(request_ids)
        ended = [
            EndedRequest(request_id, number < len(final), self._is_complete(request_id, count), count)
            for number, (request_id, count) in enumerate(zip(request_ids, counts, strict=True))
        ]
        for request_id in final:
            self._preempted.pop(request_id, None)
        self._preempted |= dict.fromkeys(preempted, 0)
        return ended, self._routes[blocks.to(self._routes.device)]

    def _is_complete(self, request_id: str, blocks: int) -> bool:
        if not blocks or request_id not in self._preempted:
            return bool(blocks)
        computed, needed = self._runner.progress(request_id)
        return computed + self._preempted[request_id] >= needed


def capture_routes(runner: Any, vllm_config: Any, kv_cache_config: Any) -> SlotRoutes:
    """Return the routes of a worker's slots; its routers write to them from now on."""
    from vllm.v1.kv_cache_interface import is_full_attention_spec

    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [number for number, spec in enumerate(groups) if is_full_attention_spec(spec)]
    if not full:
        raise ValueError("no layer attends to all tokens, so the KV cache forgets slots before a request ends")
    return SlotRoutes(
        (RunnerV2 if hasattr(runner, "block_tables") else RunnerV1)(runner, full[0]),
        _capturer(runner, vllm_config, kv_cache_config).device_buffer,
        (kv_cache_config.num_blocks, groups[full[0]].block_size),
    )


def id_dtype(num_experts: int) -> torch.dtype:
    """Return the dtype that expert ids are kept in on the device."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def _capturer(runner: Any, vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return vLLM's buffer of what the routers choose in one forward, which the routers write to from now on.

    If vLLM's own capture is on as well, routers write to both.
    """
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer as vllm_capture
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    model = runner.get_model()
    routers: list[Any] = [module.router for module in model.modules() if isinstance(module, MoERunner)]
    before = [getattr(router, "capture_fn", None) for router in routers]
    arguments = {
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
        "vllm_config": vllm_config,
        "kv_cache_config": kv_cache_config,
    }
    wanted = inspect.signature(vllm_capture.RoutedExpertsCapturer).parameters
    capturer = vllm_capture.RoutedExpertsCapturer(**{name: arguments[name] for name in wanted})
    # Narrow ids from the routers on, converted where they are written, inside the CUDA graph.
    capturer.device_buffer = capturer.device_buffer.to(id_dtype(vllm_config.model_config.get_num_experts()))
    vllm_capture.bind_routed_experts_capturer(model, capturer)
    for router, other in zip(routers, before, strict=True):
        if other is not None:
            router.set_capture_fn(partial(_call_both, other, router.capture_fn))
    return capturer


def _call_both(first: Callable[[Tensor], None], second: Callable[[Tensor], None], chosen: Tensor) -> None:
    first(chosen)
    second(chosen)
