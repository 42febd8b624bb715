"""Configuration reference and recipe schema, generated from the fields.

`python -m moe_replay.train.config.reference` prints docs/config.md and writes `recipe.schema.json`, which is part of
the package: editors validate recipes with it, and `--help`, which must not wait for pydantic and torch, reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from moe_replay.train.config.command_line import choices, default_text
from moe_replay.train.config.file import toml_value
from moe_replay.train.config.keys import ALIASES, all_fields, enclosing_table, fields_of, sections
from moe_replay.train.config.registries import PluginName
from moe_replay.train.config.section import Section
from moe_replay.train.config.train_config import TrainConfig

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m moe_replay.train.config.reference`. Edit train/config/sections.py instead. -->

All keys of `moe-replay train`. A section is a table of the TOML recipe; each key is also a command line option, which
overrides the recipe:

```sh
moe-replay train recipe.toml --replay.mode r2 --optim.lr 1e-6 --rollout.urls http://a:8000 http://b:8000 \\
    --rollout.options tensor_parallel_size 2 enforce_eager true --no-resume
```

Unknown keys and contradictory settings are errors before anything is loaded. `--dry-run` prints the resulting run.
"""

BUILT_IN = """\
## Built-in names

Keys that name an implementation take one of these, or `module:name` of your own function or class.

| key | name | |
|---|---|---|
"""

OTHER_SPELLINGS = """\
## Other spellings

Names from other trainers, accepted in recipes and on the command line.

| written | means |
|---|---|
"""

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")

KINDS = {int: "integer", float: "number", bool: "true, false", str: "text", NoneType: ""}


def reference() -> str:
    """Return the text of docs/config.md."""
    parts = [INTRODUCTION, *(_section(name, section) for name, section in sections())]
    names = [
        f"| `{key}` | `{name}` | {_in_table(summary)} |"
        for key, field in all_fields().items()
        if (plugin := PluginName.of(field)) is not None
        for name, summary in plugin.summaries()
    ]
    spellings = [f"| `{alias}` | `{setting}` |" for alias, setting in ALIASES.items()]
    spellings += ['| `"R2"`, `"R3"`, `"disabled"` | `"r2"`, `"r3"`, `"off"` |']
    return "\n".join([*parts, BUILT_IN + "\n".join(names) + "\n", OTHER_SPELLINGS + "\n".join(spellings) + "\n"])


def _section(name: str, section: type[Section]) -> str:
    heading = f"## [{name}]" if name else "## The run"
    text = "Keys before the first section." if section is TrainConfig else section.__doc__
    prefix = f"{name}."
    rows = [
        f"| `{key.removeprefix(prefix)}` | {_kind(field)} | {_default(field)} | {_in_table(str(field.description))} |"
        for key, field in fields_of(name, section)
    ]
    return "\n".join([heading, "", str(text), "", "| key | value | default | |", "|---|---|---|---|", *rows, ""])


def _kind(field: FieldInfo) -> str:
    if (plugin := PluginName.of(field)) is not None:
        names = ", ".join(f"`{name}`" for name in [*plugin.names(), *plugin.forms])
        return f"list of {names}" if get_origin(field.annotation) is tuple else names
    return ", ".join([_named(field.annotation), *_bounds(field)])


def _bounds(field: FieldInfo) -> Iterator[str]:
    for limit in field.metadata:
        match limit:
            case Ge(lowest):
                yield f"at least {lowest}"
            case Gt(bound):
                yield f"more than {bound}"
            case Le(highest):
                yield f"at most {highest}"


def _named(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is tuple:
        return "list"
    if get_origin(kind) is dict:
        return "table"
    if get_origin(kind) is Annotated:  # its other arguments are bounds
        return _named(get_args(kind)[0])
    if parts := get_args(kind):
        return " ".join(filter(None, map(_named, parts)))
    return KINDS.get(kind, "path")


def _default(field: FieldInfo) -> str:
    return "" if field.default is None else f"`{toml_value(field.default)}`"


def _in_table(text: str) -> str:
    """Escape column separators and HTML outside of backticks."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


def recipe_schema() -> dict[str, Any]:
    """Return the schema: keys, types, bounds, help texts and aliases."""
    schema = TrainConfig.model_json_schema()
    tables = {name: _resolved(schema, schema["properties"][name]) for name, _ in sections() if name}
    tables[""] = schema
    for name, section in sections():
        if name:
            tables[name]["description"] = section.__doc__
            schema["properties"][name].pop("default", None)
        for key, field in fields_of(name, section):
            entry = tables[name]["properties"][key.removeprefix(f"{name}.")]
            entry.pop("title", None)
            entry["description"] = " ".join(str(field.description).split())
            entry["x-default"] = default_text(field)
            if listed := choices(field):
                entry["x-choices"] = listed[0]
            if (plugin := PluginName.of(field)) is not None:
                entry["x-names"] = plugin.names()
    for alias, setting in ALIASES.items():
        target, key = enclosing_table({name: table["properties"] for name, table in tables.items() if name}, setting)
        home = schema["properties"] if "." not in alias else tables[alias.partition(".")[0]]["properties"]
        home[alias.rpartition(".")[2]] = {
            "description": f"The same as {setting}.",
            "x-alias": setting,
            **{name: value for name, value in target[key].items() if name in ("type", "anyOf")},
        }
    # the spellings of ms-swift
    modes = tables["replay"]["properties"]["mode"]
    modes["enum"] = [*modes["enum"], "R2", "R3", "disabled"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Recipe of moe-replay train", **schema}


def _resolved(schema: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    reference = entry.get("$ref") or entry["allOf"][0]["$ref"]
    return schema["$defs"][reference.rpartition("/")[2]]


def schema_text() -> str:
    """Return the text of `recipe.schema.json`."""
    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(reference())
