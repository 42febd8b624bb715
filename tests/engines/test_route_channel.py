"""Captured routes on their way from a worker to the engine: shared memory and a socket, without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_replay.engines.vllm.arguments import capture_arguments
from moe_replay.engines.vllm.capture import EndedRequest, RouteReceiver, RouteSender, RouteSource
from moe_replay.engines.vllm.release import chosen_capture
from moe_replay.errors import EngineError, EngineUnavailableError

SHAPE = (3, 2)
BLOCK = 4
PATIENCE = 60.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:  # pytest's own are too long for the name of a socket
        yield Path(path)


@asynccontextmanager
async def channel(folder: Path) -> AsyncIterator[tuple[RouteReceiver, RouteSender]]:
    receiver = RouteReceiver()
    receiver.open(str(folder / "routes"), asyncio.get_running_loop())
    try:
        yield receiver, RouteSender(str(folder / "routes"), SHAPE)
    finally:
        receiver.close()


def rows(blocks: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.integers(0, 200, (blocks, BLOCK, SHAPE[0] * SHAPE[1]))).to(dtype)


def as_tokens(data: torch.Tensor) -> np.ndarray:
    return data.numpy().reshape(-1, *SHAPE)


def run(work) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_every_request_gets_its_own_rows(folder: Path, dtype: torch.dtype) -> None:
    async def work() -> None:
        async with channel(folder) as (receiver, sender):
            receiver.expect("request 1", 2)
            receiver.expect("request 2", 1)
            data = rows(6, dtype=dtype)
            ended = [
                EndedRequest("1_request 1-0123abcd", True, True, 1),
                EndedRequest("a request of somebody else", True, True, 2),
                EndedRequest("request 2-89abcdef", True, True, 2),
                EndedRequest("0_request 1-0123abcd", True, True, 1),
            ]
            sender.send(ended, data)
            for key, part in (
                (("request 1", 1), data[:1]),
                (("request 2", 0), data[3:5]),
                (("request 1", 0), data[5:]),
            ):
                found = await receiver.take(*key, PATIENCE)
                assert found is not None
                assert np.array_equal(found, as_tokens(part))

    run(work())


def test_more_requests_than_a_message_holds(folder: Path) -> None:
    async def work() -> None:
        async with channel(folder) as (receiver, sender):
            data = rows(700)
            for number in range(700):
                receiver.expect(f"request {number}", 1)
            sender.send([EndedRequest(f"request {number}", True, True, 1) for number in range(700)], data)
            for number in range(700):
                found = await receiver.take(f"request {number}", 0, PATIENCE)
                assert found is not None
                assert np.array_equal(found, as_tokens(data[number : number + 1]))

    run(work())


def test_rows_from_before_a_preemption_remain_until_all_were_computed_again(folder: Path) -> None:
    async def work() -> None:
        async with channel(folder) as (receiver, sender):
            for name in ("aborted", "resumed", "unknown"):
                receiver.expect(name, 1)
            before, after = rows(2, seed=1), rows(2, seed=2)
            sender.send([EndedRequest("aborted", False, True, 1), EndedRequest("resumed", False, True, 1)], before)
            sender.send([EndedRequest("aborted", True, False, 1), EndedRequest("resumed", True, True, 1)], after)
            sender.send([EndedRequest("unknown", True, False, 0)], rows(0))
            aborted, resumed = [await receiver.take(name, 0, PATIENCE) for name in ("aborted", "resumed")]
            assert aborted is not None
            assert resumed is not None
            assert np.array_equal(aborted, as_tokens(before[:1]))
            assert np.array_equal(resumed, as_tokens(after[1:]))
            assert await receiver.take("unknown", 0, PATIENCE) is None

    run(work())


def test_a_preempted_request_is_not_done(folder: Path) -> None:
    async def work() -> None:
        async with channel(folder) as (receiver, sender):
            receiver.expect("request", 1)
            sender.send([EndedRequest("request", False, True, 1)], rows(1))
            with pytest.raises(EngineUnavailableError, match="did not send the routes"):
                await receiver.take("request", 0, 0.1)

    run(work())


def test_a_worker_that_ends_fails_who_waits_for_it(folder: Path) -> None:
    async def work() -> None:
        async with channel(folder) as (receiver, sender):
            receiver.expect("request", 1)
            sender._socket.close()
            with pytest.raises(EngineUnavailableError, match="worker has ended"):
                await receiver.take("request", 0, PATIENCE)

    run(work())


def test_what_is_forgotten_is_dropped(folder: Path) -> None:
    async def work() -> None:
        async with channel(folder) as (receiver, sender):
            receiver.expect("forgotten", 1)
            receiver.forget("forgotten", 1)
            receiver.expect("last", 1)
            sender.send([EndedRequest("forgotten", True, True, 1), EndedRequest("last", True, True, 1)], rows(2))
            await receiver.take("last", 0, PATIENCE)
            assert not receiver._routed_experts

    run(work())


# ---- which capture ------------------------------------------------------------------------------------------------


def test_ours_is_used_where_it_can_be() -> None:
    assert chosen_capture("auto", {"pipeline_parallel_size": 1, "enforce_eager": True}) == "kv_slot"
    assert chosen_capture("auto", {"pipeline_parallel_size": 2}) == "vllm"
    assert chosen_capture("vllm", {}) == "vllm"
    assert chosen_capture("cross_check", {}) == "cross_check"


@pytest.mark.parametrize("capture", ["kv_slot", "cross_check"])
def test_what_ours_cannot_do_is_refused(capture: str) -> None:
    with pytest.raises(EngineError, match="cannot be used with a KV connector"):
        chosen_capture(capture, {"kv_transfer_config": {"kv_connector": "NixlConnector"}})


def test_an_unknown_capture_is_refused() -> None:
    with pytest.raises(EngineError, match="auto, kv_slot, vllm, cross_check, checked, found theirs"):
        chosen_capture("theirs", {})


def test_each_capture_turns_on_what_it_needs() -> None:
    assert not capture_arguments("kv_slot", on_cpu=False)["enable_return_routed_experts"]
    assert capture_arguments("vllm", on_cpu=True) == {"enable_return_routed_experts": True}
    theirs = capture_arguments("vllm", on_cpu=False)
    assert theirs.pop("worker_cls").endswith(".GpuWorkerWithoutCapture")  # for adapters of routers beside experts
    assert theirs == {"enable_return_routed_experts": True}
    both = capture_arguments("cross_check", on_cpu=True)
    assert both["enable_return_routed_experts"]
    assert both["worker_cls"].endswith(".CpuWorker")


def test_a_token_that_the_two_captures_route_apart_is_named() -> None:
    source = RouteSource("cross_check", {}, "vLLM")
    ours = np.arange(8 * 3 * 2, dtype=np.uint8).reshape(8, *SHAPE)
    theirs = np.concatenate([ours, ours[:1]])  # vLLM has a row for the last token too
    assert source._cross_check(ours, SimpleNamespace(index=0, routed_experts=theirs)) is ours
    theirs[[2, 5], 1, 0] += 1
    with pytest.raises(EngineError, match=r"differ \[sample 1\].*2 of 8 tokens, the first at 2, the last at 5.*twice"):
        source._cross_check(ours, SimpleNamespace(index=1, routed_experts=theirs))
    for other, found in ((None, "nothing"), (theirs[:4], r"\(4, 3, 2\)"), (theirs[:, :2], r"\(9, 2, 2\)")):
        with pytest.raises(EngineError, match=rf"different shapes.*found {found} and \(8, 3, 2\)"):
            source._cross_check(ours, SimpleNamespace(index=1, routed_experts=other))
