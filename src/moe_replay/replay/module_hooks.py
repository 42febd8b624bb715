"""Hooks on the modules of a model: they see a forward start and end, and tie its backward to its pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from moe_replay.replay.active import ActivePass
from moe_replay.replay.passes import ForwardPass
from moe_replay.replay.site import Chunk


def register_hooks(chunk: Chunk, active: ActivePass) -> list[RemovableHandle]:
    """Register the hooks of one pipeline chunk."""
    handles = []
    for depth, module in enumerate(chunk.entry_modules):
        hooks = EntryHooks(chunk.layers, depth, active)
        handles.append(module.register_forward_pre_hook(hooks.begin_forward, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.end_forward, with_kwargs=True))
    for module in chunk.boundary_modules:
        handles.append(module.register_forward_pre_hook(BoundaryHook(active).begin_module, with_kwargs=True))
    return handles


class EntryHooks:
    """Hooks on one of the modules around the decoder layers of a chunk.

    Their methods are bound, so that a deep copy of the model has hooks of its own.
    """

    def __init__(self, layers: tuple[int, ...], depth: int, active: ActivePass) -> None:
        self.layers = layers
        self.depth = depth
        self.active = active

    def begin_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Start a forward of the open pass and compare what it is fed."""
        if not torch.compiler.is_compiling():
            self._begin_eager(args, kwargs)
        elif self.active.needs_eager_hooks():
            self.active.run_eagerly(self._begin_eager, args, kwargs)
        else:
            self._begin_compiled(args, kwargs)

    def _begin_eager(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self.active.begin_forward():
            self.active.follow_backward()
            return
        forward_pass = self.active.opened
        if forward_pass is not None:
            forward_pass.begin_chunk(self.layers, self.depth)
            self._feed(forward_pass, args, kwargs)

    def _begin_compiled(self, args: tuple, kwargs: dict[str, Any]) -> None:
        forward_pass = self.active.begin_compiled()
        ids = _fed_token_ids(args, kwargs)
        if forward_pass is not None and ids is not None:
            forward_pass.feed_compiled(ids, _attention_mask(args, kwargs))

    def _feed(self, forward_pass: ForwardPass, args: tuple, kwargs: dict[str, Any]) -> None:
        ids = _fed_token_ids(args, kwargs)
        if ids is not None:
            forward_pass.feed(self.layers, self.depth, ids, _attention_mask(args, kwargs))

    def end_forward(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Compare what the module was really fed, and tie the backward of its outputs to the pass."""
        if not torch.compiler.is_compiling():
            self._end_eager(args, kwargs, output)
        elif self.active.needs_eager_hooks():
            self.active.run_eagerly(self._end_eager, args, kwargs, output)

    def _end_eager(self, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        in_forward = torch._C._current_graph_task_id() == -1
        if in_forward and self.active.opened is not None:
            self._feed(self.active.opened, args, kwargs)  # hooks registered after ours may have changed it
        if torch.is_grad_enabled():
            _tie(_tensors(output), self.active, self.active.for_router())


class BoundaryHook:
    """Hook on a decoder layer, or on a module beside the layers: its inputs are the outputs of what ran before it.

    They are tied to the pass even inside a reentrant checkpoint, whose outputs no hook on a module can see otherwise.
    """

    def __init__(self, active: ActivePass) -> None:
        self.active = active

    def begin_module(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Tie the backward of the inputs to the pass of this forward."""
        if torch.compiler.is_compiling():
            return
        if self.active.begin_forward():
            _tie(_tensors((args, kwargs)), self.active, self.active.opened)
        else:
            self.active.follow_backward()


class _TensorHook:
    """Hook on tensors of one forward: autograd calls it before it goes back through what computed them."""

    def __init__(self, active: ActivePass, forward_pass: ForwardPass | None) -> None:
        self.active = active
        self.forward_pass = forward_pass

    def on_backward(self, grad: torch.Tensor) -> None:
        self.active.enter_backward(self.forward_pass)


def _tie(tensors: Iterator[torch.Tensor], active: ActivePass, forward_pass: ForwardPass | None) -> None:
    hook = _TensorHook(active, forward_pass)
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(hook.on_backward)


def _fed_token_ids(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids if isinstance(ids, torch.Tensor) and not ids.is_floating_point() else None


def _attention_mask(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor | None:
    mask = kwargs.get("attention_mask", args[1] if len(args) == 2 else None)
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
