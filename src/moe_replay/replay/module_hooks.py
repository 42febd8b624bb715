"""Hooks on the modules around the decoder layers: they see a forward start and end, and its backward begin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_replay.replay.passes import ActivePass, ForwardPass


class ChunkHooks:
    """Hooks on the entry modules of one pipeline chunk.

    Their methods are bound, so that a deep copy of the model has hooks of its own.
    """

    def __init__(self, layers: tuple[int, ...], active: ActivePass) -> None:
        self.layers = layers
        self.active = active

    def register(self, module: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        """Register on a module: (the hook before its forward, the hook after it)."""
        return (
            module.register_forward_pre_hook(self.begin_forward, with_kwargs=True),
            module.register_forward_hook(self.end_forward),
        )

    def begin_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Start a forward of the open pass and check what it is fed."""
        compiling = torch.compiler.is_compiling()
        if not compiling and not self.active.begin_forward():
            return  # a recomputation inside a backward
        forward_pass = self.active.opened
        if forward_pass is None:
            return
        if not compiling:
            forward_pass.begin_chunk(self.layers)
        ids = _fed_token_ids(args, kwargs)
        if ids is None or forward_pass.fed_ids is not None:
            return
        forward_pass.set_fed_ids(ids)
        if not compiling:  # a compiled forward is checked when it has ended
            forward_pass.check_fed()

    def end_forward(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Hook the outputs, so that a backward that reaches them uses the pass of this forward."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        output_hook = _OutputHook(self.active, self.active.current)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(output_hook.on_backward)


class _OutputHook:
    """Hook on the outputs of one forward: autograd calls it before it goes back through that forward."""

    def __init__(self, active: ActivePass, forward_pass: ForwardPass | None) -> None:
        self.active = active
        self.forward_pass = forward_pass

    def on_backward(self, grad: torch.Tensor) -> None:
        self.active.enter_backward(self.forward_pass)


def _fed_token_ids(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
