"""The rollout engine of a run, from its configuration."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from moe_replay.distributed.network import LOOPBACK, address_towards
from moe_replay.distributed.ranks import all_gather_json, from_rank_0, raise_on_all_ranks, world_size
from moe_replay.engines.base import Engine, LoraSpec, StartRequest
from moe_replay.engines.registry import start_engine
from moe_replay.train.backends.lora import Targets, targets_of
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import ModelConfig, RolloutConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.weights.model_folder import read_config


def longest_sequence(config: TrainConfig, folder: str) -> int:
    """Return the most tokens of a sequence by the config; raise if the model's context is shorter."""
    check_sizes(config, _text_config(folder, config.model.trust_remote_code))
    return config.max_length


def check_sizes(config: TrainConfig, model: Any) -> None:
    """Raise for sequences longer than the model's context, and for a LoRA rank larger than its hidden size.

    model   the text config of the model; sizes that it does not name are not checked
    """
    hidden, context = getattr(model, "hidden_size", None), getattr(model, "max_position_embeddings", None)
    if hidden is not None and config.model.lora_rank > hidden:
        raise ConfigError(
            "model.lora_rank: adapters would be larger than the weights they adapt",
            expected=f"at most {hidden}, the hidden size of the model",
            found=config.model.lora_rank,
            remedy="Usual ranks are 8 to 128; 0 trains all weights",
        )
    if context is not None and config.max_length > context:
        raise ConfigError(
            "sequences can become longer than the model's context",
            expected=f"at most {context} tokens",
            found=f"{config.max_length} tokens",
            remedy="Lower data.max_prompt_length or rollout.max_tokens, or set rollout.max_length",
        )


def within_model(tokens: int, folder: str, *, trust_remote_code: bool = False) -> int:
    """Return `tokens`, but no more than the context of the model in the folder."""
    return min(tokens, getattr(_text_config(folder, trust_remote_code), "max_position_embeddings", None) or tokens)


def vocabulary_size(folder: str, *, trust_remote_code: bool = False) -> int | None:
    """Return the number of tokens that the model in the folder knows; None if its config does not say."""
    return getattr(_text_config(folder, trust_remote_code), "vocab_size", None)


def _text_config(folder: str, trust_remote_code: bool) -> Any:
    return read_config(folder, trust_remote_code=trust_remote_code).get_text_config()


class StartedEngines(NamedTuple):
    """Addresses of the engines that all machines of a run have started, and their token; none: the run starts none.

    follow   returns the addresses from now on, where engines may join and leave
    """

    urls: tuple[str, ...] = ()
    token: str = ""
    follow: Callable[[], Sequence[str]] | None = None


class EngineStarter(Protocol):
    """Starts the engines of a run where the trainer's machines do not: a cluster."""

    def start(self, engine: str, request: StartRequest) -> StartedEngines:
        """Start the engines, and wait until they are ready."""


@contextmanager
def engines_of_all_nodes(
    config: TrainConfig, folder: str, starter: EngineStarter | None = None
) -> Iterator[StartedEngines]:
    """Start `rollout.engines_per_node` engines on each machine; they end with this context. Collective.

    starter   on rank 0, starts them instead; its owner ends them
    """
    count, started = config.rollout.engines_per_node, StartedEngines()
    if config.cluster.starts_engines:
        with raise_on_all_ranks("starting the rollout engines"):
            if starter is not None:
                request = start_request(config.rollout, config.model, folder, longest_sequence(config, folder))
                started = starter.start(config.rollout.engine, request)
        yield started
        return
    if count is None:
        yield started
        return
    from moe_replay.engines.server.engine_processes import EngineProcesses

    token = from_rank_0(lambda: secrets.token_urlsafe(32), "making a token")
    address, here = _address(), list[str]()
    with ExitStack() as stack:
        with raise_on_all_ranks("starting the rollout engines"):
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                request = start_request(config.rollout, config.model, folder, longest_sequence(config, folder))
                host = LOOPBACK if address == LOOPBACK else "0.0.0.0"
                processes = EngineProcesses(config.rollout.engine, request, count, token=token, host=host)
                stack.callback(processes.close)
                here = [f"http://{address}:{port}" for port in processes.ports]
        yield StartedEngines(tuple(url for urls in all_gather_json(here) for url in urls), token)


def _address() -> str:
    """Return the address of this machine as the others of the run reach it; the loopback if there are no others."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) == world_size():
        return LOOPBACK
    return address_towards(os.environ["MASTER_ADDR"])


def open_engine(
    config: TrainConfig, folder: str, started: StartedEngines | None = None, *, share_weights: bool = False
) -> Engine:
    """Start the engine of a run on the model in a folder, or connect to the servers that have it."""
    length = longest_sequence(config, folder)
    if started is not None and started.urls:
        from moe_replay.engines.server.engine_processes import connect_local

        size = vocabulary_size(folder, trust_remote_code=config.model.trust_remote_code)
        return connect_local(started.urls, started.token, size, started.follow)
    request = start_request(config.rollout, config.model, folder, length)
    return start_engine(config.rollout.engine, replace(request, share_weights=share_weights))


def check_adapter(targets: Targets) -> None:
    """Raise for adapters that vLLM does not take."""
    if not targets.has_whole_experts:
        raise ConfigError(
            "rollout.lora: vLLM takes adapters of all projections of an expert, or of none",
            remedy="Add gate_proj, up_proj and down_proj (Mixtral: w1, w2, w3) to model.lora_target_modules, or set "
            "rollout.lora = false: the engine then gets merged weights",
        )


def lora_spec(model: ModelConfig, folder: str, *, is_server: bool = False) -> LoraSpec:
    """Return what an engine must know of the policy's adapter before it starts; raise for what vLLM cannot take.

    is_server   the engine runs elsewhere: its own start has shown what it can take
    """
    settings = read_config(folder, trust_remote_code=model.trust_remote_code)
    targets = targets_of(settings, model)
    check_adapter(targets)
    spec = LoraSpec(model.lora_rank, targets.engine_modules)
    if not is_server:
        from moe_replay.engines.vllm.lora import adapter_options

        adapter_options(spec)
    return spec


def start_request(rollout: RolloutConfig, model: ModelConfig, folder: str, max_length: int) -> StartRequest:
    return StartRequest(
        model=folder,
        max_length=max_length,
        dtype=rollout.dtype,
        router_family=model.router_family,
        trust_remote_code=model.trust_remote_code,
        max_sequences=rollout.sequences,
        sleep=rollout.sleep,
        sampling_mask=rollout.replays_sampling_mask,
        capture=rollout.capture,
        urls=rollout.urls,
        token=rollout.token,
        min_servers=rollout.min_servers,
        lora=lora_spec(model, folder, is_server=rollout.is_server) if rollout.lora else None,
        options=rollout.options,
    )
