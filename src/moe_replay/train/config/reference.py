"""The reference of the configuration, generated from its fields: `python -m moe_replay.train.config.reference`.

It prints docs/config.md, and writes the schema of recipes in this folder anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from moe_replay.train.config.file import toml_value
from moe_replay.train.config.keys import ALIASES, all_fields, fields_of, sections
from moe_replay.train.config.plugin_names import PluginName
from moe_replay.train.config.schema import SCHEMA_FILE, schema_text
from moe_replay.train.config.sections import Section
from moe_replay.train.config.train_config import TrainConfig

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m moe_replay.train.config.reference`. Edit the sections in train/config/, not this. -->

Every key of `moe-replay train`. A section is a table of a TOML file, and each of its keys an option of the command
line, which wins over the file:

```sh
moe-replay train recipe.toml --replay.mode r2 --optim.lr 1e-6 --rollout.urls http://a:8000 http://b:8000 \\
    --rollout.options tensor_parallel_size 2 enforce_eager true --no-resume
```

An unknown key and settings that contradict each other are errors before anything is loaded. `--dry-run` shows what a
configuration amounts to.
"""

BUILT_IN = """\
## Built-in names

Keys that name an implementation take one of these, or `module:name`: a function or class of your own, importable where
training runs.

| key | name | |
|---|---|---|
"""

OTHER_SPELLINGS = """\
## Other spellings

Names that other trainers use; accepted in a file and on the command line.

| written | means |
|---|---|
"""

KINDS = {int: "whole number", float: "number", bool: "true, false", str: "text", NoneType: ""}


def reference() -> str:
    """Return the text of docs/config.md."""
    parts = [INTRODUCTION, *(_section(name, section) for name, section in sections())]
    names = [
        f"| `{key}` | `{name}` | {_in_table(summary)} |"
        for key, field in all_fields().items()
        if (plugin := PluginName.of(field)) is not None
        for name, summary in plugin.summaries()
    ]
    spellings = [f"| `{other}` | `{ours}` |" for other, ours in ALIASES.items()]
    spellings += ['| `"R2"`, `"R3"`, `"disabled"` | `"r2"`, `"r3"`, `"off"` |']
    return "\n".join([*parts, BUILT_IN + "\n".join(names) + "\n", OTHER_SPELLINGS + "\n".join(spellings) + "\n"])


def _section(name: str, section: type[Section]) -> str:
    heading = f"## [{name}]" if name else "## The run"
    text = "Keys before the first section." if section is TrainConfig else section.__doc__
    rows = [
        f"| `{key}` | {_kind(field)} | {_default(field)} | {_in_table(str(field.description))} |"
        for key, field in _keys(name, section)
    ]
    return "\n".join([heading, "", str(text), "", "| key | value | default | |", "|---|---|---|---|", *rows, ""])


def _keys(name: str, section: type[Section]) -> Iterator[tuple[str, FieldInfo]]:
    yield from ((key.removeprefix(f"{name}."), field) for key, field in fields_of(name, section))


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
    """Escape what Markdown would read as a column or as HTML; code in backticks is shown as it is."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    return "`".join(part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts))


if __name__ == "__main__":
    SCHEMA_FILE.write_text(schema_text(), encoding="utf-8")
    sys.stdout.write(reference())
