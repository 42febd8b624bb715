"""Names in a configuration that stand for code: built in, or `module:attribute` of the user's own.

A registry is a plain mapping from name to implementation, or to the `module:attribute` it is imported from when it is
used. Adding an implementation is one file and one line in its registry.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from moe_replay.errors import MoeReplayError


class PluginError(MoeReplayError):
    """A name that is neither built in nor importable."""


def resolve(name: str, known: Mapping[str, Any], *, kind: str, key: str, forms: str = "'module:name'") -> Any:
    """Return the implementation called `name`.

    known   the registry
    kind    what is looked for, for errors: "reward"
    key     the setting that holds the name, for errors: "reward.functions"
    forms   what is accepted besides names in the registry, for errors
    """
    found = known.get(name, name)
    if not isinstance(found, str):
        return found
    if name not in known and not is_path(name):
        near = difflib.get_close_matches(name, known, n=1)
        raise PluginError(
            f"unknown {kind} {name!r}",
            expected=f"{key}: {', '.join(sorted(known)) or 'nothing is built in'}, or {forms}",
            remedy=f"Did you mean {near[0]!r}?" if near else None,
        )
    return import_path(found, kind=kind, key=key)


def is_path(name: str) -> bool:
    """Return whether a name has the form `module:attribute`."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def import_path(path: str, *, kind: str, key: str) -> Any:
    """Import `module:attribute`."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{kind} {path!r} cannot be loaded: {error}",
            expected=f"{key} = 'module:name'",
            remedy="The module must be importable where training runs, e.g. a file in the working directory",
        ) from error


@contextmanager
def user_code(name: str, error_type: type[MoeReplayError], **details: Any) -> Iterator[None]:
    """Name the function in what it raises: any exception but ours becomes an `error_type` with these details.

    name      kind and name of the function: "reward 'tests.rewards:exact'"
    details   `sample`, `found`, `remedy`, ... of the error
    """
    try:
        yield
    except MoeReplayError:
        raise
    except Exception as error:
        raise error_type(f"{name} raised {type(error).__name__}: {error}", **details) from error
