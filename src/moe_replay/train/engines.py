"""The rollout engine of a run, from its configuration."""

from __future__ import annotations

from typing import Any

from moe_replay.rollout.engine import Engine, StartRequest
from moe_replay.rollout.model_folder import read_config
from moe_replay.rollout.registry import start_engine
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import ModelConfig, RolloutConfig
from moe_replay.train.config.train_config import TrainConfig


def longest_sequence(config: TrainConfig, folder: str) -> int:
    """Return the most tokens of a sequence by the config; raise if the model's context is shorter."""
    check_length(config, _context_length(folder, config.model.trust_remote_code))
    return config.max_length


def check_length(config: TrainConfig, context: int | None) -> None:
    """Raise if sequences can become longer than the model's context, where that is known."""
    if context is not None and config.max_length > context:
        raise ConfigError(
            "sequences can become longer than the model's context",
            expected=f"at most {context} tokens",
            found=f"{config.max_length} tokens",
            remedy="Lower data.max_prompt_tokens or rollout.max_tokens, or set rollout.max_length",
        )


def within_model(tokens: int, folder: str, *, trust_remote_code: bool = False) -> int:
    """Return `tokens`, but no more than the context of the model in the folder."""
    return min(tokens, _context_length(folder, trust_remote_code) or tokens)


def vocabulary_size(folder: str, *, trust_remote_code: bool = False) -> int | None:
    """Return the number of tokens that the model in the folder knows; None if its config does not say."""
    return getattr(_text_config(folder, trust_remote_code), "vocab_size", None)


def _context_length(folder: str, trust_remote_code: bool) -> int | None:
    return getattr(_text_config(folder, trust_remote_code), "max_position_embeddings", None)


def _text_config(folder: str, trust_remote_code: bool) -> Any:
    return read_config(folder, trust_remote_code=trust_remote_code).get_text_config()


def open_engine(config: TrainConfig, folder: str) -> Engine:
    """Start the engine of a run on the model in a folder, or connect to the servers that have it."""
    length = longest_sequence(config, folder)
    return start_engine(config.rollout.engine, start_request(config.rollout, config.model, folder, length))


def start_request(rollout: RolloutConfig, model: ModelConfig, folder: str, max_length: int) -> StartRequest:
    """Return what the configuration says about starting its engine."""
    return StartRequest(
        model=folder,
        max_length=max_length,
        dtype=rollout.dtype,
        router_family=model.router_family,
        trust_remote_code=model.trust_remote_code,
        sleep=rollout.sleep,
        sampling_mask=rollout.replays_sampling_mask,
        urls=rollout.urls,
        token=rollout.token,
        min_servers=rollout.min_servers,
        options=rollout.options,
    )
