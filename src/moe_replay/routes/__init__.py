"""Routes: what a route is, its bytes, and which row of a rank each token sits in."""

from moe_replay.routes.batch import Coverage, RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_file import TraceFile, TraceWriter, recover_traces
from moe_replay.routes.trace_parts import VersionSpan

__all__ = [
    "Coverage",
    "MoeLayer",
    "MoeTopology",
    "RouteBatch",
    "RouteTrace",
    "TokenLayout",
    "TraceFile",
    "TraceWriter",
    "VersionSpan",
    "recover_traces",
]
