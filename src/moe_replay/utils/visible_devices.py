"""The environment variables that choose the devices which a process sees; to be known before torch is imported."""

from __future__ import annotations

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Type of the accelerator -> variable."""
