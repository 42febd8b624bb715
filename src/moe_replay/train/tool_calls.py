"""Calls of tools in the text of a completion, in the formats that models write them in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_REASONING = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; `problem` says what is wrong with one that cannot be read."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


ToolCallParser = Callable[[str], list[ToolCall]]
"""The text of a completion, special tokens included -> its calls, in order; none if it is an answer."""


def parse_tagged(text: str) -> list[ToolCall]:
    """JSON objects or <function=...> elements in <tool_call> tags, as Qwen and Hermes models write them."""
    return [_tagged(content) for content in _TAGGED.findall(_REASONING.sub("", text))]


def _tagged(content: str) -> ToolCall:
    if (function := _FUNCTION.match(content)) is not None:
        arguments = {name.strip(): value for name, value in _PARAMETER.findall(function[2])}
        return ToolCall(function[1].strip(), arguments)
    try:
        return _call(json.loads(content))
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not valid JSON: {error}")


def parse_json(text: str) -> list[ToolCall]:
    """A JSON object with `name` and `arguments` or `parameters`, or a list of such objects, as Llama models write."""
    content = _REASONING.sub("", text)
    start = re.search(r"[\[{]", content)
    if start is None:
        return []
    try:
        found, _ = json.JSONDecoder().raw_decode(content[start.start() :])
    except (ValueError, RecursionError):
        return []  # an answer with a bracket in it
    items = found if isinstance(found, list) else [found]
    is_call = bool(items) and all(isinstance(item, dict) and "name" in item for item in items)
    return [_call(item) for item in items] if is_call else []


def _call(found: Any) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall(problem='the call is not an object {"name": ..., "arguments": {...}}')
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(found["name"], problem="the arguments are not an object of names and values")
    return ToolCall(found["name"], arguments)


TOOL_FORMATS: Mapping[str, ToolCallParser | str] = {"hermes": parse_tagged, "json": parse_json}
"""Formats by name; `rollout.tool_format` takes one of these or `module:name`."""
