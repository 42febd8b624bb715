"""Callbacks by which long-running work reports how far it is."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[int, int], None]
"""Takes (done, total): samples of a rollout, updates of a step."""

StatusCallback = Callable[[str], None]
"""Takes one line of text."""
