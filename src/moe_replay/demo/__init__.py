"""The embedded default of `moe-replay train`: a tiny MoE and a task that it learns on two CPU cores in minutes."""

from typing import TYPE_CHECKING

from moe_replay.utils.lazy import lazy_names

if TYPE_CHECKING:
    from moe_replay.demo.files import DemoFiles, prepare
    from moe_replay.demo.settings import RECIPE

__all__ = ["RECIPE", "DemoFiles", "prepare"]

__getattr__ = lazy_names(  # processes that score samples import the reward alone
    __name__,
    {"RECIPE": "moe_replay.demo.settings", "DemoFiles": "moe_replay.demo.files", "prepare": "moe_replay.demo.files"},
)
