"""Tools: plain Python functions that a model may call, described to it by their signature and docstring.

    def search(query: str, limit: int = 5) -> str:
        \"\"\"Search the encyclopedia.

        Args:
            query: Words to look for.
            limit: Articles to return at most.
        \"\"\"

Whatever goes wrong with a call becomes an observation for the model: a name or arguments that do not exist, a function
that raises or does not return in time. It never ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.train.config.registries import TOOL_FORMATS
from moe_replay.utils.misc import one_line
from moe_replay.utils.plugins import awaited, resolve, start_user_code, user_code

MAX_CALLS = 16
"""Calls of one turn that are answered."""


class ToolError(MoeReplayError):
    """A function that cannot be described to a model as a tool."""


class _ToolCallError(MoeReplayError):
    """A call that failed, for the model to read."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, its name for the model, and its JSON schema as chat templates take it."""

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a run, the parser of tool calls, and the time limit of a call in seconds."""

    tools: Mapping[str, Tool]
    parse: ToolCallParser
    timeout_s: float = math.inf

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas of all tools, for the chat template."""
        return [tool.schema for tool in self.tools.values()]

    async def answer(self, calls: Sequence[ToolCall]) -> list[str]:
        """Return the results of the calls of one turn, which run concurrently, as text."""
        answered = await asyncio.gather(*(self._answer(call) for call in calls[:MAX_CALLS]))
        return [*answered, *(f"Error: at most {MAX_CALLS} calls in a turn" for _ in calls[MAX_CALLS:])]

    async def _answer(self, call: ToolCall) -> str:
        if call.problem:
            return f"Error: {call.problem}"
        tool = self.tools.get(call.name)
        if tool is None:
            return f"Error: no tool {call.name!r}; there is {', '.join(self.tools)}"
        try:
            arguments = _arguments(tool, call)
        except TypeError as error:
            return f"Error: {one_line(error)}"
        return await self._run(tool, arguments)

    async def _run(self, tool: Tool, arguments: dict[str, Any]) -> str:
        """Run a function in a separate thread, so that one that hangs does not block others."""

        def run() -> str:
            result = awaited(tool.function(**arguments))
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)

        future = asyncio.wrap_future(start_user_code(run, tool.name, _ToolCallError))
        done, _ = await asyncio.wait({future}, timeout=None if self.timeout_s == math.inf else self.timeout_s)
        if not done:
            future.cancel()
            return f"Error: {tool.name} did not return within {self.timeout_s:g} s"
        try:
            return future.result()
        except MoeReplayError as error:
            return f"Error: {one_line(error)}"


def load_tools(paths: Sequence[str], tool_format: str = "hermes", timeout_s: float = math.inf) -> ToolSet | None:
    """Return the tools that `rollout.tools` names; None if it names none."""
    if not paths:
        return None
    tools: dict[str, Tool] = {}
    for path in paths:
        tool = describe(resolve(path, {}, kind="tool", key="rollout.tools"), path)
        if tool.name in tools:
            raise ToolError(f"rollout.tools: two tools are called {tool.name!r}", remedy="Rename one of the functions")
        tools[tool.name] = tool
    parser = resolve(tool_format, TOOL_FORMATS, kind="tool call format", key="rollout.tool_format")
    return ToolSet(tools, _checked(parser, tool_format), timeout_s)


def describe(function: Callable[..., Any], path: str = "") -> Tool:
    """Return a function as a tool; raise if its signature or docstring does not describe it completely."""
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    path = path or getattr(function, "__qualname__", repr(function))
    if not callable(function):
        raise ToolError(f"tool {path!r} is no function", found=type(function).__name__)
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError, TypeError, ValueError) as error:
        raise ToolError(
            f"tool {path!r} cannot be described to the model: {one_line(error)}",
            expected="a type hint for every parameter, and a docstring with a line for each under 'Args:'",
        ) from error
    return Tool(schema["function"]["name"], function, schema)


def _checked(parser: ToolCallParser, name: str) -> ToolCallParser:
    def parse(text: str) -> list[ToolCall]:
        with user_code(f"tool call format {name!r}", ToolError):
            return list(parser(text))

    return parse


def _arguments(tool: Tool, call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call; values that the model wrote as text are read as the schema says.

    Raises TypeError where they do not fit the signature.
    """
    properties = tool.schema["function"]["parameters"].get("properties", {})
    kinds = {name: about.get("type") for name, about in properties.items()}
    values = {
        name: _value(value) if isinstance(value, str) and kinds.get(name) not in ("string", None) else value
        for name, value in call.arguments.items()
    }
    inspect.signature(tool.function).bind(**values)
    return values


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


# ---- tool calls in a completion --------------------------------------------------------------------------------------


_REASONING = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|$)", re.DOTALL)
"""Also where the chat template has written the `<think>`, at the end of the prompt."""
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
        parsed, _ = json.JSONDecoder().raw_decode(content[start.start() :])
    except (ValueError, RecursionError):
        return []  # an answer with a bracket in it
    items = parsed if isinstance(parsed, list) else [parsed]
    is_call = bool(items) and all(isinstance(item, dict) and "name" in item for item in items)
    return [_call(item) for item in items] if is_call else []


def _call(item: Any) -> ToolCall:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return ToolCall(problem='the call is not an object {"name": ..., "arguments": {...}}')
    arguments = item.get("arguments", item.get("parameters", {}))
    if isinstance(arguments, str):  # some models quote them
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(item["name"], problem="the arguments are not an object of names and values")
    return ToolCall(item["name"], arguments)
