"""The embedded default of `moe-replay train`: a tiny MoE and a task that it learns on two CPU cores in minutes."""

from pathlib import Path
from typing import TYPE_CHECKING

from moe_replay.utils.misc import lazy_names

if TYPE_CHECKING:
    from moe_replay.demo.files import DemoFiles, prepare

__all__ = ["RECIPE", "DemoFiles", "prepare"]

RECIPE = Path(__file__).with_name("recipe.toml")
"""Default settings of a run with the embedded model."""

__getattr__ = lazy_names(  # reward processes import `demo.task` alone
    __name__, {"DemoFiles": "moe_replay.demo.files", "prepare": "moe_replay.demo.files"}
)
