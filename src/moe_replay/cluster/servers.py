"""`RayEngines`: on rank 0, the engines that the cluster has started for the run, as they come and go."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from moe_replay.cluster.board import EngineList, EngineOrder
from moe_replay.errors import EngineUnavailableError
from moe_replay.rollout.engine import StartRequest
from moe_replay.train.engines import StartedEngines

PAUSE_S = 0.2


class RayEngines:
    """Starts the engines of a run by way of its `RunBoard`: an `EngineStarter`."""

    def __init__(self, board: Any) -> None:
        self._board = board

    def start(self, engine: str, request: StartRequest) -> StartedEngines:
        """Ask for the engines, and wait until all of them are ready; those of an earlier start are used again."""
        import ray

        token = ray.get(self._board.order.remote(EngineOrder(engine, dataclasses.asdict(request) | {"token": None})))
        urls = self._wait_for(lambda found: bool(found.urls) and not found.starting)
        return StartedEngines(urls, token, self.urls)

    def urls(self) -> Sequence[str]:
        """Return the addresses of the engines that can be used; waits while all of them are being started."""
        return self._wait_for(lambda found: bool(found.urls))

    def _wait_for(self, is_enough: Callable[[EngineList], bool]) -> tuple[str, ...]:
        import ray

        while True:
            found: EngineList = ray.get(self._board.engines.remote())
            if found.error:
                raise EngineUnavailableError(found.error)
            if is_enough(found):
                return found.urls
            time.sleep(PAUSE_S)
