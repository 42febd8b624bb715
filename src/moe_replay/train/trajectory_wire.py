"""Trajectories as bytes, for the broadcast from rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from moe_replay.rollout.sampling_mask_wire import mask_from_bytes, mask_to_bytes
from moe_replay.rollout.types import FinishReason
from moe_replay.routes.trace import RouteTrace
from moe_replay.train.types import Trajectory


def trajectories_to_bytes(trajectories: Sequence[Trajectory]) -> bytes:
    """Return one safetensors file: the arrays of all sequences concatenated, and the scalars in its header."""
    from safetensors.numpy import save

    traces = [trajectory.trace.to_bytes() for trajectory in trajectories]
    masks = [b"" if t.sampling_mask is None else mask_to_bytes(t.sampling_mask) for t in trajectories]
    scalars = [
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
        "token_ids": _concatenated([t.token_ids for t in trajectories], np.int32),
        "logprobs": _concatenated([t.logprobs for t in trajectories], np.float32),
        "versions": _concatenated([t.versions for t in trajectories], np.int64),
        "traces": np.frombuffer(b"".join(traces), np.uint8),
        "mask_lengths": np.array([len(mask) for mask in masks], np.int64),
        "masks": np.frombuffer(b"".join(masks), np.uint8),
    }
    return save(arrays, metadata={"trajectories": json.dumps(scalars)})


def trajectories_from_bytes(data: bytes) -> list[Trajectory]:
    """Return the trajectories that `trajectories_to_bytes` was given."""
    from safetensors.numpy import load

    size = int.from_bytes(data[:8], "little")
    scalars = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["trajectories"])
    arrays = load(data)
    by_sequence = [_split(arrays[name], arrays["lengths"]) for name in ("token_ids", "logprobs", "versions")]
    traces = _split(arrays["traces"], arrays["trace_lengths"])
    masks = _split(arrays["masks"], arrays["mask_lengths"])
    return [
        Trajectory(
            row=scalar["row"],
            group=scalar["group"],
            token_ids=ids,
            logprobs=logprobs,
            versions=versions,
            trace=RouteTrace.from_bytes(trace.tobytes()),
            finish_reason=FinishReason(scalar["finish_reason"]),
            reward=float.fromhex(scalar["reward"]),
            advantage=float.fromhex(scalar["advantage"]),
            sampling_mask=mask_from_bytes(mask.tobytes(), sample=number) if len(mask) else None,
        )
        for number, (scalar, ids, logprobs, versions, trace, mask) in enumerate(
            zip(scalars, *by_sequence, traces, masks, strict=True)
        )
    ]


def _concatenated(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _split(concatenated: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = [0, *np.cumsum(lengths).tolist()]
    return [concatenated[start:stop] for start, stop in pairwise(ends)]
