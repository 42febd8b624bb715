"""Environments: async functions that answer a completion and let the model continue, for rollouts of several turns.

    async def environment(episode):                      # rollout.environment = "module:environment"
        while episode.can_continue and (call := read_call(episode.completion)):
            episode.observe(answer(call))                # tokens without loss and without made-up routes
            await episode.generate()

An environment is called once per sample, after the first turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from moe_replay.train.episode import Episode, EpisodeError
from moe_replay.utils.plugins import resolve, user_code

Environment = Callable[[Episode], Awaitable[None]]

ENVIRONMENTS: Mapping[str, Environment | str] = {}
"""Environments by name; `rollout.environment` takes one of these or `module:name`."""


def load_environment(name: str | None) -> Environment | None:
    """Return the environment that `rollout.environment` names; None for rollouts of a single turn."""
    if name is None:
        return None
    return resolve(name, ENVIRONMENTS, kind="environment", key="rollout.environment")


async def run_environment(environment: Environment, episode: Episode) -> None:
    """Run an environment on one episode; errors name the environment, the row of the data set and the turn."""
    name = getattr(environment, "__qualname__", repr(environment))
    with user_code(f"environment {name}", EpisodeError, sample=f"row {episode.prompt.row}", found=episode):
        await environment(episode)
