"""The embedded default of `moe-replay train`: a tiny MoE and a task that it learns on two CPU cores in minutes."""

from moe_replay.demo.files import DemoFiles, prepare
from moe_replay.demo.settings import RECIPE

__all__ = ["RECIPE", "DemoFiles", "prepare"]
