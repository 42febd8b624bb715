"""Record and replay: the controller of one model, and an adapter for each kind of router."""

from moe_replay.replay.controller import Recording, Replaying, RouterReplay, attach
from moe_replay.replay.policy import ReplayPolicy, RoutingWeights

__all__ = ["Recording", "ReplayPolicy", "Replaying", "RouterReplay", "RoutingWeights", "attach"]
