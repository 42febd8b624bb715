"""The keys of a recipe as the schema in the package has them: read without importing pydantic or torch."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SCHEMA = Path(__file__).resolve().parents[1] / "train" / "config" / "recipe.schema.json"


class Key(NamedTuple):
    """A key of a recipe: its dotted name, and its entry in the schema."""

    name: str
    entry: dict[str, Any]

    @property
    def option(self) -> str:
        """The key on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def values(self) -> list[str]:
        """The values that can be listed; empty if there are none."""
        listed = str(self.entry.get("x-choices", "")).split("|")
        is_switch = self.entry.get("type") == "boolean"
        return ["true", "false"] if is_switch else [value for value in listed if value and ":" not in value]


def sections(schema: Mapping[str, Any] | None = None) -> Iterator[tuple[str, str, list[Key]]]:
    """Yield name, description and keys of each section; first those outside of sections, with the name ""."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8")) if schema is None else schema
    yield "", "", _keys("", schema["properties"])
    for name, found in schema["properties"].items():
        if "$ref" in found:
            table = schema["$defs"][found["$ref"].rpartition("/")[2]]
            yield name, table["description"], _keys(f"{name}.", table["properties"])


def _keys(prefix: str, properties: dict[str, dict[str, Any]]) -> list[Key]:
    return [Key(prefix + name, one) for name, one in properties.items() if "x-default" in one]


def help_text(width: int, schema: Mapping[str, Any] | None = None) -> str:
    """Return every option of `moe-replay train` with its choices, its default and its description, by section."""
    blocks = []
    for name, description, keys in sections(schema):
        lines = [f"{name}: {description}" if name else "run:"]
        for key in keys:
            notes = [f"{key.entry['x-choices']}, "] if "x-choices" in key.entry else []
            text = f"{key.entry['description']} [{''.join(notes)}default {key.entry['x-default']}]"
            lines += textwrap.wrap(text, width, initial_indent=f"  {key.option:<34} ", subsequent_indent=" " * 37)
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
