"""Traces that no constructor has checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_parts import TraceParts


def trace_from_parts(*parts: Any) -> RouteTrace:
    """token_ids, experts, layers, coverage, versions, num_experts, taken as they are."""
    return RouteTrace.from_parts(TraceParts(*parts))


def made_of(trace: RouteTrace, experts: np.ndarray, num_experts: int, layers: tuple[int, ...]) -> RouteTrace:
    """What a faulty adapter could make: parts that nobody has checked."""
    return trace_from_parts(trace.token_ids, experts, layers, trace._coverage, trace.versions, num_experts)
