"""Packages of which every module and every name can be imported, and nothing can be called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Missing(type):
    """What a hollow module has under any name: good as a type, a base class or a default, not for work."""

    def __call__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{cls.__module__}.{cls.__name__} is a stand-in and cannot be called")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {"__module__": f"{cls.__module__}.{cls.__name__}"})


def names_of(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a hollow module."""

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(name, (), {"__module__": module})

    return missing


class _Hollow(Loader, MetaPathFinder):
    """Makes the modules inside a package."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        inside = fullname.startswith(f"{self.package}.")
        return ModuleSpec(fullname, self, is_package=True) if inside else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__dict__["__getattr__"] = names_of(spec.name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def hollow_out(package: str) -> Callable[[str], Any]:
    """Every module inside the package can be imported from now on; the `__getattr__` of the package itself."""
    sys.meta_path.append(_Hollow(package))
    return names_of(package)
