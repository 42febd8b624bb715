"""What is checked before a model is downloaded, made or loaded: names, packages, engine, rewards and data.

A run raises the first problem; the dry run lists all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

from moe_replay.errors import MissingExtraError, MoeReplayError
from moe_replay.rollout.registry import engine_spec
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.data import read_rows
from moe_replay.train.inputs import ReadData, check_names, check_reward_columns, load_rewards
from moe_replay.train.rewards import REWARDS
from moe_replay.train.sinks.registry import load_sink
from moe_replay.utils.plugins import import_path, required_packages


class Need(NamedTuple):
    """A package that a setting needs: its module, and the extra that installs it; empty: none does."""

    setting: str
    module: str
    extra: str


def check_config(config: TrainConfig, *, starts_engine: bool = True) -> ReadData:
    """Raise the first problem of a configuration on this machine; return the data, which has been read for it.

    starts_engine   whether the run starts the engine that it names; otherwise its caller has one
    """
    check_packages(config, starts_engine=starts_engine)
    check_names(config)
    if starts_engine:
        check_shares(config)
    return read_data(config)


def find_problems(config: TrainConfig) -> list[MoeReplayError]:
    """Return every problem of a configuration on this machine."""
    found = []
    for check in (check_packages, check_names, check_shares, read_data):
        try:
            check(config)
        except MoeReplayError as problem:
            found.append(problem)
    return found


# ---- packages and engine ---------------------------------------------------------------------------------------------


def needed_packages(config: TrainConfig, *, starts_engine: bool = True) -> Iterator[Need]:
    """Yield the optional packages that a configuration needs on this machine."""
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
    if config.cluster.kind == "ray":
        yield Need('cluster.kind = "ray"', "ray", "ray")
    if starts_engine and (config.starts_servers or spec.is_server):
        yield from (Need("a rollout server", module, "train") for module in ("httpx", "tenacity"))
    for name in config.reward.functions:
        for package in required_packages(REWARDS.get(name)):
            yield Need(f"the reward {name!r}", package, "train")


def check_packages(config: TrainConfig, *, starts_engine: bool = True) -> None:
    """Raise for a package that is not installed, and for a release of the engine that cannot be used."""
    missing = [need for need in needed_packages(config, starts_engine=starts_engine) if find_spec(need.module) is None]
    if missing:
        extras = sorted({need.extra for need in missing if need.extra})
        sources = sorted({need.module for need in missing if not need.extra})
        if extras:
            sources.insert(0, f"'moe-replay[{','.join(extras)}]'")
        on_cpu = "; on a CPU see docs/install.md" if "vllm" in extras else ""
        raise MissingExtraError(
            "; ".join(f"{need.setting} needs the package {need.module}" for need in missing),
            remedy=f"pip install {' '.join(sources)}{on_cpu}",
        )
    for name in config.log.enabled_sinks:
        load_sink(name)
    spec = engine_spec(config.rollout.engine)
    if starts_engine and spec.check_version:
        try:
            installed_version = version(spec.package)
        except PackageNotFoundError:
            return  # run from its sources: its engine says whether it can be used
        import_path(spec.check_version, kind="check", key="rollout.engine")(installed_version)


def check_shares(config: TrainConfig) -> None:
    """Raise if `rollout.engines_per_node` engines do not use the GPUs of this machine evenly, if it has any."""
    count = config.rollout.engines_per_node
    if count is not None and not config.cluster.starts_engines:
        from moe_replay.rollout.server.engine_processes import device_shares

        device_shares(count, config.rollout.options)


# ---- data ------------------------------------------------------------------------------------------------------------


def read_data(config: TrainConfig) -> ReadData:
    """Read the data that the configuration names; raise if it lacks a column that a reward function takes."""
    data, rewards = config.data, load_rewards(config)
    if not data.path:
        return ReadData()
    rows, eval_rows = read_rows(data.path, data.subset, data.split), None
    check_reward_columns(rewards, rows)
    if config.eval.every and data.eval_path:
        eval_rows = read_rows(data.eval_path, data.subset, data.eval_split or data.split)
        check_reward_columns(rewards, eval_rows)
    return ReadData(rows, eval_rows)
