"""Engines behind the address of a server that goes down in mid-run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from moe_replay.engines.transformers import TransformersEngine
from moe_replay.errors import EngineUnavailableError
from moe_replay.records import SamplingParams


class Restartable:
    """What is behind the address of a server: an engine, and after `restart` another one with its start weights."""

    def __init__(self, start: Callable[[], TransformersEngine]) -> None:
        self._start = start
        self._engine = start()
        self._fails = 0
        self.restarts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def restart(self) -> None:
        self._engine.close()
        self._engine = self._start()
        self.restarts += 1

    def restart_at_the_next_request(self) -> None:
        self._fails = 1

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        if self._fails:
            self._fails = 0
            self.restart()
            raise EngineUnavailableError("it is going down")
        return await self._engine.generate_one(prompt, params)


class Hanging(Restartable):
    """Hangs in the first request of weights version 1 for so many samples, and is back at once with its start weights.

    in_requests_for   samples of a request: those of an evaluation are for one
    """

    in_requests_for = 1
    hung = False

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        if self.weight_version == 1 and params.n == self.in_requests_for and not self.hung:
            self.hung = True
            self.restart()
            await asyncio.sleep(3600)
        return await super().generate_one(prompt, params)


class Waiting(Restartable):
    """Samples with weights version 1 only when the other server has them again."""

    other: Hanging

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        async with asyncio.timeout(300):
            while self.weight_version == 1 and not (self.other.hung and self.other.weight_version == 1):
                await asyncio.sleep(0.02)
        return await super().generate_one(prompt, params)


class GoingDownInEvaluations(Restartable):
    """Goes down in the first request of an evaluation, and is back at once with its start weights, or not at all."""

    is_down = False
    comes_back = True

    async def generate_one(self, prompt: Any, params: SamplingParams) -> Any:
        if params.n == 1 and not self.restarts and not self.is_down:
            self.is_down = not self.comes_back
            if self.comes_back:
                self.restart()
            raise EngineUnavailableError("it is going down")
        return await super().generate_one(prompt, params)

    def healthy(self) -> bool:
        return not self.is_down and self._engine.healthy()
