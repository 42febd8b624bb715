"""Supported vLLM releases, the features that the installed one has, and the route capture that it can use.

Versions say what was tested; whether a feature is there is looked up in the installed vLLM itself. Settings are checked
with this module, so it imports neither torch nor vLLM at the top.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from moe_replay.engines.base import OLD_CAPTURE_NAMES, Capture
from moe_replay.errors import EngineError, EngineName, EngineOptionError, MissingExtraError
from moe_replay.utils.tested_versions import TESTED, is_newer, release_numbers

if TYPE_CHECKING:
    from moe_replay.records import SamplingParams

OLDEST, NEWEST = TESTED["vllm"]
RUN_ON: dict[tuple[int, int], str] = {
    (0, 30): "run on CPU (float32) and on one NVIDIA H200 (bfloat16 and float32)",
    (0, 31): "run on CPU (float32)",
    (0, 32): "run on one NVIDIA H200 (bfloat16 and float32) and on CPU (float32)",
    (0, 33): "run on one NVIDIA H200 (bfloat16 and float32)",
}
"""Supported releases, and the hardware on which each has been run."""
WORKING_VERSIONS = "0.30 to 0.33, or newer with a self-test; docs/engines.md says what was run on which hardware"
INSTALL = "pip install 'vllm>=0.30,<0.34'"
"""Installs a tested release; the extra has no upper bound."""

_ARGUMENTS = ("enable_return_routed_experts", "logprobs_mode", "worker_extension_cls", "skip_tokenizer_init")
_USED = (
    "vllm.exceptions:VLLMClientError",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "vllm.model_executor.layers.attention:is_deferred_attention_layer",
)
_USED_BY_SLOT_CAPTURE = (
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer",
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer:bind_routed_experts_capturer",
    "vllm.model_executor.layers.fused_moe.layer:MoERunner",
    "vllm.v1.kv_cache_interface:is_full_attention_spec",
)
_INCOMPATIBLE_WITH_SLOT_CAPTURE = {
    "worker_cls": "a custom worker class",
    "pipeline_parallel_size": "pipeline parallelism",
    "decode_context_parallel_size": "context parallelism",
    "prefill_context_parallel_size": "context parallelism",
    "kv_transfer_config": "a KV connector",
    "kv_offloading_size": "KV offloading",
    "enable_dbo": "dual-batch overlap",
}
_MULTI_NODE_OPTIONS = (
    "data_parallel_rank",
    "data_parallel_start_rank",
    "data_parallel_size_local",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
    "data_parallel_multi_port_external_lb",
    "data_parallel_backend",
)
"""Options for data-parallel replicas on several machines."""


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """The installed vLLM.

    missing               engine arguments and names that every engine needs and this release does not have
    missing_for_capture   names that capture by KV slot needs and this release does not have
    """

    version: str
    missing: tuple[str, ...] = ()
    missing_for_capture: tuple[str, ...] = ()

    @classmethod
    def installed(cls) -> VllmRelease:
        """Inspect the installed vLLM; raise if there is none."""
        try:
            import vllm
        except ImportError as error:
            raise MissingExtraError(
                "vLLM is not installed",
                expected=f"vLLM {WORKING_VERSIONS}",
                remedy="pip install 'moe-replay[vllm]'; on CPU see requirements/test.txt",
            ) from error
        return cls(vllm.__version__, tuple(_missing_arguments()), tuple(missing_names(_USED_BY_SLOT_CAPTURE)))

    @property
    def name(self) -> EngineName:
        """Name and version, for labels and errors."""
        return EngineName("vLLM", self.version)

    @property
    def is_newer(self) -> bool:
        """Whether it is newer than any release that was tested."""
        return is_newer("vllm", self.version)

    def check(self) -> None:
        """Raise unless engines of this release can be used."""
        check_version(self.version)
        if self.missing:
            cannot = "return routes" if _ARGUMENTS[0] in self.missing else "be used"
            raise EngineError(
                f"{self.name} cannot {cannot}",
                expected=f"vLLM {WORKING_VERSIONS}",
                found=f"{self.version} without {', '.join(self.missing)}",
                remedy=INSTALL,
            )


def check_version(version: str, where: str = "") -> None:
    """Raise for a release that is too old, here or on a server; one newer than those tested is not refused."""
    numbers = release_numbers(version)
    if numbers and numbers < OLDEST:
        raise EngineError(
            f"vLLM {version}{where} cannot be used for rollouts with routes",
            expected=f"vLLM {WORKING_VERSIONS}",
            found=version,
            remedy=f"{INSTALL}" + (" there" if where else ""),
        )


def missing_names(paths: Sequence[str]) -> Iterator[str]:
    """Yield those of these `module:name` that cannot be imported."""
    for path in paths:
        module, _, name = path.partition(":")
        try:
            exists = hasattr(import_module(module), name)
        except ImportError:
            exists = False
        if not exists:
            yield path


def _missing_arguments() -> Iterator[str]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    yield from (name for name in _ARGUMENTS if name not in fields)
    yield from missing_names(_USED)


def returns_routes(vllm_config: Any) -> bool:
    """Whether vLLM's own capture is on, in a config of 0.30 or in one of 0.31 and later, which moved the setting."""
    settings = getattr(vllm_config, "aux_output_config", None) or vllm_config.model_config
    return bool(settings.enable_return_routed_experts)


