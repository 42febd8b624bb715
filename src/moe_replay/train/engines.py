"""The rollout engine that a config names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_replay.errors import EngineError
from moe_replay.rollout.engine import Engine
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import RolloutConfig
from moe_replay.train.config.train_config import TrainConfig

# What a launcher tells a trainer's process about its group: an engine's own processes form another one.
_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def longest_sequence(config: TrainConfig, folder: str) -> int:
    """Tokens of a sequence at most: what the config says; an error if the model does not go that far."""
    check_length(config, _context(folder))
    return config.max_length


def check_length(config: TrainConfig, context: int | None) -> None:
    """Raise where sequences can become longer than the model's context, if that is known."""
    if context is not None and config.max_length > context:
        raise ConfigError(
            "sequences can become longer than the model's context",
            expected=f"at most {context} tokens",
            found=f"{config.max_length} tokens",
            remedy="Lower data.max_prompt_tokens or rollout.max_tokens, or set rollout.max_length",
        )


def within_model(tokens: int, folder: str) -> int:
    """So many tokens, or as many as the model in the folder takes."""
    return min(tokens, _context(folder) or tokens)


def _context(folder: str) -> int | None:
    from transformers import AutoConfig

    return getattr(AutoConfig.from_pretrained(folder).get_text_config(), "max_position_embeddings", None)


def open_engine(config: TrainConfig, folder: str) -> Engine:
    """The engine of a run."""
    return start_engine(config.rollout, folder, longest_sequence(config, folder))


def start_engine(rollout: RolloutConfig, folder: str, max_length: int) -> Engine:
    """Start an engine on the model in a folder, or connect to the servers that have it."""
    options: dict[str, Any] = dict(rollout.options)
    if rollout.engine == "vllm":
        from moe_replay.rollout.vllm import VllmEngine

        options.setdefault("max_model_len", max_length)
        if rollout.sleep and torch.cuda.is_available():  # there is nothing to free on a CPU: it only stops sampling
            options.setdefault("enable_sleep_mode", True)
        with _without_launcher():
            return VllmEngine(folder, dtype=rollout.dtype, **options)
    if rollout.engine == "transformers":
        from moe_replay.rollout.transformers import TransformersEngine

        options.setdefault("device_map", "cuda" if torch.cuda.is_available() else "cpu")
        return TransformersEngine.from_pretrained(folder, max_length=max_length, dtype=rollout.dtype, **options)
    from moe_replay.rollout.pool import EnginePool

    token = rollout.token or os.environ.get("MOE_REPLAY_TOKEN")
    try:
        servers = [_server(rollout, url, token, options) for url in rollout.urls]
    except TypeError as wrong:
        raise EngineError(f"rollout.options has what {rollout.engine} does not know", found=wrong) from wrong
    return EnginePool(servers, any_version=True)  # their weights are replaced before they sample


def _server(rollout: RolloutConfig, url: str, token: str | None, options: dict[str, Any]) -> Any:
    if rollout.engine == "sglang_server":
        from moe_replay.rollout.sglang_server import SglangServer

        return SglangServer(url, token=token, **options)
    from moe_replay.rollout.vllm_server import VllmServer

    return VllmServer(url, token=token, **options)


@contextmanager
def _without_launcher() -> Iterator[None]:
    hidden = {name: os.environ.pop(name) for name in _LAUNCHER if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
