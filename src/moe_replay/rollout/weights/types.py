"""The forms in which new weights are given to an engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from moe_replay.rollout.weights.transfer import Transfer

Tensors = Iterable[tuple[str, Tensor]]
Weights = Tensors | Path | Transfer
"""New weights for an engine, named and shaped as in the model's checkpoint.

Streamed; a folder of safetensors; or a transfer, where the engine learns where its workers find the tensors.
"""
