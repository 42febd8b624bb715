"""Completions as rewards receive them: text, or messages of a conversation."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """Return a completion as text: of a conversation, the last assistant message."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m.get("role") == "assistant"), "")
