"""Releases of vLLM: which have been run and on what, and what the installed one has of what is used here.

The versions say what is supported; what is used is looked for in the installed vLLM itself.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from moe_replay.errors import EngineError, EngineName, MissingExtraError

OLDEST, NEWEST = (0, 30), (0, 32)
RUN_ON: dict[tuple[int, int], str] = {
    (0, 30): "run on CPU (float32) and on one NVIDIA H200 (bfloat16 and float32)",
    (0, 31): "run on CPU (float32)",
    (0, 32): "run on one NVIDIA H200 (bfloat16 and float32) and on CPU (float32)",
}
"""Supported releases, and the hardware on which each has been run."""
WORKING_VERSIONS = "0.30 to 0.32; docs/engines.md says what was run on which hardware"
INSTALL = "pip install 'vllm>=0.30,<0.33'"

_ARGUMENTS = ("enable_return_routed_experts", "logprobs_mode", "worker_extension_cls", "skip_tokenizer_init")
_USED = (
    "vllm.exceptions:VLLMClientError",
    "vllm.v1.engine.exceptions:EngineDeadError",
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload",
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload",
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info",
    "vllm.model_executor.layers.attention:is_deferred_attention_layer",
)
_USED_BY_OUR_CAPTURE = (
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer:RoutedExpertsCapturer",
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer:bind_routed_experts_capturer",
    "vllm.model_executor.layers.fused_moe.layer:MoERunner",
    "vllm.v1.kv_cache_interface:is_full_attention_spec",
)


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """One release of vLLM, as it is installed.

    lacks               engine arguments and names that every engine uses, and this release does not have
    lacks_for_capture   names that our capture of routes uses, and this release does not have
    """

    version: str
    lacks: tuple[str, ...] = ()
    lacks_for_capture: tuple[str, ...] = ()

    @classmethod
    def installed(cls) -> VllmRelease:
        """Look at the installed vLLM; raise if there is none."""
        try:
            import vllm
        except ImportError as missing:
            raise MissingExtraError(
                "vLLM is not installed",
                expected=f"vLLM {WORKING_VERSIONS}",
                remedy="pip install 'moe-replay[vllm]'; on CPU see requirements/test.txt",
            ) from missing
        return cls(vllm.__version__, tuple(_missing_arguments()), tuple(missing_names(_USED_BY_OUR_CAPTURE)))

    @property
    def name(self) -> EngineName:
        """Name and version, for labels and errors."""
        return EngineName("vLLM", self.version)

    def check(self) -> None:
        """Raise unless engines of this release can be used."""
        check_version(self.version)
        if self.lacks:
            cannot = "return routes" if _ARGUMENTS[0] in self.lacks else "be used"
            raise EngineError(
                f"{self.name} cannot {cannot}",
                expected=f"vLLM {WORKING_VERSIONS}",
                found=f"{self.version} without {', '.join(self.lacks)}",
                remedy=INSTALL,
            )


def check_version(version: str, where: str = "") -> None:
    """Raise for a release that is too old, here or on a server; a newer one than was run is not refused."""
    numbers = release_numbers(version)
    if numbers and numbers < OLDEST:
        raise EngineError(
            f"vLLM {version}{where} cannot be used for rollouts with routes",
            expected=f"vLLM {WORKING_VERSIONS}",
            found=version,
            remedy=f"{INSTALL}" + (" there" if where else ""),
        )


def release_numbers(version: str) -> tuple[int, ...]:
    """Parse a version: `0.30.1rc2+cpu` is (0, 30, 1); empty if it begins with no number."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[a-z+-]", version)[0]))


def missing_names(used: Sequence[str]) -> Iterator[str]:
    """Yield those of these `module:name` that cannot be imported."""
    for path in used:
        module, _, name = path.partition(":")
        try:
            found = hasattr(import_module(module), name)
        except ImportError:
            found = False
        if not found:
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
