"""Imports go one way: the layers of docs/architecture.md, held against the code.

Every import counts, wherever it stands: at the top of a module, inside a function, under TYPE_CHECKING. So does a text
that names a module of ours, as registries have them, where only the direction is checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
PACKAGE = "moe_replay"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


class Import(NamedTuple):
    """One import of a module of ours by another."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        path = self.importer.replace(".", "/")
        return f"src/{path}:{self.line}: imports {self.imported}"


def documented_layers() -> list[list[str]]:
    """The layers from the lowest to the highest, each with its folders and files; several rows may share one."""
    text = ARCHITECTURE.read_text()
    table = text[text.index("<!-- layers -->") : text.index("<!-- /layers -->")]
    layers: dict[int, list[str]] = {}
    for line in table.splitlines():
        if row := re.match(r"\|\s*(\d+)\s*\|([^|]*)", line):
            layers.setdefault(int(row[1]), []).extend(re.findall(r"`([\w/.]+?)/?`", row[2]))
    return [layers[number] for number in sorted(layers)]


def read_modules(source: Path = SOURCE) -> dict[str, str]:
    """Dotted name -> text of every module."""
    modules = {}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts)
        modules[name.removesuffix(".__init__")] = path.read_text()
    return modules


def imports_of(modules: Mapping[str, str]) -> Iterator[Import]:
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names if alias.name.partition(".")[0] == PACKAGE]
            elif isinstance(node, ast.ImportFrom) and node.level:
                found = [f"relative.{node.module}"]  # in no layer: imports name the module in full
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                found = sorted({module if module in modules else str(node.module) for module in inside})
            else:
                continue
            yield from (Import(name, module, node.lineno) for module in found)


def named_by(modules: Mapping[str, str]) -> Iterator[Import]:
    """Texts such as "moe_replay.engines.vllm.engine:start", which are imported when they are used."""
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and re.fullmatch(rf"{PACKAGE}\.[\w.]+(:\w+)?", str(node.value)):
                yield Import(name, node.value.partition(":")[0], node.lineno)


def layer_of(module: str, layers: Iterable[Iterable[str]]) -> int | None:
    """The number of the layer that a module belongs to; the package itself stands above all of them."""
    if module == PACKAGE:
        return len(list(layers))
    top = module.split(".")[1]
    return next((number for number, names in enumerate(layers) if top in [n.removesuffix(".py") for n in names]), None)


def upward(modules: Mapping[str, str], layers: list[list[str]]) -> list[str]:
    """Imports of a higher layer, and modules that belong to none."""
    found = [f"{name}: in no layer" for name in modules if layer_of(name, layers) is None]
    for one in (*imports_of(modules), *named_by(modules)):
        above, own = layer_of(one.imported, layers), layer_of(one.importer, layers)
        if above is None or (own is not None and above > own):
            found.append(str(one))
    return found


def circles(modules: Mapping[str, str]) -> list[str]:
    """The imports that close a circle of modules, one line for each."""
    edges: dict[str, list[Import]] = {name: [] for name in modules}
    for one in imports_of(modules):
        if one.imported in edges and one.imported != one.importer:
            edges[one.importer].append(one)
    return closing(edges)


def folder_circles(modules: Mapping[str, str]) -> list[str]:
    """The imports that close a circle of the folders and files of one folder, one line for each."""
    found, imports = list[str](), list(imports_of(modules))
    for folder in sorted({name.rpartition(".")[0] for name in modules} - {""}):

        def entry(module: str, inside: str = f"{folder}.") -> str | None:
            return inside + module.removeprefix(inside).partition(".")[0] if module.startswith(inside) else None

        edges: dict[str, list[Import]] = {str(entry(name)): [] for name in modules if entry(name)}
        for one in imports:
            importer, imported = entry(one.importer), entry(one.imported)
            if importer and imported and importer != imported:
                edges[importer].append(one._replace(imported=imported))
        found += closing(edges)
    return found


def closing(edges: Mapping[str, list[Import]]) -> list[str]:
    """The edges that close a circle."""
    done: set[str] = set()
    found: list[str] = []

    def visit(name: str, way: list[str]) -> None:
        if name in done:
            return
        for one in edges[name]:
            if one.imported in way:
                circle = " -> ".join([*way[way.index(one.imported) :], one.imported])
                found.append(f"{one} ({circle})")
            else:
                visit(one.imported, [*way, one.imported])
        done.add(name)

    for name in edges:
        visit(name, [name])
    return found


