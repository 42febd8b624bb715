"""Checks before a model is downloaded, built or loaded: names, packages, engine, rewards and data.

A run raises the first problem; the dry run lists all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch

from moe_replay.engines.base import Engine, check_interface, devices_per_engine
from moe_replay.engines.registry import check_option_names, engine_spec
from moe_replay.errors import EngineOptionError, MissingExtraError, MoeReplayError
from moe_replay.train.config.registries import REWARDS, WEIGHT_TRANSPORTS
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.output.run_folder import check_run_folder
from moe_replay.train.output.sinks import load_sink
from moe_replay.train.rollout.prompts import Chat, Rows, Tokenizer, load_prompts, read_rows
from moe_replay.train.rollout.rewards import Reward
from moe_replay.train.rollout.tools import load_tools
from moe_replay.train.setup.engines import vocabulary_size
from moe_replay.train.setup.inputs import ReadData, check_reward_columns, load_rewards, name_checks
from moe_replay.train.setup.launch import device_kind
from moe_replay.train.setup.sources import check_weight_files, load_tokenizer
from moe_replay.utils.device import accelerator
from moe_replay.utils.plugins import import_path, required_packages, resolve
from moe_replay.utils.tested_versions import check_megatron_trainer
from moe_replay.weights.transfer import Receivers
from moe_replay.weights.transports import choose_transport

FIRST_ROWS = 256
"""Rows of the data that a dry run renders."""


class Need(NamedTuple):
    """A package that a setting needs: its module, and the extra that installs it; empty: none does."""

    setting: str
    module: str
    extra: str


def check_config(config: TrainConfig, engine: Engine | None = None) -> ReadData:
    """Raise the first problem of a configuration on this machine; return the data, which has been read for it.

    engine   used in place of the one that the configuration names
    """
    check_packages(config, starts_engine=engine is None)
    for check in name_checks(config):
        check()
    if engine is None:
        check_engine(config)
    else:
        check_interface(engine, Engine, f"the engine {type(engine).__name__}")
    check_folders(config)
    return read_data(config)


class Problems(list[MoeReplayError]):
    """Errors of several checks, each text once."""

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Add the error that ends this context, if it is one of ours."""
        try:
            yield
        except MoeReplayError as problem:
            if str(problem) not in map(str, self):
                self.append(problem)


def find_problems(config: TrainConfig) -> Problems:
    """Return every problem that would stop a run on this machine before its model is loaded."""
    checks: list[Callable[[], object]] = [partial(check_packages, config), *name_checks(config)]
    checks += [partial(check, config) for check in (check_engine, check_folders, check_run_folder)]
    if config.cluster.launcher == "torchrun":
        checks += [partial(device_kind, config), partial(check_transport, config)]
    problems = Problems()
    for check in checks:
        with problems.collected():
            check()
    rewards, tokenizer = list[Reward](), None
    with problems.collected():
        rewards = load_rewards(config)
    with problems.collected():
        if config.model.path and Path(config.model.path).is_dir():
            tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    for path, split in _data_sources(config):
        with problems.collected():
            rows = read_rows(path, config.data.subset, split, config.data.columns)
            with problems.collected():
                check_reward_columns(rewards, rows)
            if tokenizer is not None:
                check_prompts(config, rows, tokenizer)
    return problems


# ---- packages and engine ---------------------------------------------------------------------------------------------


def needed_packages(config: TrainConfig, *, starts_engine: bool = True) -> Iterator[Need]:
    rollout, spec = config.rollout, engine_spec(config.rollout.engine)
    yield Need("training", "transformers", "train")
    if config.model.lora_rank and config.backend.kind == "fsdp":
        yield Need("model.lora_rank", "peft", "lora")
    if config.backend.kind == "megatron":
        yield Need('backend.kind = "megatron"', "megatron", "megatron")
    if starts_engine and spec.package:
        yield Need(f'rollout.engine = "{rollout.engine}"', spec.package, spec.extra)
    if config.starts_servers:
        key = "cluster.engines" if config.cluster.starts_engines else "rollout.engines_per_node"
        yield from (Need(key, module, "serve") for module in ("starlette", "uvicorn"))
    if config.cluster.launcher == "ray":
        yield Need('cluster.launcher = "ray"', "ray", "ray")
    if starts_engine and (config.starts_servers or spec.is_server):
        yield from (Need("a rollout server", module, "train") for module in ("httpx", "tenacity"))
    for name in REWARDS.keys() & set(config.reward.functions):
        reward = resolve(name, REWARDS, kind="reward", key="reward.functions")
        for package in required_packages(reward):
            yield Need(f"the reward {name!r}", package, "train")


