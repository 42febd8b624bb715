"""Policy losses by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from moe_replay.errors import MoeReplayError
from moe_replay.train.losses.types import Loss, LossInputs, LossOutput, LossSettings
from moe_replay.utils.plugins import resolve, user_code

if TYPE_CHECKING:
    import torch

LOSSES: Mapping[str, Loss | str] = {
    "clipped": "moe_replay.train.losses.clipped:clipped_surrogate",
}
"""Losses by name; `algorithm.policy_loss` takes one of these or `module:name`."""

RESERVED = ("total", "entropy", "grad_norm", "lr", "skipped")
"""Names in loss/* that the trainer itself uses."""


class LossError(MoeReplayError):
    """A policy loss that raised, or returned something else than a scalar and metrics of each token."""


def load_loss(name: str) -> Loss:
    """Return the loss that `algorithm.policy_loss` names, wrapped so that its result is checked."""
    loss: Loss = resolve(name, LOSSES, kind="policy loss", key="algorithm.policy_loss")

    def checked(inputs: LossInputs, settings: LossSettings) -> LossOutput:
        tokens = len(inputs.logprobs)
        with user_code(f"policy loss {name!r}", LossError, found=f"a micro-batch of {tokens} tokens"):
            output = loss(inputs, settings)
        _check(name, output, tokens)
        return output

    return checked


def metric_names(loss: Loss, settings: LossSettings, device: torch.device) -> tuple[str, ...]:
    """Return the names of the token metrics of a loss, found by calling it on four made-up tokens.

    Every rank needs them, also one that never computes a loss, such as the first stage of a pipeline.
    """
    import torch

    logprobs = torch.full((4,), -1.0, device=device, requires_grad=True)
    like = logprobs.detach()
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=like,
        rollout_logprobs=like,
        ref_logprobs=like if settings.beta else None,
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], device=device),
        weights=torch.full_like(like, 0.25),
        sequence=torch.tensor([0, 0, 1, 1], device=device),
        num_sequences=2,
    )
    with torch.random.fork_rng(devices=[]):
        return tuple(loss(inputs, settings).token_metrics)


def _check(name: str, output: LossOutput, tokens: int) -> None:
    if not isinstance(output, LossOutput) or output.loss.ndim:
        raise LossError(
            f"policy loss {name!r} must return a LossOutput with a scalar loss",
            expected="LossOutput(loss of shape (), token_metrics)",
            found=f"a loss of shape {tuple(output.loss.shape)}" if isinstance(output, LossOutput) else type(output),
        )
    for metric, values in output.token_metrics.items():
        if values.shape != (tokens,):
            raise LossError(
                f"policy loss {name!r} must return one value per token for each of its metrics",
                expected=f"{metric} of shape ({tokens},)",
                found=f"shape {tuple(values.shape)}",
            )
        if metric in RESERVED:
            raise LossError(
                f"policy loss {name!r} returns a metric with a name that the trainer uses itself",
                expected=f"none of {', '.join(RESERVED)}",
                found=metric,
            )