def floors(modules: Mapping[str, str], folder: str) -> int:
    """The length of the longest chain of imports among the folders and files of a folder."""
    inside = f"{folder}."
    below: dict[str, set[str]] = {}
    for found in imports_of(modules):
        if found.importer.startswith(inside) and found.imported.startswith(inside):
            importer, imported = (
                name.removeprefix(inside).partition(".")[0] for name in (found.importer, found.imported)
            )
            if importer != imported:
                below.setdefault(importer, set()).add(imported)

    def floor(name: str) -> int:
        return 1 + max(map(floor, below.get(name, ())), default=0)

    return max(map(floor, below), default=0)


def test_every_module_imports_lower_layers_only() -> None:
    assert upward(read_modules(), documented_layers()) == []


def test_there_is_no_circle_of_imports() -> None:
    assert circles(read_modules()) == []


def test_there_is_no_circle_of_folders() -> None:
    assert folder_circles(read_modules()) == []


def test_the_trainer_has_at_most_nine_floors() -> None:
    assert floors(read_modules(), f"{PACKAGE}.train") <= 9


def test_every_layer_exists() -> None:
    modules = read_modules()
    named = [name for names in documented_layers() for name in names]
    assert len(named) == len(set(named)) >= 14
    tops = {name.split(".")[1] for name in modules if name != PACKAGE}
    assert tops == {name.removesuffix(".py") for name in named}


# ---- the rules catch what they should --------------------------------------------------------------------------------

LAYERS = [["errors.py"], ["routes"], ["train"]]
LOW = {"moe_replay.errors": "", "moe_replay.routes": "", "moe_replay.routes.trace": "", "moe_replay.train.loop": ""}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("moe_replay.routes.trace", "from moe_replay.train.loop import train"),
        ("moe_replay.routes.trace", "import moe_replay.train.loop"),
        ("moe_replay.routes.trace", "def f():\n    from moe_replay.train import loop"),
        (
            "moe_replay.routes.trace",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import moe_replay.train.loop",
        ),
        ("moe_replay.errors", "from moe_replay import __version__"),
        ("moe_replay.routes.trace", "from ..train import loop"),
        ("moe_replay.routes.trace", 'KNOWN = {"loop": "moe_replay.train.loop:train"}'),
        ("moe_replay.elsewhere", ""),
    ],
)
def test_an_import_of_a_higher_layer_is_found(module: str, text: str) -> None:
    (offence,) = upward({**LOW, module: text}, LAYERS)
    assert module.replace(".", "/") in offence or module in offence


def test_imports_of_lower_layers_pass() -> None:
    text = "from moe_replay.routes.trace import RouteTrace\nfrom moe_replay import routes\nimport torch"
    assert upward({**LOW, "moe_replay.train.loop": text}, LAYERS) == []
    assert upward({**LOW, "moe_replay": "from moe_replay.train.loop import train"}, LAYERS) == []


@pytest.mark.parametrize(
    "closing",
    [
        "from moe_replay.routes.codec import encode",
        "def f():\n    from moe_replay.routes import codec",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from moe_replay.routes.codec import encode",
    ],
)
def test_a_circle_is_found(closing: str) -> None:
    modules = {
        "moe_replay.routes": "",
        "moe_replay.routes.codec": "from moe_replay.routes.trace import RouteTrace",
        "moe_replay.routes.trace": closing,
    }
    (offence,) = circles(modules)
    assert "moe_replay.routes.trace" in offence
    assert "moe_replay.routes.codec" in offence
    assert circles({**modules, "moe_replay.routes.trace": ""}) == []


def test_a_module_that_imports_its_own_package_for_a_name_closes_a_circle() -> None:
    facade = {"moe_replay.routes": "from moe_replay.routes.trace import RouteTrace"}
    assert circles({**facade, "moe_replay.routes.trace": "from moe_replay.routes import RouteBatch"})
    assert not circles({**facade, "moe_replay.routes.trace": "from moe_replay.routes.codec import encode"})


def test_a_circle_of_folders_is_found() -> None:
    modules = {
        "moe_replay.train": "",
        "moe_replay.train.config": "",
        "moe_replay.train.config.sections": "from moe_replay.train.output.sinks import SINKS",
        "moe_replay.train.output": "",
        "moe_replay.train.output.sinks": "",
        "moe_replay.train.output.run_folder": "def f():\n    from moe_replay.train.config.sections import Section",
    }
    assert circles(modules) == []
    (offence,) = folder_circles(modules)
    assert "moe_replay.train.config" in offence
    assert "moe_replay.train.output" in offence
    assert folder_circles({**modules, "moe_replay.train.output.run_folder": ""}) == []
