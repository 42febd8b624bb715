"""Record and replay: the controller of one model, and an adapter for each kind of router."""

from moe_replay.replay.controller import RouterReplay, attach
from moe_replay.replay.recording import Recording, Replaying

__all__ = ["Recording", "Replaying", "RouterReplay", "attach"]
