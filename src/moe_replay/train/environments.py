"""Environments: async functions that answer a completion and let the model continue, for rollouts of several turns.

    async def environment(episode):                      # rollout.environment = "module:environment"
        while episode.can_continue and (call := read_call(episode.completion)):
            episode.observe(answer(call))                # tokens without loss and without made-up routes
            await episode.generate()

An environment is called once per sample, after the first turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping

from moe_replay.train.episode import Episode, EpisodeError
from moe_replay.utils.plugins import resolve, user_code

Environment = Callable[[Episode], Awaitable[None]]

ENVIRONMENTS: Mapping[str, Environment | str] = {"tools": "moe_replay.train.tool_environment:answer_tool_calls"}
"""Environments by name; `rollout.environment` takes one of these or `module:name`."""


def load_environment(name: str | None) -> Environment | None:
    """Return the environment that `rollout.environment` names; None for rollouts of a single turn."""
    if name is None:
        return None
    return resolve(name, ENVIRONMENTS, kind="environment", key="rollout.environment")


async def run_environment(environment: Environment, episode: Episode, timeout_s: float = math.inf) -> None:
    """Run an environment on one episode, for `timeout_s` at most.

    Errors name the environment, the row of the data set and the turn.
    """
    name, row = environment_name(environment), f"row {episode.prompt.row}"
    task = asyncio.ensure_future(_run(environment, episode, name, row))
    try:
        await asyncio.wait({task}, timeout=None if timeout_s == math.inf else timeout_s)
        if not task.done():
            raise EpisodeError(
                f"environment {name} did not return within {timeout_s:g} s",
                sample=row,
                found=episode,
                remedy="Give up earlier in the function, or raise rollout.environment_timeout_s",
            )
        task.result()
    finally:
        task.cancel()


async def _run(environment: Environment, episode: Episode, name: str, row: str) -> None:
    with user_code(f"environment {name}", EpisodeError, sample=row, found=episode):
        await environment(episode)


def environment_name(environment: Environment) -> str:
    """Return the name of an environment for errors."""
    return getattr(environment, "__qualname__", repr(environment))
