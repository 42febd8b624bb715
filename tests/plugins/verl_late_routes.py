"""A fault, by VERL_USE_EXTERNAL_MODULES: verl's rollout server returns the routes of each token one token late."""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

import numpy as np

from moe_replay.integrations.hosts import after_import


def shift(module: ModuleType) -> None:
    generate = module.vLLMHttpServer.generate

    @wraps(generate)
    async def generate_late(*args: Any, **kwargs: Any) -> Any:
        output = await generate(*args, **kwargs)
        rows = output.routed_experts
        output.routed_experts = np.concatenate([rows[:1], rows[:-1]])
        return output

    module.vLLMHttpServer.generate = generate_late


after_import("verl.workers.rollout.vllm_rollout.vllm_async_server", f"{__name__}:shift")
