"""`moe-replay plugin`: a file for trainers that load foreign code by path."""

from __future__ import annotations

from typing import Literal

_MODULES = {"ms-swift": "moe_replay.integrations.ms_swift"}


def plugin(trainer: Literal["ms-swift"], /) -> None:
    """Print a file that lets another trainer load this library.

    ms-swift: moe-replay plugin ms-swift > plugin.py, and --external_plugins plugin.py

    Args:
        trainer: Trainer that will load the file.
    """
    print(f"import {_MODULES[trainer]}  # noqa: F401")
