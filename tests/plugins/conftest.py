"""What tests of plug-ins share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def megatron_is_taken_back() -> None:
    """Not here: the other trainers are patched once for all tests, in an environment that runs nothing else."""