def check_packages(config: TrainConfig, *, starts_engine: bool = True) -> None:
    """Raise for missing packages and unsupported engine versions."""
    missing = [need for need in needed_packages(config, starts_engine=starts_engine) if find_spec(need.module) is None]
    if missing:
        extras = sorted({need.extra for need in missing if need.extra})
        sources = sorted({need.module for need in missing if not need.extra})
        if extras:
            sources.insert(0, f"'moe-replay[{','.join(extras)}]'")
        on_cpu = "; on a CPU see docs/first-run.md#install" if "vllm" in extras else ""
        raise MissingExtraError(
            "; ".join(f"{need.setting} needs the package {need.module}" for need in missing),
            remedy=f"pip install {' '.join(sources)}{on_cpu}",
        )
    if config.backend.kind == "megatron":
        check_megatron_trainer()
    for name in config.log.enabled_sinks:
        load_sink(name)
    spec = engine_spec(config.rollout.engine)
    if starts_engine and spec.check_version:
        try:
            installed_version = version(spec.package)
        except PackageNotFoundError:
            return  # run from its sources: its engine says whether it can be used
        import_path(spec.check_version, kind="check", key="rollout.engine")(installed_version)


def check_engine(config: TrainConfig) -> None:
    """Raise for engine options that are unknown, or that do not fit the GPUs of this machine, if it has any."""
    rollout, spec = config.rollout, engine_spec(config.rollout.engine)
    if not spec.package or find_spec(spec.package) is not None:
        check_option_names(rollout.engine, rollout.options)
    if config.cluster.starts_engines or spec.is_server:
        return
    if rollout.engines_per_node is not None:
        from moe_replay.engines.server.engine_processes import device_shares

        device_shares(rollout.engines_per_node, rollout.options)
        return
    needed, present = devices_per_engine(rollout.options), torch.accelerator.device_count()
    if accelerator() is not None and needed > present:
        raise EngineOptionError(
            "rollout.options: the engine needs more devices than this machine has",
            expected=f"at most {present}",
            found=f"{needed}, the product of its parallel sizes",
        )


def check_transport(config: TrainConfig) -> None:
    """Raise if an engine in the process of rank 0 cannot be sent weights by the configured transport."""
    name = config.weight_sync.transport
    if name not in WEIGHT_TRANSPORTS or config.starts_servers or engine_spec(config.rollout.engine).is_server:
        return
    trainer, engine = device_kind(config), accelerator() or "cpu"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = devices_per_engine(config.rollout.options)
    ids = [f"{engine}:{number if engine != 'cpu' else 0}" for number in range(workers)]
    choose_transport(
        name, trainer, {f"{trainer}:{number}" for number in range(ranks)}, {"": Receivers(engine, tuple(ids))}
    )


# ---- folders and data ------------------------------------------------------------------------------------------------


def check_folders(config: TrainConfig) -> None:
    """Raise if the folder of the model or of the reference has no weights; names on the Hub are not looked up."""
    if config.model.path and Path(config.model.path).is_dir():
        check_weight_files(config.model.path, "model.path")
    if config.model.reference is not None and config.algorithm.beta > 0:
        check_weight_files(config.model.reference, "model.reference")


def check_prompts(config: TrainConfig, rows: Rows, tokenizer: Tokenizer) -> None:
    """Raise if the first rows cannot be made prompts of the model."""
    tools = load_tools(config.rollout.tools, config.rollout.tool_format)
    first = Rows(rows[:FIRST_ROWS], rows.source, rows.lines)
    longest = min(config.data.max_prompt_length, config.max_length - 1)
    load_prompts(
        first,
        tokenizer,
        longest if len(first) == len(rows) else sys.maxsize,  # later rows may be shorter
        vocabulary_size(config.model.path, trust_remote_code=config.model.trust_remote_code),
        None if tools is None else tools.schemas,
        Chat(config.data.chat_template, config.data.system),
    )


def read_data(config: TrainConfig) -> ReadData:
    """Read the data that the configuration names; raise if it lacks a column that a reward function takes."""
    rewards, read = load_rewards(config), []
    for path, split in _data_sources(config):
        read.append(read_rows(path, config.data.subset, split, config.data.columns))
        check_reward_columns(rewards, read[-1])
    return ReadData(*read)


def _data_sources(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield path and split of the prompts, then of the evaluation prompts; nothing for the embedded default."""
    data = config.data
    if data.path:
        yield data.path, data.split
        if config.eval.every and data.eval_path:
            yield data.eval_path, data.eval_split or data.split
