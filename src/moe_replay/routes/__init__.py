"""Routes: what a route is, its bytes, and which row of a rank each token sits in."""

from typing import TYPE_CHECKING

from moe_replay.utils.misc import lazy_names

if TYPE_CHECKING:
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

__getattr__ = lazy_names(  # settings name router families, and are read without torch
    __name__,
    {
        "Coverage": "moe_replay.routes.batch",
        "MoeLayer": "moe_replay.routes.topology",
        "MoeTopology": "moe_replay.routes.topology",
        "RouteBatch": "moe_replay.routes.batch",
        "RouteTrace": "moe_replay.routes.trace",
        "TokenLayout": "moe_replay.routes.layout",
        "TraceFile": "moe_replay.routes.trace_file",
        "TraceWriter": "moe_replay.routes.trace_file",
        "VersionSpan": "moe_replay.routes.trace_parts",
        "recover_traces": "moe_replay.routes.trace_file",
    },
)
