"""What `import moe_replay` offers, frozen: a change here is a change for users, and belongs in CHANGELOG.md."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moe_replay as mr

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "api.md"
FROZEN = Path(__file__).with_name("public_api.txt")
HANDED_OUT = {"replay.Recording", "replay.Replaying", "RouterReplay"}  # the library makes them, users do not


def described(name: str, thing: Any) -> Iterator[str]:
    """A function as one line; a class as its constructor, its own public methods and its properties."""
    if not inspect.isclass(thing):
        yield f"{name}{signature(thing)}"
        return
    if issubclass(thing, Exception):
        yield f"{name}({', '.join(base.__name__ for base in thing.__bases__)})"
        return
    yield name if name in HANDED_OUT else f"{name}{signature(thing)}"
    for member, value in sorted(vars(thing).items()):
        if member.startswith("_") and member not in ("__getitem__", "__len__", "__enter__", "__exit__", "__iter__"):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield f"{name}.{member}{signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}.{member}{signature(value)}"
        elif is_property(value):
            yield f"{name}.{member}"


def signature(function: Any) -> str:
    """As `inspect` shows it, without what differs between versions of Python and the values inside defaults."""
    text = str(inspect.signature(function)).replace("'", "").replace('"', "")
    return re.sub(r"ForwardRef\((\w+)[^)]*\)", r"\1", re.sub(r"= (\w+)\([^()]*\)", r"= \1(...)", text))


def is_property(value: Any) -> bool:
    return isinstance(value, property) or type(value).__name__ == "cached_property"


def public_names() -> dict[str, Any]:
    """Everything promised: the names of the package, and those that only its public modules have."""
    own = {name: getattr(mr, name) for name in mr.__all__ if name != "__version__"}
    modules = {name: thing for name, thing in own.items() if inspect.ismodule(thing)}
    for name in modules:
        del own[name]
    inside = {f"{m}.{name}": getattr(module, name) for m, module in modules.items() for name in module.__all__}
    return own | {name: thing for name, thing in inside.items() if thing not in own.values()}


NAMES = public_names()


def exported() -> list[str]:
    return [line for name in sorted(NAMES) for line in described(name, NAMES[name])]


def functions() -> dict[str, Any]:
    """Every public function, method and property of what is exported."""
    found: dict[str, Any] = {}
    for name, thing in NAMES.items():
        if inspect.isfunction(thing):
            found[name] = thing
        elif inspect.isclass(thing) and not issubclass(thing, (Exception, enum.Enum)):
            for member, value in vars(thing).items():
                plain = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
                if inspect.isfunction(plain) and not member.startswith("_"):
                    found[f"{name}.{member}"] = plain
    return found


def test_signatures_are_as_frozen() -> None:
    frozen = FROZEN.read_text().splitlines()
    added, gone = sorted(set(exported()) - set(frozen)), sorted(set(frozen) - set(exported()))
    assert not added, "new or changed: " + "\n".join(added)
    assert not gone, "gone or changed: " + "\n".join(gone)


def test_all_is_sorted_and_real() -> None:
    assert mr.__all__ == sorted(mr.__all__)
    assert all(thing.__module__.startswith("moe_replay.") for thing in NAMES.values())


def test_the_root_has_a_dozen_names() -> None:
    assert len([name for name in NAMES if "." not in name]) <= 13


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_documented(name: str) -> None:
    assert inspect.getdoc(NAMES[name])
    assert f"`{name}" in DOCUMENT.read_text()


def test_everything_is_typed() -> None:
    for name, function in functions().items():
        found = inspect.signature(function)
        given = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
        assert not [p.name for p in given if p.annotation is p.empty], name
        assert found.return_annotation is not found.empty, name


def test_an_old_promise_is_kept() -> None:
    """Every error of the library is a ValueError, as code that knows nothing of it expects."""
    errors = [thing for name, thing in NAMES.items() if name.endswith("Error")]
    assert len(errors) >= 8
    assert all(issubclass(error, ValueError) for error in errors)
