"""The JSON schema of a recipe, for editors, from the fields of the configuration.

`recipe.schema.json` is part of the package, and written by `reference.py`. The command line reads it for its help
text and for completion, which must not wait for pydantic and torch: so it also has what `--help` says of each key about
choices and default.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_replay.train.config.command_line import choices, default_text
from moe_replay.train.config.keys import ALIASES, enclosing_table, fields_of, sections
from moe_replay.train.config.plugin_names import PluginName
from moe_replay.train.config.train_config import TrainConfig

SCHEMA_FILE = Path(__file__).with_name("recipe.schema.json")


def recipe_schema() -> dict[str, Any]:
    """Return the schema: keys, types, bounds and texts of the configuration, and its other spellings."""
    schema = TrainConfig.model_json_schema()
    tables = {name: _resolved(schema, schema["properties"][name]) for name, _ in sections() if name}
    tables[""] = schema
    for name, section in sections():
        if name:
            tables[name]["description"] = section.__doc__
            schema["properties"][name].pop("default", None)
        for key, field in fields_of(name, section):
            found = tables[name]["properties"][key.removeprefix(f"{name}.")]
            found.pop("title", None)
            found["description"] = " ".join(str(field.description).split())
            found["x-default"] = default_text(field)
            if listed := choices(field):
                found["x-choices"] = listed[0]
            if (plugin := PluginName.of(field)) is not None:
                found["x-names"] = plugin.names()
    for other, ours in ALIASES.items():
        target, key = enclosing_table({name: table["properties"] for name, table in tables.items() if name}, ours)
        home = schema["properties"] if "." not in other else tables[other.partition(".")[0]]["properties"]
        home[other.rpartition(".")[2]] = {
            "description": f"The same as {ours}.",
            "x-alias": ours,
            **{name: value for name, value in target[key].items() if name in ("type", "anyOf")},
        }
    # What is accepted besides the names of the modes.
    modes = tables["replay"]["properties"]["mode"]
    modes["enum"] = [*modes["enum"], "R2", "R3", "disabled"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Recipe of moe-replay train", **schema}


def _resolved(schema: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    reference = found.get("$ref") or found["allOf"][0]["$ref"]
    return schema["$defs"][reference.rpartition("/")[2]]


def schema_text() -> str:
    """Return the text of `recipe.schema.json`."""
    return json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"
