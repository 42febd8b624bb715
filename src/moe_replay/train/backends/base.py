"""Interface between the training loop and the policy.

A pass takes the micro-batches of this rank and returns, for each, one value per sampled token (N,), ordered by sequence
and position. Ranks that share a micro-batch (tensor, context, pipeline parallel) get the same micro-batches, each with
its own rows; ranks with the last pipeline stage return the values of all N tokens, the others None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from moe_replay.records import MicroBatch
from moe_replay.replay.controller import Recording, Replaying, RouterReplay
from moe_replay.replay.policy import IDS, ReplayPolicy
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import Prefix, TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.utils.files import Write
from moe_replay.weights.lora_adapter import Adapter
from moe_replay.weights.source import WeightSource

if TYPE_CHECKING:  # what a dry run does not need
    from moe_replay.train.backends.offload import TrainerOffload
    from moe_replay.train.backends.rank_state import RankState
    from moe_replay.train.backends.shared_base import SharedBase

LossFunction = Callable[[MicroBatch, Tensor], Tensor]
"""(micro-batch, log-probs (N,) with gradient) -> scalar: its part of the loss of the whole mini-batch."""


RouteObserver = Callable[[MicroBatch, int, RouteBatch, RouteBatch | None], None]
"""(micro-batch, chunk, what the routers choose, what they have replayed or None)."""


ChoiceObserver = Callable[[MicroBatch, Mapping[int, Tensor]], None]
"""(micro-batch, by layer what a margin has decided: `Replaying.choices`)."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Action of the policy's routers in a pass.

    action    native: choose experts themselves
              record: choose experts themselves, and keep the choice in `batch.recorded_routes`
              replay: take the experts of `source`
    source    routes to replay: "rollout" for those of the rollout, laid out for one forward, "recorded" for
              `batch.recorded_routes`
    observe   keep in `batch.native_routes` what the routers choose, or under replay would have chosen
    policy    how recorded routes are used; a recording keeps what it needs
    observer  called after the forward of a micro-batch through a chunk with what was observed, in place of keeping it
    weights   keep: routing weights in `batch.old_weights`; compare: with those, as their `shift`
    choices   called after such a forward with what the margin of the policy has decided
    """

    action: Literal["native", "record", "replay"] = "native"
    source: Literal["rollout", "recorded"] | None = None
    observe: bool = False
    policy: ReplayPolicy = IDS
    weights: Literal["keep", "compare"] | None = None
    observer: RouteObserver | None = field(default=None, compare=False)
    choices: ChoiceObserver | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.action == "replay") != (self.source is not None):
            raise ValueError(
                f"action {self.action!r} with source {self.source!r}: replay, and only replay, has a source"
            )


class Scores(NamedTuple):
    """Log-probs (N,) of the sampled tokens of a micro-batch and entropy (N,) of their distributions."""

    logprobs: Tensor
    entropy: Tensor

    def detached(self) -> Scores:
        return Scores(self.logprobs.detach(), self.entropy.detach())


class OldPass(NamedTuple):
    """The part of the old-log-prob pass in an update whose own forward takes its place.

    take     called with each micro-batch and its scores, without gradient, before its loss is computed
    finish   called on every rank between the last backward and the optimizer step, while the weights are the old ones
    """

    take: Callable[[MicroBatch, Scores], None]
    finish: Callable[[], None]


class UpdateResult(NamedTuple):
    """Norm of the whole gradient before clipping, and whether the optimizer step was applied."""

    grad_norm: float
    applied: bool


class ExpertExchange(NamedTuple):
    """Ranks among which tokens travel to their experts.

    ranks        that the experts of a layer are divided among, in order of their ids
    data_ranks   consecutive ones whose micro-batches of the same number travel together
    reports      whether this rank is the one that counts its sequences, among those with the same and the same layers
    """

    ranks: int
    data_ranks: int
    reports: bool


class Backend(ABC):
    """One rank's part of the policy, its optimizer and, where there is one, the reference model.

    replay, topology       of the policy: its controller, and the routers of the whole model
    device                 device of the micro-batches
    data_rank, data_size   this rank trains part `data_rank` of `data_size` of the sequences
    reports_metrics        whether token metrics of this rank count: true on one of the ranks that share a micro-batch
    micro_batch_multiple   the number of micro-batches of a pass must be a multiple of this
    expert_exchange        how tokens travel to experts on other ranks; None: every rank has all experts of its layers
    shared_base            frozen weights in memory of the engine; None: the trainer has its own
    sharing_problem        why sequences cannot share prefixes (`TokenLayout.shared`); None: `layout` takes them
    """

    replay: RouterReplay
    topology: MoeTopology
    data_rank: int
    data_size: int
    reports_metrics: bool
    micro_batch_multiple: int = 1
    expert_exchange: ExpertExchange | None = None
    shared_base: SharedBase | None = None
    sharing_problem: str | None = "the backend feeds whole sequences"

    _offload: TrainerOffload
    _state: RankState

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def layout(self, lengths: Sequence[int], prefixes: Sequence[Prefix] = ()) -> TokenLayout:
        """Return the token layout of sequences of these lengths on this rank.

        prefixes   that they share, of each sequence; () unless `sharing_problem` is None
        """

    @property
    @abstractmethod
    def chunk_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers with a router in each chunk of the policy on this rank; several chunks in interleaved pipelines."""

    @abstractmethod
    def score(
        self, batches: Sequence[MicroBatch], routing: Routing, temperature: float | None = None
    ) -> list[Scores | None]:
        """Score the sampled tokens under the current policy, at the sampling temperature unless another is given."""

    @property
    def is_compiled(self) -> bool:
        """Whether passes with and without gradients are compiled separately, and may round differently."""
        return False

    def score_uncompiled(self, batches: Sequence[MicroBatch], routing: Routing) -> list[Scores | None]:
        """Score as `score`, without compiled code."""
        return self.score(batches, routing)

    @abstractmethod
    def score_reference(self, batches: Sequence[MicroBatch]) -> list[Tensor | None]:
        """Return log-probs (N,) under the reference model, which always routes natively."""

    @abstractmethod
    def update(
        self,
        batches: Sequence[MicroBatch],
        loss: LossFunction,
        routing: Routing,
        lr: float,
        old_pass: OldPass | None = None,
    ) -> UpdateResult:
        """Take one optimizer step on the sum of the losses of all micro-batches of all ranks.

        Where the gradient is not finite the step is skipped on every rank.
        """

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory, if `backend.offload`; `reload` comes next."""
        self._offload.offload()

    def reload(self) -> None:
        """Move weights back, gradients and optimizer state for each update; nothing if nothing is off the device."""
        self._offload.reload()

    @abstractmethod
    def weight_source(self) -> WeightSource:
        """Return all weights as the checkpoint names and shapes them, layer by layer. All ranks call it."""

    def adapter(self) -> Adapter | None:
        """Return the LoRA adapter, whose tensors all ranks must exhaust; None if all weights are trained."""
        return None

    def stage(self) -> Write:
        """Copy weights and optimizer state to host memory; return what writes them to a folder, e.g. in a thread."""
        return self._state.stage(self._offload.content_of)

    def load(self, folder: Path) -> None:
        """Load what the ranks of any layout wrote; bit for bit the same under the same layout. All ranks call it."""
        with self._offload.optimizer_on_device():
            self._state.load(folder)

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the number of bytes that `stage` has written on all ranks together."""

    def close(self) -> None:
        """Detach routing replay from the model, and let go of memory of the engine."""
        self.replay.detach()
        if self.shared_base is not None:
            self.shared_base.release()


