"""A wheel made as `python -m build` makes it works far from the checkout, with numpy and torch and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = Path(__file__).parent / "wheel" / "outside.py"


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


def needed_by(*names: str) -> set[str]:
    """These distributions and all that they need, of what is installed here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        try:
            requires = distribution(name).requires or []
        except PackageNotFoundError:  # for another platform
            continue
        if name not in found:
            found.add(name)
            waiting += [re.match(r"[\w.-]+", need)[0] for need in requires if "extra ==" not in need]
    return found


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
    assert {name for name in names if ".dist-info/" not in name} == source
    assert "moe_replay/py.typed" in names


@pytest.mark.slow
def test_the_wheel_works_with_numpy_and_torch_alone(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "outside", symlinks=True)
    python = tmp_path / "outside" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (packages,) = (tmp_path / "outside" / "lib").glob("python*/site-packages")
    for name in needed_by("torch", "numpy"):
        for part in parts_of(name):
            if part.exists() and not (packages / part.name).exists():
                (packages / part.name).symlink_to(part)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([python, OUTSIDE], cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.stdout == "the wheel works\n", done.stderr
