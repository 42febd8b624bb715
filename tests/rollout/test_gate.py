"""Requests pass while the gate is open; whoever shuts it is alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from moe_replay.rollout.gate import Gate


def in_a_loop(test: Callable[[Gate], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await test(Gate(asyncio.get_running_loop()))

    asyncio.run(run())


async def nothing() -> None:
    pass


async def turns() -> None:
    """Let every other task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_shutting_aborts_what_is_under_way_and_waits_for_it() -> None:
    async def test(gate: Gate) -> None:
        aborted = asyncio.Event()
        events: list[str] = []

        async def request() -> None:
            async with gate.request():
                await aborted.wait()
                events.append("request ended")

        async def abort() -> None:
            assert len(gate.under_way) == 1
            aborted.set()

        task = asyncio.create_task(request())
        await turns()
        await gate.shut(abort)
        events.append("shut")
        assert events == ["request ended", "shut"]
        assert not gate.under_way
        await task

    in_a_loop(test)


def test_a_request_that_an_abort_missed_is_aborted_again() -> None:
    async def test(gate: Gate) -> None:
        aborts = 0
        done = asyncio.Event()

        async def request() -> None:
            async with gate.request():
                await done.wait()

        async def abort() -> None:
            nonlocal aborts
            aborts += 1
            if aborts == 2:
                done.set()

        task = asyncio.create_task(request())
        await turns()
        await gate.shut(abort)
        assert aborts == 2
        await task

    in_a_loop(test)


def test_requests_wait_until_it_is_open_again() -> None:
    async def test(gate: Gate) -> None:
        async def request() -> str:
            async with gate.request() as name:
                return name

        await gate.shut(nothing)
        waiting = [asyncio.create_task(request()) for _ in range(3)]
        await turns()
        assert not any(task.done() for task in waiting)
        gate.open()
        assert len(set(await asyncio.gather(*waiting))) == 3

    in_a_loop(test)


def test_two_that_shut_it_are_never_inside_together() -> None:
    async def test(gate: Gate) -> None:
        inside = 0

        async def change() -> None:
            nonlocal inside
            await gate.shut(nothing)
            inside += 1
            await turns()
            assert inside == 1
            inside -= 1
            gate.open()

        await asyncio.gather(*(change() for _ in range(4)))

    in_a_loop(test)


def test_a_step_that_fails_lets_in_who_waits() -> None:
    async def test(gate: Gate) -> None:
        async def request() -> None:
            async with gate.request():
                pass

        await gate.shut(nothing)
        waiting = asyncio.create_task(request())
        with pytest.raises(ZeroDivisionError), gate.or_open():
            raise ZeroDivisionError
        await waiting
        with gate.or_open():
            pass
        await request()

    in_a_loop(test)


def test_a_step_that_succeeds_leaves_it_shut() -> None:
    async def test(gate: Gate) -> None:
        await gate.shut(nothing)
        with gate.or_open():
            pass
        await turns()
        entered = asyncio.create_task(gate.request().__aenter__())
        await turns()
        assert not entered.done()
        entered.cancel()

    in_a_loop(test)
