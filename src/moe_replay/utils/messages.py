"""Completions of rewards: text, or messages of a conversation."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """A completion as text; conversational ones are lists of messages, of which the last assistant turn counts."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m.get("role") == "assistant"), "")
