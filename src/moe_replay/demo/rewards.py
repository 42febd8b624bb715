"""The reward of the embedded default."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from moe_replay.utils.messages import text_of


def exact(prompts: Sequence[Any], completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float]:
    """1 where the completion ends with the number that is the solution, 0 where not."""
    return [float(_last_number(text_of(text)) == str(truth)) for text, truth in zip(completions, solution, strict=True)]


def _last_number(text: str) -> str | None:
    found = re.search(r"(\d+)\s*$", text)
    return found[1] if found else None
