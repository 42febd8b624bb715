"""A rollout server that lies: between it and its engine, samples are changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from moe_replay.engines.server.app import build_app
from moe_replay.engines.transformers import TransformersEngine
from moe_replay.records import Sample, SamplingParams
from tests.engines.serving import serving

TOKEN = "secret"
Samples = Callable[[list[Sample]], list[Sample]]


class Lying:
    """An engine whose samples are changed before they are sent, while there is a change."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine
        self.change: Samples | None = None
        self.asks: Callable[[SamplingParams], SamplingParams] = lambda params: params

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate_one(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        samples = await self._engine.generate_one(prompt, self.asks(params))
        return samples if self.change is None else self.change(samples)


@contextmanager
def lying_and_honest(model: str, change: Samples) -> Iterator[list[str]]:
    """The URLs of two servers of one model, of which the first changes its samples; all samples have full length."""
    with ExitStack() as stack:
        servers = [Lying(TransformersEngine.from_pretrained(model)) for _ in range(2)]
        servers[0].change = change
        for server in servers:
            server.asks = lambda params: replace(params, ignore_eos=True)
            stack.callback(server.close)
        yield [stack.enter_context(serving(build_app(server, TOKEN))) for server in servers]  # type: ignore[arg-type]
