"""Engines that quantise the weights they are given while loading them: vLLM's online quantisation.

The trainer stays in bfloat16; every update of the weights is quantised again. Routers are left as they are: they are a
thousandth of the weights, and rounding them changes which experts are chosen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROUTERS = r"re:.*\.(gate|router)$"
"""Names of routers in vLLM's models, as its setting `ignore` takes them."""
_FP8 = "fp8_per_tensor"  # what "fp8" meant for such checkpoints before vLLM 0.31


def quantization_options(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's options for quantisation while loading; none if the caller asks for none or has set all of them."""
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    wanted = options.get("quantization")
    if wanted == "fp8" and not _is_quantised(model):
        wanted = _FP8
    if wanted not in ONLINE_QUANT_SHORTHAND_NAMES or options.get("quantization_config"):
        return {}
    return {"quantization": wanted, "quantization_config": {"ignore": [ROUTERS]}}


def _is_quantised(model: str) -> bool:
    """Whether the weights on disk are quantised: then vLLM reads how from the same file."""
    config = Path(model) / "config.json"
    return config.is_file() and "quantization_config" in json.loads(config.read_text(encoding="utf-8"))
