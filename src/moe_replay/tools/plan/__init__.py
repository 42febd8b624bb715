"""Planning a parallel layout: which rank replays what, what it costs, and whether it is possible.

    plan = plan_layout(topology, Parallel(tp=4, pp=8, dp=16, ep=32), Work(lengths=(8192,) * 2, micro_batches=16))
    print(plan)                 # or plan.to_json(), plan.rank(137), plan.table

Closed forms for each class of ranks, so that ten thousand ranks take no longer than ten. Starts no processes and loads
no weights.
"""

from moe_replay.tools.plan.layout import (
    Cluster,
    Dimensions,
    ImpossibleLayoutError,
    Plan,
    RankPlan,
    StagePlan,
    find_problems,
    plan_layout,
)
from moe_replay.tools.plan.parallel import Parallel, RouteBytes, Work

__all__ = [
    "Cluster",
    "Dimensions",
    "ImpossibleLayoutError",
    "Parallel",
    "Plan",
    "RankPlan",
    "RouteBytes",
    "StagePlan",
    "Work",
    "find_problems",
    "plan_layout",
]
