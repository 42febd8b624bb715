"""A rollout engine with a planted fault, for runs in other processes: routes are those of the layer before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import moe_replay as mr
from moe_replay.engines.base import Engine, StartRequest
from moe_replay.engines.transformers import TransformersEngine


class Late(TransformersEngine):
    """Reports routes one layer late."""

    def _sample(self, prompts: Any, params: Any) -> Any:
        return [replace(sample, trace=late(sample.trace)) for sample in super()._sample(prompts, params)]


def late(trace: mr.RouteTrace) -> mr.RouteTrace:
    experts = np.roll(trace.routed_experts, 1, axis=1)
    versions = trace.token_versions[0]
    return mr.RouteTrace(trace.token_ids, experts, trace.layers, trace.valid, versions, num_experts=trace.num_experts)


def start(request: StartRequest) -> Engine:
    return Late.from_pretrained(request.model, max_length=request.max_length)
