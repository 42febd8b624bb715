"""Weights that a model of vLLM copies into its parameters itself, past their loaders: gpt-oss, experts and sinks.

During an update vLLM's parameters are placeholders without memory, which their loaders replace. A copy into such a
placeholder goes nowhere, without an error. Here those modules get memory before the copy, and are converted to the
layout of the kernels as soon as all of their parameters have been copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

_LAYER = re.compile(r"\blayers\.\d+\.")


class CopiedWeights:
    """The modules of a model that are loaded in this way; none for most models."""

    def __init__(self, model: nn.Module) -> None:
        self._waiting: dict[str, Any] = {}
        self._loaded: set[str] = set()
        if type(model).__name__.startswith("GptOss"):
            self._waiting = {name: module for name, module in model.named_modules() if _copies(module)}

    def expect(self, names: Iterable[str]) -> None:
        """Give memory to the modules of all decoder layers that tensors of these names belong to."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        layers = {found[0] for name in names if (found := _LAYER.search(name))}
        for name, module in self._waiting.items():
            if (found := _LAYER.search(name)) and found[0] in layers:
                materialize_layer(module, get_layerwise_info(module))

    def process(self, loaded: Iterable[str] | None) -> None:
        """Convert the modules whose parameters have all been loaded by now, under these names of the model."""
        from vllm.model_executor.model_loader.reload.layerwise import _layerwise_process, get_layerwise_info

        if not self._waiting:
            return
        self._loaded.update(loaded or ())
        for name, module in list(self._waiting.items()):
            if {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)} <= self._loaded:
                _layerwise_process(module, get_layerwise_info(module))
                del self._waiting[name]


def _copies(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "sinks" in own or "w13_weight" in own
