"""One sequence that is scored now and then, to prove that engine and trainer do what they should.

After each update the engine must say of it what the trainer says: then it computes with the trainer's weights. And
before the first step the trainer must say the same of it alone and behind another sequence: then sequences of a
micro-batch do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_replay.distributed.collectives import all_gather, broadcast_bytes
from moe_replay.errors import AlignmentError
from moe_replay.rollout.types import FinishReason, Probe
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends.base import Backend, Routing, Scores
from moe_replay.train.batches import dummy_batch
from moe_replay.train.config.sections import RolloutConfig
from moe_replay.train.micro_batch import MicroBatch
from moe_replay.train.trajectory import Trajectory


class ProbeSequence:
    """One sequence, laid out on every rank."""

    def __init__(self, token_ids: np.ndarray, backend: Backend) -> None:
        topology = backend.topology
        versions = np.append(-1, np.zeros(len(token_ids) - 1, np.int64))  # every token but the first is scored
        whole = Trajectory(
            row=0,
            group=0,
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            versions=versions,
            trace=RouteTrace.uncovered(token_ids, topology.layers, topology.top_k, num_experts=topology.num_experts),
            finish_reason=FinishReason.STOP,
        )
        self.token_ids = token_ids
        self._whole = whole
        self._alone = dummy_batch(whole, backend)

    @classmethod
    def shared(cls, token_ids: Sequence[int] | None, backend: Backend) -> ProbeSequence:
        """Of the tokens that the first rank has."""
        own = None if token_ids is None else np.asarray(token_ids, np.int32).tobytes()
        return cls(np.frombuffer(broadcast_bytes(own), np.int32), backend)

    def check_stays_apart(self, backend: Backend, tolerance: float) -> None:
        """Raise if the sequence is scored otherwise behind another one than alone.

        Attention keeps packed sequences apart by their positions; layers that carry a state from token to token
        (linear attention, state-space models) may not, and nothing else would show it.
        """
        together = MicroBatch.of(
            [self._whole, self._whole],
            [0.0, 0.0],
            backend.layout([len(self.token_ids)] * 2),
            backend.device,
        )
        alone, both = _scores(backend, self._alone), _scores(backend, together)
        if alone is None or both is None:
            return
        second = both.logprobs[len(alone.logprobs) :]
        typical = float((second - alone.logprobs).abs().median())
        if not typical <= tolerance:
            raise AlignmentError(
                "a sequence is scored otherwise behind another one than alone: packed sequences see each other",
                expected=f"log-probs within {tolerance} in the median",
                found=f"{typical:.4g}",
                remedy="This model carries a state from token to token: set batch.packed = false",
            )

    def scored(self, backend: Backend, config: RolloutConfig) -> Probe | None:
        """What the policy says of it now, on every rank; None where the config wants no check."""
        if not config.check_weights:
            return None
        scores = _scores(backend, self._alone)
        own = (
            np.zeros(0, np.float32)
            if scores is None or not backend.reports_metrics
            else scores.logprobs.float().cpu().numpy()
        )
        logprobs = next(part for part in all_gather(own.view(np.uint8)) if part.size).view(np.float32).copy()
        return Probe(token_ids=self.token_ids.tolist(), logprobs=logprobs, tolerance=config.probe_tolerance)


def _scores(backend: Backend, batch: MicroBatch) -> Scores | None:
    """Of one micro-batch by itself; a pipeline that wants several gets it several times."""
    return backend.score([batch] * backend.micro_batch_multiple, Routing("native"), temperature=1.0)[0]
