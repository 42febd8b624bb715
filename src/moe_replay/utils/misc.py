"""Helpers without dependencies: units, callback types, loopback names, texts of errors, lazy imports, eval mode."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

GIB = 2**30

ProgressCallback = Callable[[int, int], None]
"""Takes (done, total): samples of a rollout, updates of a step."""

StatusCallback = Callable[[str], None]
"""Takes one line of text."""

VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Accelerator type -> environment variable that selects devices; it must be set before torch is imported."""


def gib_or_kib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 0.01 * GIB else f"{nbytes / 2**10:.1f} KiB"


def text_of(completion: Any) -> str:
    """Return a completion as text: of a conversation, the last assistant message."""
    if isinstance(completion, str):
        return completion
    return next((m["content"] for m in reversed(completion) if m.get("role") == "assistant"), "")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine alone: localhost, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def printable(value: object, convert: Callable[[Any], str] = str) -> str:
    """Return the text of a user's object, without surrogates; its type if it cannot be converted."""
    try:
        text = convert(value)
    except Exception:  # of a user's __str__ or __repr__, or an integer of thousands of digits
        return type(value).__name__
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException, length: int = 300) -> str:
    """Return the message of an error in one line, shortened; its type if it has none."""
    text = " ".join(printable(error).split()) or type(error).__name__
    return text if len(text) <= length else f"{text[:length]}..."


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package whose names come from other modules.

    modules   name -> the module that defines it; a module that is itself the name ends with it
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(modules[name])
        value = module if modules[name] == f"{package}.{name}" else vars(module)[name]
        vars(sys.modules[package])[name] = value
        return value

    return get


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode; restore the mode of each module afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
