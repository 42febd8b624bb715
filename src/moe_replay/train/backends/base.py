"""What the training loop asks of whatever holds the policy.

A pass takes the micro-batches of this rank and gives, for each, one number for each of its N scored tokens: the tokens
that the rollout sampled, in the order of sequences and positions. Ranks that share a micro-batch (tensor, context,
pipeline parallel) are given the same micro-batches, each with its own rows; those whose part of the model ends in
log-probs get the numbers of all N tokens, the others None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.train.micro_batch import MicroBatch

LossFunction = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, log-probs (N,) with gradient) -> scalar: its part of the loss of the whole mini-batch."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What the routers of the policy do in a pass.

    native   choose by themselves
    record   choose by themselves, and keep the choice in `batch.routes`
    replay   take the experts of `batch.routes`; where `observe`, keep what they would have chosen in `batch.native`
    """

    action: Literal["native", "record", "replay"] = "native"
    observe: bool = False


class Scores(NamedTuple):
    """Of the N scored tokens of one micro-batch, without gradient: log-probs and entropy of the next-token choice."""

    logprobs: Tensor
    entropy: Tensor


class Updated(NamedTuple):
    """What an update did: norm of the whole gradient before clipping, and whether the weights have changed."""

    grad_norm: float
    applied: bool


class Backend(ABC):
    """One rank's part of the policy, its optimizer and, where there is one, the reference model.

    topology               routers of the whole model
    device                 where micro-batches must lie
    data_rank, data_size   this rank trains share `data_rank` of `data_size` of the sequences
    speaks                 whether this rank counts in sums over all ranks: one of those that share a micro-batch
    micro_batch_multiple   the number of micro-batches of a pass must be a multiple of this
    """

    topology: MoeTopology
    data_rank: int
    data_size: int
    speaks: bool
    micro_batch_multiple: int = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def layout(self, lengths: Sequence[int]) -> TokenLayout:
        """Where the tokens of sequences of these lengths sit on this rank."""

    @property
    @abstractmethod
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk of the policy on this rank (one, but for interleaved pipelines) the layers of its routers."""

    @abstractmethod
    def score(
        self, batches: Sequence[MicroBatch], routing: Routing, temperature: float | None = None
    ) -> list[Scores | None]:
        """Log-probs under the policy as it is now; at the sampling temperature where none is given."""

    @abstractmethod
    def score_reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Log-probs (N,) under the reference model, which always routes natively."""

    @abstractmethod
    def update(self, batches: Sequence[MicroBatch], loss: LossFunction, routing: Routing, lr: float) -> Updated:
        """One optimizer step on the sum of the losses of all micro-batches of all ranks.

        A gradient that is not finite changes nothing, on any rank.
        """

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """All weights in the names, shapes and dtypes of the checkpoint, on every rank. All ranks must take all."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Weights and optimizer, so that `load` goes on bit for bit. All ranks call it."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote. All ranks call it."""

    @abstractmethod
    def state_bytes(self) -> int:
        """How much `save` writes, all ranks together."""

    @abstractmethod
    def close(self) -> None:
        """Take replay off the model."""