def chosen_capture(
    capture: str, options: Mapping[str, Any], missing: Sequence[str] = ()
) -> Literal["kv_slot", "vllm", "cross_check"]:
    """Return which capture records routes in an engine with these options.

    missing   names that capture by KV slot needs and the installed vLLM does not have
    """
    if capture not in get_args(Capture):
        new_name = OLD_CAPTURE_NAMES.get(capture)
        raise EngineOptionError(
            "unknown route capture",
            expected=", ".join(get_args(Capture)),
            found=capture,
            remedy=f'"{capture}" is now "{new_name}"' if new_name else None,
        )
    obstacles = [
        feature
        for name, feature in _INCOMPATIBLE_WITH_SLOT_CAPTURE.items()
        if options.get(name) not in (None, False, 0, 1, "auto")
    ]
    obstacles += [f"a vLLM without {name}" for name in missing]
    if capture in ("auto", "checked"):
        return "vllm" if obstacles else "kv_slot"
    if capture != "vllm" and obstacles:
        raise EngineOptionError(
            f"capture {capture!r} cannot be used with {', '.join(obstacles)}",
            remedy='Use capture "auto" or "vllm", or leave that option out; vLLM 0.30 to 0.33 have all it needs',
        )
    return capture  # type: ignore[return-value]


def check_options(capture: str, options: Mapping[str, Any]) -> None:
    """Raise for options that no engine here takes, whatever vLLM is installed."""
    multi_node = sorted(name for name in _MULTI_NODE_OPTIONS if options.get(name) not in (None, False, "mp"))
    if multi_node:
        raise EngineOptionError(
            "the replicas of a vLLM engine all run on one machine and start with it",
            found=", ".join(multi_node),
            remedy="Set data_parallel_size alone, and start an engine on each machine",
        )
    if options.get("enable_eplb"):
        raise EngineOptionError(
            "vLLM with an expert load balancer (EPLB) moves experts between its workers, and a weight update "
            "would write each expert to where it was at the start",
            remedy="Leave enable_eplb out",
        )
    chosen_capture(capture, options)


def check_no_seed(params: SamplingParams, engine: str) -> None:
    """Raise for a seed: on CPU with chunked prefill vLLM cannot rewind a request's generator, and crashes."""
    if params.seed is not None and params.temperature > 0:
        raise EngineError(
            f"{engine} on CPU cannot sample with a seed and chunked prefill",
            found=f"seed {params.seed}",
            remedy="Start it with enable_chunked_prefill=False (--no-enable-chunked-prefill), or sample without seeds",
        )


def option_names() -> set[str]:
    """Return the options of the installed vLLM, from its source: importing it takes seconds."""
    package = find_spec("vllm")
    assert package is not None, "called only where it is installed"
    (folder, *_) = package.submodule_search_locations or [""]
    source = Path(folder, "engine", "arg_utils.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields = [node for class_ in classes if class_.name in ("EngineArgs", "AsyncEngineArgs") for node in class_.body]
    return {node.target.id for node in fields if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}


def on_cpu() -> bool:
    """Whether the installed vLLM computes on CPUs."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
