"""The ways in which a model's layers can be made to run again in the backward."""

from __future__ import annotations

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


def checkpoint_transformers(use_reentrant):
    def apply(model):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()  # reentrant checkpoints need an input with a gradient

    return apply


def checkpoint_wrap(implementation):
    def apply(model):
        layer = type(model.model.layers[0])
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=lambda m: checkpoint_wrapper(m, checkpoint_impl=implementation),
            check_fn=lambda m: isinstance(m, layer),
        )
        model.enable_input_require_grads()

    return apply


CHECKPOINTS = {
    "transformers": checkpoint_transformers(False),
    "transformers-reentrant": checkpoint_transformers(True),
    "wrapper": checkpoint_wrap(CheckpointImpl.NO_REENTRANT),
    "wrapper-reentrant": checkpoint_wrap(CheckpointImpl.REENTRANT),
}


def unwrapped(found):
    return {name.replace("_checkpoint_wrapped_module.", ""): gradient for name, gradient in found.items()}


def abort_backward(loss, parameter):
    """Run a backward that fails where the gradient of a parameter arrives."""

    def fail(grad):
        raise RuntimeError("planted")

    handle = parameter.register_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    handle.remove()