@contextmanager
def apply_routing(replay: RouterReplay, batch: MicroBatch, chunk: int, routing: Routing) -> Iterator[None]:
    """Route the one forward of `batch` through this chunk; keep in the batch what is recorded or observed."""
    keeps, since = routing.weights == "keep", batch.old_weights[chunk] if routing.weights == "compare" else None
    if routing.action == "replay":
        routes = rollout_routes(batch, chunk) if routing.source == "rollout" else batch.recorded_routes[chunk]
        with replay.replay(
            routes, observe=routing.observe, deferred=True, policy=routing.policy, weights=keeps, since=since
        ) as replaying:
            yield
        _keep_weights(batch, chunk, routing, replaying)
        if routing.observe:
            _keep(batch, chunk, routing, replaying.native(), routes)
        if routing.choices is not None:
            routing.choices(batch, replaying.choices())
    elif routing.action == "record" or routing.observe or routing.weights is not None:
        keeps_gates = routing.action == "record" and routing.policy.gates
        with replay.record(gates=keeps_gates, weights=keeps, since=since) as recording:
            yield
        _keep_weights(batch, chunk, routing, recording)
        recorded = recording.batch()
        if routing.action == "record":
            batch.recorded_routes[chunk] = recorded
        if routing.observe:
            _keep(batch, chunk, routing, recorded, None)
    else:
        yield


def _keep_weights(batch: MicroBatch, chunk: int, routing: Routing, forward: Recording | Replaying) -> None:
    if routing.weights == "keep":
        batch.old_weights[chunk] = forward.routing_weights()
    elif routing.weights == "compare":
        batch.old_weights[chunk] = batch.old_weights[chunk]._replace(shift=forward.router_shift())


def _keep(batch: MicroBatch, chunk: int, routing: Routing, native: RouteBatch, replayed: RouteBatch | None) -> None:
    if routing.observer is None:
        batch.native_routes[chunk] = native
    else:
        routing.observer(batch, chunk, native, replayed)


def rollout_routes(batch: MicroBatch, chunk: int) -> RouteBatch:
    """Return the rollout's routes for one chunk of the policy on this rank, on its device: kept ones, or new ones."""
    return batch.rollout_routes[chunk] if chunk in batch.rollout_routes else captured_routes(batch, chunk, batch.layout)


def captured_routes(batch: MicroBatch, chunk: int, layout: TokenLayout) -> RouteBatch:
    """Return the rollout's routes for one chunk, in a layout of the same sequences."""
    traces = [trajectory.trace for trajectory in batch.trajectories]
    layers = batch.chunk_layers[chunk]
    # Sequences are laid out whole: no loss and no token depends on the last token, which engines return no route for.
    return RouteBatch.from_traces(
        traces, layout, layers, source_layers=batch.source_layers, stand_ins=True, device=batch.input_ids.device
    )


def keep_rollout_routes(batch: MicroBatch, chunk_layers: Sequence[Sequence[int]]) -> None:
    """Keep the rollout's routes for each chunk of the policy on the device, for several passes."""
    batch.chunk_layers = chunk_layers
    batch.rollout_routes = {chunk: rollout_routes(batch, chunk) for chunk in range(len(chunk_layers))}
