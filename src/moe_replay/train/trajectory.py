"""`Trajectory`: one finished sequence, as the trainer sees it, and the way of many of them from one rank to all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from moe_replay.errors import AlignmentError
from moe_replay.rollout.session import NOT_SAMPLED, Session
from moe_replay.rollout.types import FinishReason
from moe_replay.routes.trace import RouteTrace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trajectory:
    """T tokens of one sequence.

    row         of the data set
    group       trajectories of the same group answer the same prompt
    token_ids   (T,) int32
    logprobs    (T,) float32: of the tokens that were sampled, as the engine reported them; else 0
    versions    (T,) int64: weight version that sampled the token, -1 for prompt and observations
    trace       routes of the T tokens
    reward      NaN where no reward function scored it
    """

    row: int
    group: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    trace: RouteTrace
    finish_reason: FinishReason
    reward: float = float("nan")
    advantage: float = 0.0

    @classmethod
    def of(cls, session: Session, row: int, group: int) -> Trajectory:
        """What a session has become."""
        if session.trace is None or session.finish_reason is None:
            raise AlignmentError("a session that never sampled is no trajectory", sample=f"row {row}")
        made = cls(
            row=row,
            group=group,
            token_ids=session.token_ids,
            logprobs=session.logprobs,
            versions=session.sampled_versions,
            trace=session.trace,
            finish_reason=session.finish_reason,
        )
        made.check_versions()
        return made

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> np.ndarray:
        """(T,) bool: tokens to train on."""
        return self.versions != NOT_SAMPLED

    @property
    def truncated(self) -> bool:
        """Whether it ended because it was as long as it may be."""
        return self.finish_reason is FinishReason.LENGTH

    def check_versions(self) -> None:
        """Raise unless each log-prob and the route that led to it are of the same weights.

        The log-prob of token p was computed by the pass over token p - 1, so that is the route that must be of the
        version which sampled p. Earlier tokens may have been routed by earlier weights: they are kept as sampled.
        """
        leading = self.sampled[1:] & self.trace.valid[:-1].any(axis=1)
        wrong = np.flatnonzero(leading & (self.trace.token_versions[:-1] != self.versions[1:]))
        if wrong.size:
            token = int(wrong[0])
            raise AlignmentError(
                "a token was routed by other weights than those its log-prob was computed with",
                sample=f"row {self.row}",
                token=token,
                expected=f"routes of weight version {self.versions[token + 1]}",
                found=f"version {self.trace.token_versions[token]} ({wrong.size} tokens)",
                remedy="Keep routes as_sampled when a sequence is resumed after a weight update",
            )

    def with_advantage(self, reward: float, advantage: float) -> Trajectory:
        """The same trajectory, judged."""
        return replace(self, reward=float(reward), advantage=float(advantage))


# ---- from one rank to all -------------------------------------------------------------------------------------------


def to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """As one safetensors file: arrays of all sequences one after the other, and what is one number in its header."""
    from safetensors.numpy import save

    traces = [trajectory.trace.to_bytes() for trajectory in trajectories]
    facts = [
        {
            "row": t.row,
            "group": t.group,
            "finish_reason": t.finish_reason.value,
            "reward": t.reward.hex(),
            "advantage": t.advantage.hex(),
        }
        for t in trajectories
    ]
    arrays = {
        "lengths": np.array([len(t) for t in trajectories], np.int64),
        "trace_lengths": np.array([len(trace) for trace in traces], np.int64),
        "token_ids": _joined([t.token_ids for t in trajectories], np.int32),
        "logprobs": _joined([t.logprobs for t in trajectories], np.float32),
        "versions": _joined([t.versions for t in trajectories], np.int64),
        "traces": np.frombuffer(b"".join(traces), np.uint8),
    }
    return save(arrays, metadata={"trajectories": json.dumps(facts)})


def from_bytes(data: bytes) -> list[Trajectory]:
    """What `to_bytes` was given."""
    from safetensors.numpy import load

    size = int.from_bytes(data[:8], "little")
    facts = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["trajectories"])
    arrays = load(data)
    by_sequence = [_parts(arrays[name], arrays["lengths"]) for name in ("token_ids", "logprobs", "versions")]
    traces = _parts(arrays["traces"], arrays["trace_lengths"])
    return [
        Trajectory(
            row=fact["row"],
            group=fact["group"],
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            trace=RouteTrace.from_bytes(trace.tobytes()),
            finish_reason=FinishReason(fact["finish_reason"]),
            reward=float.fromhex(fact["reward"]),
            advantage=float.fromhex(fact["advantage"]),
        )
        for fact, ids, logprobs, versions, trace in zip(facts, *by_sequence, traces, strict=True)
    ]


def _joined(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _parts(joined: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = [0, *np.cumsum(lengths).tolist()]
    return [joined[start:stop] for start, stop in pairwise(ends)]
