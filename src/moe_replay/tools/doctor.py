"""What routing replay can do here, with what is installed, and what to do where it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moe_replay.errors import UnsupportedRouterError
from moe_replay.routes.layer_rules import setting
from moe_replay.routes.topology import MoeTopology, text_config
from moe_replay.tools.system_info import Surroundings

_GIB = 2**30
LEAST_SHARED = _GIB // 2  # weights travel to vLLM in shared chunks of 256 MiB, and NCCL wants some too
LEAST_DISK = 10 * _GIB


class Status(StrEnum):
    """How it is: works, works or is absent with something to know, or does not work."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    subject   what, e.g. "vllm"
    found     its version or size; "none" where it is absent
    text      what follows for routing replay
    remedy    what to do; empty where nothing needs to be done
    """

    subject: str
    status: Status
    found: str
    text: str
    remedy: str = ""


def diagnose(around: Surroundings, needed: Iterable[str] = ()) -> list[Finding]:
    """One finding for each thing; what is `needed` and absent is broken."""
    looked = [look(around) for look in LOOKS]
    absent = {finding.subject for finding in looked if finding.found == "none"} & set(needed)
    return [
        Finding(one.subject, Status.BROKEN, one.found, one.text, one.remedy) if one.subject in absent else one
        for one in looked
    ]


def diagnose_model(config: Any, around: Surroundings) -> Iterator[Finding]:
    """Whether the routers of a model can be replayed, and what else it asks for."""
    text = text_config(config)
    name = setting(text, "model_type") or type(text).__name__
    try:
        topology = MoeTopology.from_config(config)
    except UnsupportedRouterError as refused:
        yield Finding("model", Status.BROKEN, name, refused.problem, refused.remedy or "")
        return
    kinds = sorted({f"top {moe.top_k} of {moe.num_experts}" for moe in topology.moe_layers})
    layers = f"{len(topology.layers)} of {topology.num_layers} decoder layers route, {', '.join(kinds)}"
    yield Finding("model", Status.OK, name, f"its routers can be replayed on Transformers: {layers}")
    yield _megatron_weights(name)
    if len(set(setting(text, "layer_types") or ())) > 1:
        version, least = around.versions.get("vllm"), (0, 22)
        old = version is not None and numbers(version) < least
        yield Finding(
            "attention",
            Status.BROKEN if old else Status.NOTE,
            "hybrid",
            "layers with other kinds of attention: vLLM captures their routes rightly from 0.22 on",
            "Use vLLM 0.30 or newer" if old else "",
        )


def _megatron_weights(model_type: str) -> Finding:
    from moe_replay.megatron.weights import WEIGHT_MAPS

    known = model_type in WEIGHT_MAPS
    return Finding(
        "weight map",
        Status.OK if known else Status.NOTE,
        model_type if known else "none",
        f"checkpoints {'can' if known else 'cannot yet'} be loaded into Megatron-Core",
        "" if known else f"Known are {', '.join(WEIGHT_MAPS)}; docs/megatron-weights.md says how to add one",
    )


def numbers(version: str) -> tuple[int, ...]:
    """`0.30.1rc2+cpu` -> (0, 30, 1)."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0]))


# ---- one function for each thing that is looked at -------------------------------------------------------------------


def _python(around: Surroundings) -> Finding:
    if numbers(around.python) < (3, 11):
        return Finding("python", Status.BROKEN, around.python, "too old", "Use Python 3.11 or newer")
    return Finding("python", Status.OK, around.python, "as needed")


def _torch(around: Surroundings) -> Finding:
    version = around.versions.get("torch")
    if version is None or numbers(version) < (2, 6):
        return Finding("torch", Status.BROKEN, version or "none", "needed by everything", "pip install 'torch>=2.6'")
    return Finding("torch", Status.OK, version, "as needed")


def _transformers(around: Surroundings) -> Finding:
    version = around.versions.get("transformers")
    install = "pip install 'moe-replay[transformers]'"
    if version is None:
        text = "no models of Transformers, no Transformers engine, no `--model` here"
        return Finding("transformers", Status.NOTE, "none", text, install)
    if not (4, 57) <= numbers(version) < (6,):
        text = "routers are known from 4.57 up to 5"
        return Finding("transformers", Status.BROKEN, version, text, install)
    return Finding(
        "transformers", Status.OK, version, "record and replay on every family in docs/routers.md; as an engine"
    )


