"""The engine cores of one vLLM: one, or with data parallelism one for each replica, which run in step.

vLLM's own calls go to all replicas and return the answer of the first: an update that failed in another one would pass
for a good one. Here every replica is asked, and every worker of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class Replicas:
    """All engine cores of a started vLLM.

    count   1 without data parallelism
    close   ends what is between replicas; to be called before vLLM is ended
    """

    def __init__(self, llm: Any, close: Callable[[], None]) -> None:
        self._llm, self._client = llm, llm.engine_core
        self._cores: list[Any] = list(getattr(self._client, "core_engines", ()))
        self.count = len(self._cores) or 1
        self.close = close

    async def call_workers(self, method: str, *arguments: str) -> list[Any]:
        """Return what each worker answers, in the order of replicas and of the ranks in each."""
        if self.count == 1:
            return await self._llm.collective_rpc(method, args=arguments)
        answers = await self._ask_all("collective_rpc", method, None, arguments, None)
        return [answer for of_replica in answers for answer in of_replica]

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; False if a replica could not."""
        if self.count == 1:
            return await self._llm.reset_prefix_cache()
        return all(await self._ask_all("reset_prefix_cache", False, False))

    async def pause(self) -> None:
        """Stop the steps that idle replicas make beside others: they would compute with half of the new weights."""
        if self.count > 1:
            await self._llm.pause_generation(mode="abort", clear_cache=False)

    async def resume(self) -> None:
        """Undo `pause`."""
        if self.count > 1:
            await self._llm.resume_generation()

    async def _ask_all(self, method: str, *arguments: Any) -> list[Any]:
        calls = [self._client._call_utility_async(method, *arguments, engine=core) for core in self._cores]
        return await asyncio.gather(*calls)
