"""The rollout engine of a run, from its configuration."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from moe_replay.distributed.ranks import all_gather_text, from_rank_0, raise_on_all_ranks, world_size
from moe_replay.rollout.engine import Engine, LoraSpec, StartRequest
from moe_replay.rollout.model_folder import read_config
from moe_replay.rollout.registry import start_engine
from moe_replay.train.backends.lora_targets import Targets, targets_of
from moe_replay.train.config.keys import ConfigError
from moe_replay.train.config.sections import ModelConfig, RolloutConfig
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.config.weights_section import WeightsConfig


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
        ...


@contextmanager
def engines_of_all_nodes(
    config: TrainConfig, folder: str, starter: EngineStarter | None = None
) -> Iterator[StartedEngines]:
    """Start `rollout.engines_per_node` engines on each machine; they end with this context. All ranks call it.

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
        yield StartedEngines()
        return
    from moe_replay.rollout.server.engine_processes import EngineProcesses

    token = from_rank_0(lambda: secrets.token_urlsafe(32), "making a token")
    address, processes = _address(), None
    with raise_on_all_ranks("starting the rollout engines"):
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            request = start_request(config.rollout, config.model, folder, longest_sequence(config, folder))
            host = "127.0.0.1" if address == "127.0.0.1" else "0.0.0.0"
            processes = EngineProcesses(config.rollout.engine, request, count, token=token, host=host)
    try:
        own = [] if processes is None else [f"http://{address}:{port}" for port in processes.ports]
        yield StartedEngines(tuple(url for urls in all_gather_text(json.dumps(own)) for url in json.loads(urls)), token)
    finally:
        if processes is not None:
            processes.close()


def _address() -> str:
    """Return the address of this machine as the others of the run reach it; the loopback if there are no others."""
    if int(os.environ.get("LOCAL_WORLD_SIZE", world_size())) == world_size():
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # sends nothing: it only picks the route
        return probe.getsockname()[0]


def open_engine(config: TrainConfig, folder: str, started: StartedEngines | None = None) -> Engine:
    """Start the engine of a run on the model in a folder, or connect to the servers that have it."""
    length = longest_sequence(config, folder)
    if started is not None and started.urls:
        from moe_replay.rollout.server.engine_processes import connect_local

        size = vocabulary_size(folder, trust_remote_code=config.model.trust_remote_code)
        pool = connect_local(started.urls, started.token, size, started.follow)
        return _sending_changes(pool, config.weights)
    request = start_request(config.rollout, config.model, folder, length)
    return _sending_changes(start_engine(config.rollout.engine, request), config.weights)


def _sending_changes(engine: Engine, weights: WeightsConfig) -> Engine:
    """Have servers sent what has changed alone, with `weights.delta`."""
    if weights.delta:
        pool: Any = engine  # as the checks of the configuration require
        pool.send_changes(weights.full_every)
    return engine


def check_adapter(targets: Targets) -> None:
    """Raise for adapters that vLLM does not take."""
    if not targets.has_whole_experts:
        raise ConfigError(
            "rollout.lora: vLLM takes adapters of all projections of an expert, or of none",
            remedy="Add gate_proj, up_proj and down_proj (Mixtral: w1, w2, w3) to model.lora_targets, or set "
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
        from moe_replay.rollout.vllm.adapter import adapter_options

        adapter_options(spec)
    return spec


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
        capture=rollout.capture,
        urls=rollout.urls,
        token=rollout.token,
        min_servers=rollout.min_servers,
        lora=lora_spec(model, folder, is_server=rollout.is_server) if rollout.lora else None,
        options=rollout.options,
    )
