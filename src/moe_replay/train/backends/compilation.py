"""Decoder layers compiled one by one, for every length of micro-batch; eager where the compiler fails.

All layers of a kind share their graphs: one for passes with gradients, recomputations included, and one without. Only
a layer's forward is compiled: hooks of FSDP2, replay and checkpointing stay outside, and routers run eagerly between
two graphs. torch keeps compiled code on disk for later runs (TORCHINDUCTOR_CACHE_DIR).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

COMPILER = "inductor"
"""Backend of `torch.compile`."""
MAX_GRAPHS = 64
"""Graphs of one layer's code: with and without gradients, shared prompts, recomputation, every kind of layer. Past
torch's own limit of 8 the layer would run eagerly in silence."""


class CompiledLayers:
    """The compiled layers of the models of one backend.

    compiler  backend of `torch.compile`
    is_used   whether any layer is to be compiled
    failure   why layers run eagerly although they were to be compiled; None: they do not
    """

    def __init__(self, compiler: str | Callable[..., Any] | None = None) -> None:
        self.is_used = False
        self.failure: str | None = None
        self._compiler = compiler or COMPILER
        self._is_off = False
        self._reported = 0

    def add(self, layers: Iterable[nn.Module]) -> None:
        """Compile layers when they are first called."""
        self.is_used = True
        for layer in layers:
            layer.forward = _Forward(self, layer.forward, self._compiler)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is compiled when it is first called, and runs eagerly when layers do."""
        self.is_used = True
        return _Forward(self, function, self._compiler)

    @property
    def runs_eagerly(self) -> bool:
        """Whether calls go to the layers' own code now."""
        return self._is_off or self.failure is not None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run all layers eagerly, e.g. to compare."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def fail(self, error: Exception) -> None:
        """Run layers eagerly from now on, and say why."""
        self.failure = " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])
        logger.warning("layers cannot be compiled and run eagerly (model.compile): %s", self.failure)

    @contextmanager
    def counted(self, purpose: str) -> Iterator[None]:
        """Log the graphs that a pass has compiled, if there are any."""
        if not self.is_used:
            yield
            return
        began = time.monotonic()
        yield
        graphs = graphs_compiled()
        if graphs > self._reported:
            seconds = time.monotonic() - began
            logger.info("%s compiled %d graphs in %.0f s", purpose, graphs - self._reported, seconds)
        self._reported = graphs


def graphs_compiled() -> int:
    """Return the number of graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


class _Forward:
    """The forward of one layer: compiled, or the layer's own."""

    def __init__(self, layers: CompiledLayers, native: Callable[..., Any], compiler: Any) -> None:
        limits = torch._dynamo.config
        limits.cache_size_limit = max(limits.cache_size_limit, MAX_GRAPHS)  # its name in torch 2.6, an alias since
        self._layers, self._native = layers, native
        self._compiled = torch.compile(native, backend=compiler, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # of the compiler, not of the code that it has compiled

        if self._layers.runs_eagerly:
            return self._native(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self._layers.fail(error)
            return self._native(*args, **kwargs)