def _megatron(around: Surroundings) -> Finding:
    version = around.versions.get("megatron-core")
    if version is None:
        text = "no training with tensor, pipeline, context or expert parallelism"
        return Finding("megatron-core", Status.NOTE, "none", text, "pip install 'moe-replay[megatron]'")
    if numbers(version) < (0, 12):
        text = "routers are known from 0.12 on"
        return Finding("megatron-core", Status.BROKEN, version, text, "pip install 'moe-replay[megatron]'")
    way = "routers obey through router.router_replay" if numbers(version) >= (0, 16) else "routers obey at their top-k"
    text = f"{way}; moe_router_fusion, capacity factors and CUDA graphs around routers are refused"
    remedy = ""
    if numbers(version)[:2] > (0, 19):
        text, remedy = f"newer than what was tested (0.12 to 0.19); {text}", "make test-megatron-versions"
    elif around.gpus and around.versions.get("transformer-engine") is None:
        text, remedy = (
            f"{text}; no context parallelism on GPUs without Transformer Engine",
            "Install transformer-engine",
        )
    return Finding("megatron-core", Status.NOTE if remedy else Status.OK, version, text, remedy)


def _vllm(around: Surroundings) -> Finding:
    version = around.versions.get("vllm")
    if version is None:
        return Finding("vllm", Status.NOTE, "none", "no rollouts with vLLM here", "pip install 'moe-replay[vllm]'")
    release, on_cpu = numbers(version)[:2], not around.gpus
    use = "Use vLLM 0.30"
    if release < (0, 22):
        text = "captures of hybrid-attention models are wrong, and all-zero in some releases"
        return Finding("vllm", Status.BROKEN, version, text, use)
    if (0, 27) <= release <= (0, 29) and on_cpu:
        return Finding("vllm", Status.BROKEN, version, "did not start on a CPU", use)
    if release >= (0, 31):
        text = "routes come through Model Runner V2, which needs Triton and a GPU, and prefix caching on"
        if on_cpu or not around.triton:
            return Finding(
                "vllm", Status.BROKEN, version, f"{text}; it refuses them here", f"{use}, or a GPU with Triton"
            )
        return Finding("vllm", Status.NOTE, version, f"{text}; read, not tested", "Leave enable_prefix_caching on")
    if release == (0, 30):
        text = "rollouts with routes; pipeline parallelism is refused by vLLM, prefix caching may be on"
        return Finding("vllm", Status.OK, version, text)
    return Finding("vllm", Status.NOTE, version, "has the same interface as 0.30; read, not tested", use)


def _sglang(around: Surroundings) -> Finding:
    version = around.versions.get("sglang")
    if version is None:
        return Finding("sglang", Status.NOTE, "none", "its servers elsewhere can be used: only the client runs here")
    if numbers(version)[:3] == (0, 5, 23):
        return Finding("sglang", Status.OK, version, "rollouts with routes: --enable-return-routed-experts")
    return Finding("sglang", Status.NOTE, version, "0.5.23 is the one that is tested", "See docs/engines.md")


def _trl(around: Surroundings) -> Finding:
    version = around.versions.get("trl")
    if version is None:
        return Finding("trl", Status.NOTE, "none", "no training with TRL here")
    return Finding("trl", Status.OK, version, "knows nothing of routes by itself; 1.16 is the one that is tested")


def _gpu(around: Surroundings) -> Finding:
    if not around.gpus:
        return Finding(
            "gpu", Status.NOTE, "none", "everything runs, slowly; Megatron-Core through moe_replay.megatron.cpu"
        )
    sizes = sorted({f"{gpu.name}, {gpu.memory_bytes / _GIB:.0f} GiB" for gpu in around.gpus})
    return Finding("gpu", Status.OK, f"{len(around.gpus)} x {'; '.join(sizes)}", "as torch sees them")


def _shared_memory(around: Surroundings) -> Finding:
    free = around.shared_bytes
    if free is None:
        return Finding("shared memory", Status.NOTE, "none", "no /dev/shm: weights cannot be handed to vLLM in memory")
    found = f"{free / _GIB:.2f} GiB free"
    if free < LEAST_SHARED:
        text = "too little for weight updates and NCCL; engines hang or die at start"
        remedy = "In a container: --shm-size=16g or --ipc=host"
        return Finding("shared memory", Status.BROKEN, found, text, remedy)
    return Finding("shared memory", Status.OK, found, "enough for weight updates")


def _disk(around: Surroundings) -> Finding:
    found = f"{around.disk_bytes / _GIB:.1f} GiB free"
    if around.disk_bytes < LEAST_DISK:
        return Finding("disk", Status.NOTE, found, "little for checkpoints and traces", "Choose another --folder")
    return Finding("disk", Status.OK, found, "for checkpoints and traces")


LOOKS: tuple[Callable[[Surroundings], Finding], ...] = (
    _python,
    _torch,
    _transformers,
    _megatron,
    _vllm,
    _sglang,
    _trl,
    _gpu,
    _shared_memory,
    _disk,
)
