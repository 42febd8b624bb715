"""moe-replay: send every token to the experts that the rollout sent it to, and prove it.

The names here are what most programs need. More lives in the packages they come from: `moe_replay.routes`,
`moe_replay.replay`, `moe_replay.interop` (routes of other projects), `moe_replay.errors`.
"""

from moe_replay import errors, interop, replay, routes
from moe_replay.diagnostics.verify import verify
from moe_replay.diagnostics.watch import AlignmentWatch
from moe_replay.errors import AlignmentError, MoeReplayError
from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.routes.batch import RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_file import TraceFile, TraceWriter
from moe_replay.version import __version__

__all__ = [
    "AlignmentError",
    "AlignmentWatch",
    "MoeReplayError",
    "MoeTopology",
    "RouteBatch",
    "RouteTrace",
    "RouterReplay",
    "TokenLayout",
    "TraceFile",
    "TraceWriter",
    "__version__",
    "attach",
    "errors",
    "interop",
    "replay",
    "routes",
    "verify",
]
