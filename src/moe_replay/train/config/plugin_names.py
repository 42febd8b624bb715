"""Keys whose value names an implementation: a name in a registry, or `module:name` of the user's own.

The registry itself is the only list of the built-in names: checks, the help text and docs/config.md read it.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from pydantic.fields import FieldInfo

from moe_replay.utils.plugins import is_path, resolve


@dataclass(frozen=True)
class PluginName:
    """Annotates a field, or a list, of names.

    registry   returns the registry: name -> implementation
    kind       what a name refers to, for errors: "reward"
    forms      what is accepted besides the names in the registry
    offered    returns the names that are listed, where not all that are known make sense for this key
    """

    registry: Callable[[], Mapping[str, Any]]
    kind: str
    forms: tuple[str, ...] = ("module:name",)
    offered: Callable[[], Iterable[str]] | None = None

    @classmethod
    def of(cls, field: FieldInfo) -> PluginName | None:
        """Return the annotation of a field; None for keys that hold no such name."""
        return next((found for found in field.metadata if isinstance(found, cls)), None)

    def names(self) -> list[str]:
        """Return the built-in names, in the order of the registry."""
        return list(self.registry() if self.offered is None else self.offered())

    def problem(self, name: str) -> str | None:
        """Say what is wrong with a name, and what to write instead; None where nothing is. Nothing is imported."""
        if name in self.registry() or is_path(name):
            return None
        near = difflib.get_close_matches(name, self.names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return f"unknown {self.kind} {name!r}; write {', '.join([*self.names(), *self.forms])}{hint}"

    def summaries(self) -> Iterator[tuple[str, str]]:
        """Yield the built-in names that say what they are: by a description, or by the docstring of code."""
        for name in self.names():
            found = resolve(name, self.registry(), kind=self.kind, key=self.kind)
            is_code = isinstance(found, (type, FunctionType))  # the docstring of any other object is that of its class
            text = getattr(found, "description", None) or (is_code and inspect.getdoc(found)) or ""
            if text:
                yield name, text.partition("\n")[0].removeprefix("Return ")
