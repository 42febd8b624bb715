"""Text of completions as rewards receive them, and of errors as they are quoted in ours."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """Return a completion as text: of a conversation, the last assistant message."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m.get("role") == "assistant"), "")


def one_line(error: BaseException, length: int = 300) -> str:
    """Return the message of an error in one line, shortened; its type if it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= length else f"{text[:length]}..."
