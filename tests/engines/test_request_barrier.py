"""Requests run while the barrier is open; whoever closes it has the engine to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moe_replay.engines.requests import RequestBarrier


def in_a_loop(test: Callable[[RequestBarrier], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await test(RequestBarrier(asyncio.get_running_loop()))

    asyncio.run(run())


async def nothing() -> None:
    pass


async def turns() -> None:
    """Let every other task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_closing_aborts_running_requests_and_waits_for_them() -> None:
    async def test(barrier: RequestBarrier) -> None:
        aborted = asyncio.Event()
        events: list[str] = []

        async def request() -> None:
            async with barrier.request():
                await aborted.wait()
                events.append("request ended")

        async def abort() -> None:
            assert len(barrier.active) == 1
            aborted.set()

        task = asyncio.create_task(request())
        await turns()
        await barrier.close(abort)
        events.append("closed")
        assert events == ["request ended", "closed"]
        assert not barrier.active
        await task

    in_a_loop(test)


def test_a_request_that_an_abort_missed_is_aborted_again() -> None:
    async def test(barrier: RequestBarrier) -> None:
        aborts = 0
        done = asyncio.Event()

        async def request() -> None:
            async with barrier.request():
                await done.wait()

        async def abort() -> None:
            nonlocal aborts
            aborts += 1
            if aborts == 2:
                done.set()

        task = asyncio.create_task(request())
        await turns()
        await barrier.close(abort)
        assert aborts == 2
        await task

    in_a_loop(test)


def test_requests_wait_until_it_is_open_again() -> None:
    async def test(barrier: RequestBarrier) -> None:
        async def request() -> str:
            async with barrier.request() as name:
                return name

        await barrier.close(nothing)
        waiting = [asyncio.create_task(request()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in waiting)
        barrier.open()
        assert len(set(await asyncio.gather(*waiting))) == 3

    in_a_loop(test)


def test_two_that_close_it_are_never_inside_together() -> None:
    async def test(barrier: RequestBarrier) -> None:
        inside = 0

        async def change() -> None:
            nonlocal inside
            await barrier.close(nothing)
            inside += 1
            await turns()
            assert inside == 1
            inside -= 1
            barrier.open()

        await asyncio.gather(*(change() for _ in range(4)))

    in_a_loop(test)


def test_a_step_that_fails_lets_waiting_requests_run() -> None:
    async def test(barrier: RequestBarrier) -> None:
        async def request() -> None:
            async with barrier.request():
                pass

        await barrier.close(nothing)
        waiting = asyncio.create_task(request())
        with pytest.raises(ZeroDivisionError), barrier.open_on_error():
            raise ZeroDivisionError
        await waiting
        with barrier.open_on_error():
            pass
        await request()

    in_a_loop(test)


def test_a_step_that_succeeds_leaves_it_closed() -> None:
    async def test(barrier: RequestBarrier) -> None:
        await barrier.close(nothing)
        with barrier.open_on_error():
            pass
        await turns()
        entered = asyncio.create_task(barrier.request().__aenter__())
        await turns()
        assert not entered.done()
        entered.cancel()

    in_a_loop(test)
