"""Packages that a trainer imports for its rollouts and for GPUs, and no test of ours needs: modules that do nothing."""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent(ModuleType):
    """A module of which every attribute is a class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def import_without(name: str, absent: tuple[str, ...]) -> ModuleType:
    """Import a module of a trainer; packages whose names begin with one of `absent` stand in where they are missing."""
    missing_name = ""
    for _ in range(90):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as missing:
            missing_name = str(missing.name)
            if not missing_name.startswith(absent):
                raise
        module = Absent(missing_name)
        module.__spec__ = ModuleSpec(missing_name, None, is_package=True)
        sys.modules[missing_name] = module
        package = name.partition(".")[0]
        for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == package]:
            del sys.modules[loaded]
    raise AssertionError(f"{missing_name} is still missing")
