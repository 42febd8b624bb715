"""moe-replay: send every token to the experts that the rollout sent it to, and prove it."""

from moe_replay.diagnostics.compare import VerifyReport
from moe_replay.diagnostics.verify import verify
from moe_replay.diagnostics.watch import AlignmentWatch
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
from moe_replay.interop import (
    PeerError,
    from_ms_swift,
    from_nemo_rl,
    from_sglang,
    from_skyrl,
    from_slime,
    from_verl,
    from_vllm,
    to_ms_swift,
    to_nemo_rl,
    to_sglang,
    to_skyrl,
    to_slime,
    to_verl,
    to_vllm,
)
from moe_replay.replay.controller import Recording, Replaying, RouterReplay, attach
from moe_replay.routes.batch import Coverage, RouteBatch
from moe_replay.routes.layout import TokenLayout
from moe_replay.routes.topology import MoeLayer, MoeTopology
from moe_replay.routes.trace import RouteTrace
from moe_replay.routes.trace_file import TraceFile, TraceWriter, recover_traces
from moe_replay.routes.trace_parts import VersionSpan

__all__ = [
    "AlignmentError",
    "AlignmentWatch",
    "Coverage",
    "LayoutError",
    "MissingExtraError",
    "MoeLayer",
    "MoeReplayError",
    "MoeTopology",
    "PeerError",
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
    "VerifyReport",
    "VersionSpan",
    "attach",
    "from_ms_swift",
    "from_nemo_rl",
    "from_sglang",
    "from_skyrl",
    "from_slime",
    "from_verl",
    "from_vllm",
    "recover_traces",
    "to_ms_swift",
    "to_nemo_rl",
    "to_sglang",
    "to_skyrl",
    "to_slime",
    "to_verl",
    "to_vllm",
    "verify",
]
__version__ = "0.1.0"
