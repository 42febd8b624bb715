"""Record and replay: the controller of one model, and an adapter for each kind of router."""

from moe_replay.replay.controller import Recording, Replaying, RouterReplay, attach

__all__ = ["Recording", "Replaying", "RouterReplay", "attach"]
