"""Trainers that load a module of ours: the versions it was run with, what it relies on, and settings of a run.

Their processes import our module for many purposes, also where nothing is trained. So nothing is imported before the
trainer does it: `after_import` waits for the module that we change.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

from moe_replay.errors import MoeReplayError


class HostError(MoeReplayError):
    """A trainer, or settings of it, with which routes cannot be replayed or checked."""


@contextmanager
def printed_before_raised(*, warns: bool = False) -> Iterator[None]:
    """Print an error before it is raised, since other ranks may wait in a collective until it times out.

    warns   print it, and raise nothing
    """
    try:
        yield
    except MoeReplayError as error:
        print(f"moe-replay {'warns' if warns else 'stops this run'}: {error}", file=sys.stderr, flush=True)
        if not warns:
            raise


@dataclass(frozen=True, slots=True)
class Host:
    """A trainer that loads our module.

    package    its name on the package index
    versions   those that our tests run with, the oldest first
    load       the setting that makes it load us
    changes    engine -> what becomes of it, and in which process
    """

    package: str
    versions: tuple[str, ...]
    load: str
    changes: Mapping[str, str]

    def check_version(self) -> None:
        """Raise unless the installed version is known."""
        installed = metadata.version(self.package)
        if installed not in (*self.versions, os.environ.get(ALLOWED_VERSION)):
            raise HostError(
                f"this version of {self.package} was not tested, and replay relies on its internals",
                expected=f"{self.package} {', '.join(self.versions)}",
                found=installed,
                remedy=f"Install a tested version; {ALLOWED_VERSION}={installed} tries this one",
            )

    def check_parameters(self, module: ModuleType, expected: Mapping[str, Sequence[str]]) -> None:
        """Raise unless functions of a module of this trainer, by dotted name, have the parameters we call them with."""
        for name, parameters in expected.items():
            function: Any = module
            for part in name.split("."):
                function = getattr(function, part, None)
            actual = None if function is None else tuple(inspect.signature(function).parameters)
            if actual != tuple(parameters):
                raise HostError(
                    f"{module.__name__}.{name} of {self.package} {metadata.version(self.package)} is another function",
                    expected=f"({', '.join(parameters)})",
                    found="none" if actual is None else f"({', '.join(actual)})",
                    remedy=f"Install {self.package} {' or '.join(self.versions)}",
                )


ALLOWED_VERSION = "MOE_REPLAY_ALLOW_VERSION"

VERL = Host(
    "verl",
    ("0.8.0", "0.9.0", "0.9.1"),
    "actor_rollout_ref.model.external_lib=moe_replay.integrations.verl",
    {
        "FSDP": "replays R2 and R3 in the workers of the actor; verl has no replay for it",
        "Megatron": "checks verl's replay there, or replaces it, from 0.9.0 on",
    },
)
MS_SWIFT = Host(
    "ms-swift",
    ("4.5.0", "4.5.1", "4.5.2", "4.5.3", "4.6.0"),
    "--external_plugins plugin.py, which `moe-replay plugin ms-swift > plugin.py` writes",
    {"Megatron GRPO, also on Ray": "checks --router_replay_mode R2 and R3 in every training rank, or replaces it"},
)
HOSTS = {host.package: host for host in (VERL, MS_SWIFT)}


# ---- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Settings of a run, from the trainer's own where it passes them on, else from MOE_REPLAY_<NAME>.

    mode              disabled, R2 or R3
    check_every       old-log-prob passes, and apart from them updates, from one alignment check to the next; 0: none
    compare_every     updates between two forwards of one micro-batch without replay, for k3_native; 0: none
    on_misalignment   stop or warn
    guard             what is done about a trainer's own replay: check it, or fix it by ours
    """

    mode: Literal["disabled", "R2", "R3"] = "disabled"
    check_every: int = 1
    compare_every: int = 10
    on_misalignment: Literal["stop", "warn"] = "stop"
    guard: Literal["check", "fix"] = "check"

    @classmethod
    def read(cls, configured: Mapping[str, Any]) -> ReplaySettings:
        """Return the settings; those in `configured` come first, None means not set."""
        names = [field.name for field in fields(cls)]
        values = {name: os.environ.get(f"MOE_REPLAY_{name.upper()}") for name in names if name != "mode"}
        for name, value in configured.items():
            if value is None or name.startswith("_"):
                continue
            if name not in names:
                raise HostError(f"unknown setting router_replay.{name}", expected=", ".join(names), found=value)
            values[name] = value
        hints = get_type_hints(cls)
        return cls(
            **{name: _checked(name, value, hints[name]) for name, value in values.items() if value not in (None, "")}
        )


def _checked(name: str, value: Any, kind: Any) -> Any:
    """Return the value as its type, from text too."""
    allowed = get_args(kind)
    if allowed and value in allowed:
        return value
    if not allowed and str(value).isdecimal():
        return int(value)
    raise HostError(f"impossible value of {name}", expected=" or ".join(allowed) or "a number", found=repr(value))


# ---- modules that are not there yet ----------------------------------------------------------------------------------


def after_import(name: str, function: str) -> None:
    """Call `function`, "module:name", with a module as soon as it has been imported; now, if it has been already."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Waiting(name, function))
    else:
        resolve_name(function)(module)


class _Waiting(MetaPathFinder, Loader):
    """Finds one module, by asking everyone else, and calls a function once it is loaded."""

    def __init__(self, name: str, function: str) -> None:
        self._name = name
        self._function = function
        self._loader: Any = None

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        resolve_name(self._function)(module)
