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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_replay.errors import MoeReplayError
from moe_replay.train.tool_calls import TOOL_FORMATS, ToolCall, ToolCallParser
from moe_replay.utils.messages import one_line
from moe_replay.utils.plugins import resolve, start_user_code, user_code

MAX_CALLS = 16
"""Calls of one turn that are answered."""

TOOLS: Mapping[str, Callable[..., Any] | str] = {}
"""Tools by name; `rollout.tools` takes these and `module:name`."""


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

    def kinds(self) -> dict[str, Any]:
        """Return name -> JSON type of each parameter."""
        properties = self.schema["function"]["parameters"].get("properties", {})
        return {name: about.get("type") for name, about in properties.items()}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a run, how calls of them are written, and the seconds that a call may take."""

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
            result = tool.function(**arguments)
            return _text(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)

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
        tool = describe(resolve(path, TOOLS, kind="tool", key="rollout.tools"), path)
        if tool.name in tools:
            raise ToolError(f"rollout.tools: two tools are called {tool.name!r}", remedy="Rename one of the functions")
        tools[tool.name] = tool
    parser = resolve(tool_format, TOOL_FORMATS, kind="format of tool calls", key="rollout.tool_format")
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
    """Return a parser that is named in what it raises."""

    def parse(text: str) -> list[ToolCall]:
        with user_code(f"format of tool calls {name!r}", ToolError):
            return list(parser(text))

    return parse


def _arguments(tool: Tool, call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call; values that the model wrote as text are read as the schema says.

    Raises TypeError where they do not fit the signature.
    """
    kinds = tool.kinds()
    given = {
        name: _value(value) if isinstance(value, str) and kinds.get(name) not in ("string", None) else value
        for name, value in call.arguments.items()
    }
    inspect.signature(tool.function).bind(**given)
    return given


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


async def _awaited(result: Any) -> Any:
    return await result


def _text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
