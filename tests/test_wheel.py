"""A wheel made as `python -m build` makes it works far from the checkout, with numpy and torch and nothing else."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.wheel.matrix import RESOLVED

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = Path(__file__).parent / "wheel" / "outside.py"
EXTRAS = OUTSIDE.with_name("extras.py")


def load(file: str) -> Any:
    """A module of the repository that is not in the package."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, ROOT / file)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


BUILD = load("hatch_build.py")  # computes version and README when the package is built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """First a source archive, then a wheel from what is in it: a file that the archive lacks is missed here."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("build")
    (archive,) = built("build_sdist", ROOT, folder)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (made,) = built("build_wheel", folder / archive.name.removesuffix(".tar.gz"), folder)
    return made


def built(what: str, project: Path, target: Path) -> list[Path]:
    code = f"import hatchling.build; print(hatchling.build.{what}({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [target / name for name in done.stdout.split()]


def needed_by(*needs: str) -> set[str]:
    """Distributions for these requirements, and all that they need in turn, of what is installed here."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = list(needs)
    while waiting:
        need = Requirement(waiting.pop())
        name, extras = need.name.lower().replace("_", "-"), frozenset(need.extras)
        if (name, extras) in found:
            continue
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # e.g. the GPU package of vLLM
            continue
        found.add((name, extras))
        waiting += [one for one in requires if applies(Requirement(one), extras)]
    return {name for name, _ in found}


def applies(need: Requirement, extras: Iterable[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in [*extras, ""])


def needs_of_extra(wheel: Path, *extras: str) -> list[str]:
    """What the wheel requires with these extras, those of its own resolved."""
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(content.read(name))
    found: list[str] = []
    waiting, seen = list(extras), set(extras)
    for need in map(Requirement, metadata.get_all("Requires-Dist", [])):
        if need.marker is None:
            found.append(str(need))
    while waiting:
        extra = waiting.pop()
        for need in map(Requirement, metadata.get_all("Requires-Dist", [])):
            if need.marker is not None and applies(need, [extra]):
                new = need.extras - seen if need.name == "moe-replay" else set()
                waiting, seen = [*waiting, *new], seen | new
                found += [] if need.name == "moe-replay" else [f"{need.name}[{','.join(need.extras)}]"]
    return found


def make_environment(folder: Path, wheel: Path, needs: Iterable[str]) -> Path:
    """A Python that has the wheel, what it needs as links to what is installed here, and nothing else."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages,) = (folder / "lib").glob("python*/site-packages")
    for name in needed_by(*needs):
        for part in parts_of(name):
            if part.exists() and not (packages / part.name).exists():
                (packages / part.name).symlink_to(part)
    return python


def run_outside(python: Path, *words: object, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([python, *map(str, words)], cwd=cwd, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def parts_of(name: str) -> Iterator[Path]:
    """What a distribution has in site-packages."""
    files = distribution(name).files or []
    for part in {file.parts[0] for file in files if file.parts[0] != ".."}:
        yield Path(str(distribution(name).locate_file(part)))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    source = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src" / "moe_replay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == source | {"moe_replay/VERSION"}
    assert "moe_replay/py.typed" in names


@pytest.mark.slow
@pytest.mark.whole_runs
def test_the_wheel_works_with_numpy_and_torch_alone(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "outside", wheel, ["torch", "numpy"])
    assert run_outside(python, OUTSIDE, cwd=tmp_path) == "the wheel works\n"


def test_each_extra_is_installed_alone_and_does_a_step() -> None:
    """By `make test-extras`, which is part of `make test-all`; vLLM needs a GPU, so it is resolved only."""
    makefile = (ROOT / "Makefile").read_text()
    (tried,) = re.findall(r"^EXTRAS \?= (.*)$", makefile, re.MULTILINE)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(tried.split()) == sorted(declared.keys() - {"dev"})
    (steps,) = re.findall(r"^STEPS = \((.*)\)$", EXTRAS.read_text(), re.MULTILINE)
    assert sorted([*steps.split(", "), *RESOLVED]) == sorted(tried.split())
    assert "test-extras" in makefile.partition("\ntest-all: ")[2].partition("##")[0].split()


def test_extras_come_from_the_indexes_of_pip() -> None:
    listed = """:env:.find-links='/wheels'
:env:.timeout='180'
global.cert='/own.pem'
global.extra-index-url='https://a.example/simple https://b.example/simple'
global.index-url='https://c.example/simple'
"""
    uv = load("requirements/uv.py")
    assert uv.certificates(listed) == {"SSL_CERT_FILE": "/own.pem"}
    assert uv.index_options(listed) == [
        "--find-links=/wheels",
        "--index=https://a.example/simple",
        "--index=https://b.example/simple",
        "--default-index=https://c.example/simple",
    ]


def test_an_environment_has_only_what_an_extra_needs(wheel: Path) -> None:
    assert "accelerate" not in needed_by(*needs_of_extra(wheel, "train"))
    assert "tyro" not in needed_by(*needs_of_extra(wheel))
    assert {"tyro", "transformers", "pydantic", "peft"} <= needed_by(*needs_of_extra(wheel, "lora"))


# ---- versions and links ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("described", "commit", "expected"),
    [
        ("v0.2.0-0-gabc1234", "abc1234", "0.2.0"),
        ("v0.2.0-7-gabc1234", "abc1234", "0.2.1.dev7+gabc1234"),
        ("v1.0.0rc1-0-gabc1234", "abc1234", "1.0.0rc1"),
        ("v1.0.0rc1-2-gabc1234", "abc1234", "1.0.0.dev2+gabc1234"),
        ("", "abc1234", "0.1.0.dev0+gabc1234"),
        ("", "", "0.1.0.dev0"),
    ],
)
def test_versions_come_from_tags(described: str, commit: str, expected: str) -> None:
    assert BUILD.from_description(described, commit) == expected
    assert str(Version(expected)) == expected


def test_links_of_the_readme_are_absolute_on_a_package_index(wheel: Path) -> None:
    text = "[a](docs/a.md#b) [b](https://x.y/z) ![c](docs/c.png) [d](#here)"
    told = "[a](R/blob/main/docs/a.md#b) [b](https://x.y/z) ![c](R/raw/main/docs/c.png) [d](#here)"
    assert BUILD.absolute_links(text, "R") == told
    with zipfile.ZipFile(wheel) as content:
        (name,) = [name for name in content.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = content.read(name).decode()
        version = content.read("moe_replay/VERSION").decode()
    assert f"\nVersion: {version.strip()}\n" in metadata
    assert "Project-URL: Repository, https://" in metadata
    assert "Description-Content-Type: text/markdown" in metadata
    assert not re.findall(r"\]\((?!https?://|#)[^)]*\)", metadata)
