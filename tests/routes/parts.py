"""Traces that no constructor has checked."""

from __future__ import annotations

from typing import Any

from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_parts import TraceParts


def trace_from_parts(*parts: Any) -> RouteTrace:
    """token_ids, experts, layers, coverage, versions, num_experts, taken as they are."""
    return RouteTrace.from_parts(TraceParts(*parts))
