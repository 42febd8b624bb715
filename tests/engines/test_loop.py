"""One engine for callers with and without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from moe_replay.engines.event_loop import AsyncSampler, while_alive
from moe_replay.errors import EngineError
from moe_replay.records import Sample, SamplingParams


class Engine(AsyncSampler):
    """Answers in its own time; a prompt of [0] fails, one of [9] never ends."""

    def __init__(self) -> None:
        super().__init__("test")
        self.threads: set[str] = set()
        self.cancelled: list[int] = []

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        self.threads.add(threading.current_thread().name)
        try:
            await (asyncio.Event().wait() if prompt[0] == 9 else asyncio.sleep(0.001 * prompt[0]))
        except asyncio.CancelledError:
            self.cancelled.append(prompt[0])
            raise
        if prompt[0] == 0:
            raise EngineError("a bad prompt")
        return [prompt[0]]  # type: ignore[list-item]


def test_answers_come_in_the_order_of_the_prompts() -> None:
    with Engine() as engine:
        assert engine.generate([[5], [1], [3]], SamplingParams()) == [[5], [1], [3]]
        assert engine.threads == {"test"}


class Seeded(Engine):
    """Answers with its seed."""

    async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        assert not params.seeds
        return [params.seed]  # type: ignore[list-item]


def test_each_prompt_of_a_call_has_its_own_seed() -> None:
    with Seeded() as engine:
        assert engine.generate([[5], [1], [5]], SamplingParams(seeds=(7, 8, 9))) == [[7], [8], [9]]
        assert engine.generate([[5], [1]], SamplingParams(seed=7)) == [[7], [7]]
        assert asyncio.run(engine.generate_one([5], SamplingParams(seeds=(7,)))) == [7]
        with pytest.raises(EngineError, match=r"one seed per prompt.*expected 2.*found 3"):
            engine.generate([[5], [1]], SamplingParams(seeds=(7, 8, 9)))


def test_the_same_engine_from_a_running_loop() -> None:
    async def both(engine: Engine) -> list[list[Sample]]:
        return await asyncio.gather(*(engine.generate_one([i], SamplingParams()) for i in (4, 2)))

    with Engine() as engine:
        assert asyncio.run(both(engine)) == [[4], [2]]
        assert engine.threads == {"test"}


def test_when_one_fails_nothing_is_left_running() -> None:
    with Engine() as engine:
        with pytest.raises(EngineError, match="bad prompt"):
            engine.generate([[9], [0], [9]], SamplingParams())
        assert engine.cancelled == [9, 9]


def test_a_caller_that_gives_up_cancels_its_request() -> None:
    async def give_up(engine: Engine) -> None:
        request = asyncio.create_task(engine.generate_one([9], SamplingParams()))
        while not engine.threads:  # until it is being sampled
            await asyncio.sleep(0.001)
        request.cancel()
        await request

    with Engine() as engine:
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(give_up(engine))
        engine.generate([[1]], SamplingParams())
        assert engine.cancelled == [9]


def test_closing_gives_up_what_is_under_way() -> None:
    engine = Engine()
    waiting = asyncio.run_coroutine_threadsafe(engine.sample([9], SamplingParams()), engine._loop.loop)
    while not engine.threads:
        pass
    engine.close()
    assert engine.cancelled == [9]
    assert waiting.cancelled()


def test_a_closed_engine_says_so() -> None:
    engine = Engine()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([[1]], SamplingParams())
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(engine.generate_one([1], SamplingParams()))


def test_a_blocking_call_from_the_engines_own_loop_is_refused() -> None:
    class Blocking(Engine):
        async def sample(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
            return self.generate([[1]], params)[0]

    with Blocking() as engine, pytest.raises(EngineError, match="deadlock"):
        engine.generate([[1]], SamplingParams())


def test_a_call_to_a_dead_process_does_not_wait_for_its_answer() -> None:
    deaths = iter([None, None, EngineError("it has died")])

    async def never() -> None:
        await asyncio.Event().wait()

    async def answered() -> int:
        return 5

    with pytest.raises(EngineError, match="it has died"):
        asyncio.run(while_alive(never(), lambda: next(deaths), check_s=0.01))
    assert asyncio.run(while_alive(answered(), lambda: EngineError("not asked"))) == 5
