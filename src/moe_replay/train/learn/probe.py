"""The probe: one fixed sequence whose log-probs show that engine and trainer agree.

After each weight sync the engine must return the trainer's log-probs, which shows that it computes with the trainer's
weights. Before the first step the trainer must return the same log-probs for the sequence alone and packed behind
another one, which shows that sequences of a micro-batch do not attend to each other; and, where sequences share
prompts, behind one that it shares half of its tokens with.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_replay.distributed.collectives import all_gather, broadcast_bytes, control_group
from moe_replay.errors import AlignmentError
from moe_replay.records import FinishReason, MicroBatch, Trajectory
from moe_replay.routes.layout import Prefix, TokenLayout
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.backends.base import Backend, Routing, Scores
from moe_replay.train.config.sections import RolloutConfig
from moe_replay.train.learn.batches import dummy_batch, make_micro_batch
from moe_replay.weights.identity import Probe


class ProbeSequence:
    """The probe, laid out on every rank."""

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
    def broadcast(cls, token_ids: Sequence[int] | None, backend: Backend) -> ProbeSequence:
        """Return the probe of rank 0's tokens on every rank."""
        content = None if token_ids is None else np.asarray(token_ids, np.int32).tobytes()
        return cls(np.frombuffer(broadcast_bytes(content), np.int32), backend)

    def check_packing(self, backend: Backend, tolerance: float) -> None:
        """Raise if the log-probs of the sequence differ when it is packed behind another one, or shares tokens with it.

        Attention separates packed sequences by their positions; layers that carry a state from token to token (linear
        attention, state-space models) may not, and no other check would show it.
        """
        together = self._twice(backend.layout([len(self.token_ids)] * 2), backend)
        alone, both = _scores(backend, self._alone), _scores(backend, together)
        if alone is None or both is None:
            return
        if not bool(alone.logprobs.isfinite().all()):
            raise AlignmentError(
                "the log-probs of the model are not finite",
                found=f"{int((~alone.logprobs.isfinite()).sum())} of {len(alone.logprobs)} tokens",
                remedy="Its weights may be too large for model.dtype: bfloat16 and float32 hold more than float16",
            )
        _check_second(
            both,
            alone,
            tolerance,
            "a sequence packed behind another one has other log-probs than alone: packed sequences see each other",
            "This model carries a state from token to token: set batch.packed = false",
        )
        if backend.sharing_problem is None and len(self.token_ids) > 2:
            prefixes = (Prefix(), Prefix(0, len(self.token_ids) // 2))
            shared = self._twice(backend.layout([len(self.token_ids)] * 2, prefixes), backend)
            _check_second(
                _scores(backend, shared),
                alone,
                tolerance,
                "a sequence that shares its beginning with another one has other log-probs than alone",
                "Attention of this model does not show a shared prompt to its samples: set batch.share_prompts = false",
            )

    def _twice(self, layout: TokenLayout, backend: Backend) -> MicroBatch:
        return make_micro_batch([self._whole, self._whole], [0.0, 0.0], layout, backend.device)

    def score(self, backend: Backend, config: RolloutConfig) -> Probe | None:
        """Return the probe with the policy's current log-probs, on every rank; None if `check_weights` is off."""
        if not config.check_weights:
            return None
        scores, values = _scores(backend, self._alone), np.zeros(0, np.float32)
        if scores is not None and backend.reports_metrics:
            values = scores.logprobs.float().cpu().numpy()
        parts = all_gather(values.view(np.uint8), control_group())
        logprobs = next(part for part in parts if part.size).view(np.float32).copy()
        return Probe(token_ids=self.token_ids.tolist(), logprobs=logprobs, tolerance=config.weights_tolerance)


def _check_second(both: Scores | None, alone: Scores, tolerance: float, problem: str, remedy: str) -> None:
    """Raise unless the second of two sequences has the log-probs of the one that was scored alone."""
    assert both is not None, "ranks that score it alone score it twice as well"
    second = both.logprobs[len(alone.logprobs) :]
    typical = float((second - alone.logprobs).abs().median())
    if not typical <= tolerance:
        expected = f"log-probs within {tolerance} in the median"
        raise AlignmentError(problem, expected=expected, found=f"{typical:.4g}", remedy=remedy)


def _scores(backend: Backend, batch: MicroBatch) -> Scores | None:
    """Return the scores of one micro-batch; a pipeline that needs several gets it several times."""
    return backend.score([batch] * backend.micro_batch_multiple, Routing("native"), temperature=1.0)[0]
