"""moe-replay: send every token to the experts that the rollout sent it to, and prove it."""

from moe_replay.batch import Coverage, RouteBatch
from moe_replay.errors import (
    AlignmentError,
    LayoutError,
    MissingExtraError,
    MoeReplayError,
    ReplayStateError,
    TraceError,
    TraceFormatError,
    UnsupportedRouterError,
)
from moe_replay.layout import TokenLayout
from moe_replay.replay import Recording, Replaying, RouterReplay, attach
from moe_replay.topology import MoeLayer, MoeTopology
from moe_replay.trace import RouteTrace
from moe_replay.trace_file import TraceFile, TraceWriter, recover_traces
from moe_replay.trace_parts import VersionSpan

__all__ = [
    "AlignmentError",
    "Coverage",
    "LayoutError",
    "MissingExtraError",
    "MoeLayer",
    "MoeReplayError",
    "MoeTopology",
    "Recording",
    "ReplayStateError",
    "Replaying",
    "RouteBatch",
    "RouteTrace",
    "RouterReplay",
    "TokenLayout",
    "TraceError",
    "TraceFile",
    "TraceFormatError",
    "TraceWriter",
    "UnsupportedRouterError",
    "VersionSpan",
    "attach",
    "recover_traces",
]
__version__ = "0.1.0"
