"""Routes kept by KV slot, without vLLM: what a request reads is what its tokens were routed to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moe_replay.engines.vllm.capture_worker import EndedRequest, RunnerV1, RunnerV2, SlotRoutes, id_dtype

BLOCK, BLOCKS, LAYERS, TOP_K = 4, 6, 3, 2


class Requests:
    """A model runner's view of requests: KV blocks of each, slots of the last forward, progress after a preemption."""

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.held = blocks
        self.last: list[int] = []
        self.computed: dict[str, tuple[int, int]] = {}

    def slots(self, tokens: int) -> torch.Tensor:
        return torch.tensor(self.last[:tokens])

    def blocks(self, request_ids: Any) -> tuple[list[int], torch.Tensor]:
        held = [self.held.get(request_id, []) for request_id in request_ids]
        return [len(ids) for ids in held], torch.tensor([one for ids in held for one in ids], dtype=torch.int64)

    def progress(self, request_id: str) -> tuple[int, int]:
        return self.computed[request_id]

    def slot(self, request_id: str, position: int) -> int:
        return self.held[request_id][position // BLOCK] * BLOCK + position % BLOCK


class Worker:
    """Runs forwards whose routes are drawn, and knows them by request and position."""

    def __init__(self, blocks: dict[str, list[int]], num_experts: int = 64) -> None:
        self.requests = Requests(blocks)
        self.routed_experts = torch.zeros(16, LAYERS, TOP_K, dtype=id_dtype(num_experts))
        self.routes = SlotRoutes(self.requests, self.routed_experts, (BLOCKS, BLOCK))
        self.chance = np.random.default_rng(0)
        self.num_experts = num_experts
        self.truth: dict[tuple[str, int], np.ndarray] = {}

    def forward(self, *tokens: tuple[str, int]) -> None:
        drawn = self.chance.integers(0, self.num_experts, (len(tokens), LAYERS, TOP_K))
        self.routed_experts[: len(tokens)] = torch.from_numpy(drawn)
        self.requests.last = [self.requests.slot(*token) for token in tokens]
        scheduled: dict[str, int] = {}
        for (request_id, position), row in zip(tokens, drawn, strict=True):
            self.truth[request_id, position] = row
            scheduled[request_id] = scheduled.get(request_id, 0) + 1
        self.routes.store(len(tokens), scheduled)

    def expected(self, request_id: str, tokens: int) -> np.ndarray:
        return np.stack([self.truth[request_id, position] for position in range(tokens)])

    def read(self, final: list[str], preempted: list[str] | None = None) -> dict[str, tuple[EndedRequest, np.ndarray]]:
        ended, rows = self.routes.read(final, preempted or [])
        found, start = {}, 0
        for one in ended:
            part = rows[start : start + one.blocks].numpy().reshape(-1, LAYERS, TOP_K)
            found[one.request_id] = one, part.astype(np.int64)
            start += one.blocks
        assert start == len(rows)
        return found


@pytest.mark.parametrize("num_experts", [64, 256, 512])
def test_a_request_reads_what_its_tokens_were_routed_to(num_experts: int) -> None:
    worker = Worker({"a": [4, 1], "b": [2]}, num_experts)
    worker.forward(*(("a", position) for position in range(5)), ("b", 0))  # a prompt in one chunk, another's first
    for position in (5, 6):
        worker.forward(("b", position - 4), ("a", position))
    found = worker.read(["b", "a"])
    assert np.array_equal(found["a"][1][:7], worker.expected("a", 7))
    assert np.array_equal(found["b"][1][:3], worker.expected("b", 3))
    assert found["a"][0] == EndedRequest("a", True, True, 2)


def test_blocks_of_a_shared_prefix_and_copied_blocks_carry_their_routes() -> None:
    worker = Worker({"a": [3], "b": [3, 0], "c": [5]})
    worker.forward(*(("a", position) for position in range(4)))
    worker.forward(("b", 4))
    worker.routes.copy_blocks([(3, 5)])
    found = worker.read(["b", "c"])
    assert np.array_equal(found["b"][1][:4], worker.expected("a", 4))
    assert np.array_equal(found["b"][1][4], worker.truth["b", 4])
    assert np.array_equal(found["c"][1], worker.expected("a", 4))


def test_a_request_that_was_never_run_has_no_rows() -> None:
    found = Worker({"a": [0]}).read(["unknown"])
    assert found["unknown"][0] == EndedRequest("unknown", True, False, 0)


def test_after_a_preemption_rows_count_once_all_tokens_are_computed_again() -> None:
    worker = Worker({"a": [0, 1]})
    worker.forward(*(("a", position) for position in range(6)))
    ((before, _),) = worker.read([], ["a"]).values()
    assert before == EndedRequest("a", False, True, 2)

    worker.requests.held["a"] = [2, 3]  # resumed elsewhere; of its 6 tokens a chunk of 4 is computed
    worker.requests.computed["a"] = (0, 6)
    worker.forward(*(("a", position) for position in range(4)))
    assert not worker.read([], ["a"])["a"][0].complete  # preempted again half-way

    worker.requests.computed["a"] = (0, 6)
    worker.forward(*(("a", position) for position in range(4)))
    worker.requests.computed["a"] = (4, 6)
    worker.forward(("a", 4), ("a", 5))
    one, rows = worker.read(["a"])["a"]
    assert one.complete
    assert np.array_equal(rows[:6], worker.expected("a", 6))


def test_a_request_that_ends_before_it_runs_again_is_not_complete() -> None:
    worker = Worker({"a": [0, 1]})
    worker.forward(*(("a", position) for position in range(6)))
    worker.read([], ["a"])
    worker.requests.computed["a"] = (5, 6)  # a cached prefix; its last token is still to be computed
    assert not worker.read([], ["a"])["a"][0].complete
    worker.requests.computed["a"] = (0, 6)
    worker.forward(*(("a", position) for position in range(4)))
    worker.read([], ["a"])
    worker.requests.computed["a"] = (4, 6)  # what it computed before it was preempted again does not count
    assert not worker.read(["a"])["a"][0].complete


def test_what_is_known_of_a_preemption_ends_with_the_request() -> None:
    worker = Worker({"a": [0]})
    worker.forward(("a", 0))
    worker.read([], ["a"])
    worker.requests.computed["a"] = (0, 1)
    worker.read(["a"])
    assert worker.read(["a"])["a"][0].complete  # a later request of that name was never preempted


# ---- vLLM's two model runners ---------------------------------------------------------------------------------------


def test_the_first_runner() -> None:
    slots = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.tensor([7, 8, 9])))
    state = SimpleNamespace(block_ids=([1], [2, 3]), num_computed_tokens=5, num_tokens=9)
    runner = RunnerV1(SimpleNamespace(input_batch=SimpleNamespace(block_table=[None, slots]), requests={"a": state}), 1)
    assert runner.slots(2).tolist() == [7, 8]
    counts, blocks = runner.blocks(["x", "a"])
    assert (counts, blocks.tolist()) == ([0, 2], [2, 3])
    assert runner.progress("a") == (5, 8)


def test_the_second_runner() -> None:
    table = torch.arange(20, dtype=torch.int32).reshape(4, 5)
    tables = SimpleNamespace(
        slot_mappings=torch.tensor([[1, 2], [7, 8]]),
        num_blocks=SimpleNamespace(np=np.array([[0, 0, 0, 0], [2, 0, 3, 1]], np.int32)),
        block_tables=[None, SimpleNamespace(gpu=table)],
    )
    states = SimpleNamespace(
        req_id_to_index={"a": 2, "b": 0},
        num_computed_prefill_tokens=np.array([4, 0, 6, 0]),
        prefill_len=SimpleNamespace(np=np.array([5, 0, 9, 0])),
    )
    runner = RunnerV2(SimpleNamespace(block_tables=tables, req_states=states), 1)
    assert runner.slots(1).tolist() == [7]
    counts, blocks = runner.blocks(["a", "unknown", "b"])
    assert (counts, blocks.tolist()) == ([3, 0, 2], [10, 11, 12, 0, 1])
    assert runner.progress("a") == (6, 9)
