"""The error of this package."""

from __future__ import annotations

from moe_replay.errors import MoeReplayError


class WeightMapError(MoeReplayError):
    """A checkpoint, a family and a Megatron-Core model that do not fit; raised before a weight is written."""
