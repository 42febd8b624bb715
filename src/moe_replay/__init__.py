"""moe-replay: send every token to the experts that the rollout sent it to, and prove it.

The names here are what most programs need. More lives in the packages they come from: `moe_replay.routes`,
`moe_replay.replay`, `moe_replay.interop` (routes of other projects), `moe_replay.errors`.
Nothing is imported before it is used: commands that need no torch start without it.
"""

from typing import TYPE_CHECKING

from moe_replay.utils.misc import lazy_names
from moe_replay.version import __version__

if TYPE_CHECKING:
    from moe_replay import errors, interop, replay, routes
    from moe_replay.errors import AlignmentError, MoeReplayError
    from moe_replay.replay.controller import RouterReplay, attach
    from moe_replay.routes.batch import RouteBatch
    from moe_replay.routes.layout import TokenLayout
    from moe_replay.routes.topology import MoeTopology
    from moe_replay.routes.trace import RouteTrace
    from moe_replay.routes.trace_file import TraceFile, TraceWriter
    from moe_replay.verification.verify import verify
    from moe_replay.verification.watch import AlignmentCheck, AlignmentWatch

__all__ = [
    "AlignmentCheck",
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

__getattr__ = lazy_names(
    __name__,
    {
        "AlignmentCheck": "moe_replay.verification.watch",
        "AlignmentError": "moe_replay.errors",
        "AlignmentWatch": "moe_replay.verification.watch",
        "MoeReplayError": "moe_replay.errors",
        "MoeTopology": "moe_replay.routes.topology",
        "RouteBatch": "moe_replay.routes.batch",
        "RouteTrace": "moe_replay.routes.trace",
        "RouterReplay": "moe_replay.replay.controller",
        "TokenLayout": "moe_replay.routes.layout",
        "TraceFile": "moe_replay.routes.trace_file",
        "TraceWriter": "moe_replay.routes.trace_file",
        "attach": "moe_replay.replay.controller",
        "errors": "moe_replay.errors",
        "interop": "moe_replay.interop",
        "replay": "moe_replay.replay",
        "routes": "moe_replay.routes",
        "verify": "moe_replay.verification.verify",
    },
)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
