"""What routing replay can do with the installed packages and this machine, with remedies for what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moe_replay.errors import UnsupportedRouterError
from moe_replay.megatron.weights import WEIGHT_MAPS
from moe_replay.megatron.weights.family import ADD_A_FAMILY
from moe_replay.rollout.registry import ENGINES
from moe_replay.rollout.vllm.release import INSTALL, NEWEST, OLDEST, RUN_ON, release_numbers
from moe_replay.routes.layer_rules import setting
from moe_replay.routes.router_families import ROUTER_FAMILIES
from moe_replay.routes.topology import MoeTopology, text_config
from moe_replay.tools.system_info import SystemInfo, plugin_packages
from moe_replay.utils.units import GIB

MIN_SHARED_BYTES = GIB // 2  # vLLM receives weights in shared-memory chunks of 256 MiB, and NCCL uses some too
MIN_DISK_BYTES = 10 * GIB


class Status(StrEnum):
    """OK: works. NOTE: absent, or works with something worth knowing. BROKEN: does not work."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    subject   e.g. "vllm"
    found     version or size; "none" if absent
    text      what follows for routing replay
    remedy    what to do; empty if nothing
    """

    subject: str
    status: Status
    found: str
    text: str
    remedy: str = ""


def diagnose(system: SystemInfo, needed: Iterable[str] = ()) -> list[Finding]:
    """Run every check; what is `needed` and absent is reported as broken."""
    findings = [check(system) for check in CHECKS]
    absent = {finding.subject for finding in findings if finding.found == "none"} & set(needed)
    return [
        Finding(one.subject, Status.BROKEN, one.found, one.text, one.remedy) if one.subject in absent else one
        for one in findings
    ]


def diagnose_model(config: Any, system: SystemInfo) -> Iterator[Finding]:
    """Check whether the routers of a model can be replayed, by which engines and on which trainers."""
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
        version, least = system.versions.get("vllm"), (0, 22)
        old = version is not None and numbers(version) < least
        yield Finding(
            "attention",
            Status.BROKEN if old else Status.NOTE,
            "hybrid",
            "several kinds of attention layers: vLLM captures their routes correctly from 0.22 on",
            "Use vLLM 0.30 or newer" if old else "",
        )


def _megatron_weights(model_type: str) -> Finding:
    known = model_type in WEIGHT_MAPS
    return Finding(
        "weight map",
        Status.OK if known else Status.NOTE,
        model_type if known else "none",
        f"checkpoints {'can' if known else 'cannot yet'} be loaded into Megatron-Core",
        "" if known else f"Built in: {', '.join(WEIGHT_MAPS)}; {ADD_A_FAMILY}",
    )


numbers = release_numbers


# ---- checks ----------------------------------------------------------------------------------------------------------


def _python(system: SystemInfo) -> Finding:
    if numbers(system.python) < (3, 11):
        return Finding("python", Status.BROKEN, system.python, "too old", "Use Python 3.11 or newer")
    return Finding("python", Status.OK, system.python, "supported")


def _torch(system: SystemInfo) -> Finding:
    version = system.versions.get("torch")
    if version is None or numbers(version) < (2, 6):
        return Finding("torch", Status.BROKEN, version or "none", "required, at least 2.6", "pip install 'torch>=2.6'")
    return Finding("torch", Status.OK, version, "supported")


def _transformers(system: SystemInfo) -> Finding:
    version = system.versions.get("transformers")
    install = "pip install 'moe-replay[transformers]'"
    if version is None:
        text = "no Transformers models, no Transformers engine, no `--model` here"
        return Finding("transformers", Status.NOTE, "none", text, install)
    if not (4, 57) <= numbers(version) < (6,):
        text = "routers are supported from 4.57 to 5.x"
        return Finding("transformers", Status.BROKEN, version, text, install)
    text = f"record and replay on {len(ROUTER_FAMILIES)} model types (docs/routers.md)"
    return Finding("transformers", Status.OK, version, text)


def _megatron(system: SystemInfo) -> Finding:
    version = system.versions.get("megatron-core")
    if version is None:
        text = "no training with tensor, pipeline, context or expert parallelism"
        return Finding("megatron-core", Status.NOTE, "none", text, "pip install 'moe-replay[megatron]'")
    if numbers(version) < (0, 12):
        text = "routers are supported from 0.12 on"
        return Finding("megatron-core", Status.BROKEN, version, text, "pip install 'moe-replay[megatron]'")
    hook = "router.router_replay" if numbers(version) >= (0, 16) else "their topk call"
    text = (
        f"replay through {hook}; weight maps of {', '.join(WEIGHT_MAPS)}; "
        "moe_router_fusion, capacity factors and CUDA graphs around routers are refused"
    )
    remedy = ""
    if numbers(version)[:2] > (0, 19):
        text, remedy = f"newer than the tested versions (0.12 to 0.19); {text}", "make test-megatron-versions"
    elif system.gpus and system.versions.get("transformer-engine") is None:
        text, remedy = (
            f"{text}; no context parallelism on GPUs without Transformer Engine",
            "Install transformer-engine",
        )
    return Finding("megatron-core", Status.NOTE if remedy else Status.OK, version, text, remedy)


def _vllm(system: SystemInfo) -> Finding:
    version = system.versions.get("vllm")
    if version is None:
        return Finding("vllm", Status.NOTE, "none", "no rollouts with vLLM here", "pip install 'moe-replay[vllm]'")
    release, on_cpu = numbers(version)[:2], not system.gpus
    if release < OLDEST:
        return Finding("vllm", Status.BROKEN, version, "refused at start: older than what was run", INSTALL)
    if release > NEWEST:
        return Finding("vllm", Status.NOTE, version, "newer than what was run (0.30 to 0.32)", INSTALL)
    run = f"{RUN_ON[release[0], release[1]]}; our capture of routes, or vLLM's own (rollout.capture)"
    if release == (0, 30):
        text = f"{run}; prefix caching may be on, pipeline parallelism is refused by vLLM"
        return Finding("vllm", Status.OK, version, text)
    text = f"{run}; Model Runner V2, which needs Triton, a GPU, and for vLLM's own capture prefix caching"
    if on_cpu or not system.triton:
        remedy = "Use vLLM 0.30, or a GPU with Triton"
        return Finding("vllm", Status.BROKEN, version, f"{text}; not available here", remedy)
    return Finding("vllm", Status.NOTE, version, text, "Leave enable_prefix_caching on")


def _sglang(system: SystemInfo) -> Finding:
    version = system.versions.get("sglang")
    if version is None:
        return Finding("sglang", Status.NOTE, "none", "servers on other machines can be used through the client")
    if numbers(version)[:3] == (0, 5, 23):
        return Finding("sglang", Status.OK, version, "rollouts with routes: --enable-return-routed-experts")
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
    version = system.versions.get("trl")
    if version is None:
        return Finding("trl", Status.NOTE, "none", "no training with TRL here")
    return Finding("trl", Status.OK, version, "GRPOTrainer with replay (docs/trl.md); 1.16 is tested")


def _ray(system: SystemInfo) -> Finding:
    version = system.versions.get("ray")
    if version is None:
        text, remedy = "no runs on a Ray cluster (cluster.kind = ray)", "pip install 'moe-replay[ray]'"
        return Finding("ray", Status.NOTE, "none", text, remedy)
    if numbers(version) < (2, 50):
        return Finding("ray", Status.BROKEN, version, "too old", "pip install 'ray>=2.50'")
    return Finding("ray", Status.OK, version, "runs on a Ray cluster (cluster.kind = ray)")


def _gpu(system: SystemInfo) -> Finding:
    if not system.gpus:
        return Finding(
            "gpu", Status.NOTE, "none", "everything runs, but slowly; Megatron-Core through moe_replay.megatron.cpu"
        )
    sizes = sorted({f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in system.gpus})
    return Finding("gpu", Status.OK, f"{len(system.gpus)} x {'; '.join(sizes)}", "visible to torch")


def _shared_memory(system: SystemInfo) -> Finding:
    free = system.shared_bytes
    if free is None:
        return Finding("shared memory", Status.NOTE, "none", "no /dev/shm, which NCCL and the workers of vLLM use")
    found = f"{free / GIB:.2f} GiB free"
    if free < MIN_SHARED_BYTES:
        text = "too small for NCCL and the workers of vLLM; engines hang or crash at start"
        remedy = "In a container: --shm-size=16g or --ipc=host"
        return Finding("shared memory", Status.BROKEN, found, text, remedy)
    return Finding("shared memory", Status.OK, found, "enough for NCCL and the workers of vLLM")


def _disk(system: SystemInfo) -> Finding:
    found = f"{system.disk_bytes / GIB:.1f} GiB free"
    if system.disk_bytes < MIN_DISK_BYTES:
        return Finding("disk", Status.NOTE, found, "little space for checkpoints and traces", "Choose another --folder")
    return Finding("disk", Status.OK, found, "for checkpoints and traces")


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
    _ray,
    _gpu,
    _shared_memory,
    _disk,
)
