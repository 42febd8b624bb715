"""Each extra of the wheel alone: installed from the package index into a new environment, then one real step with it.

make test-extras EXTRAS="cli train"

uv resolves the extra, and an environment is made to hold just that: what only the extra before needed is removed, what
is missing is linked from uv's cache. So torch is neither unpacked nor compiled for each extra. Bytecode that the
environment of the tests has is linked too. What needs a GPU is resolved only.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from queue import Empty, SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
STEPS = Path(__file__).with_name("extras.py")
WITH_INDEXES = ROOT / "requirements" / "uv.py"
RESOLVED = {"vllm": ("vllm", "0.32.0")}
"""Extras that need a GPU: the package, and its version that was run on one (docs/gpu.md)."""
GPU_PLATFORM = "x86_64-manylinux_2_28"
LIMIT_S = 900.0


def main() -> None:
    """Install and try the extras, and exit with 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for environments and files; emptied first")
    parser.add_argument(
        "--cache", type=Path, help="of uv, on the same file system, or files are copied; None: uv's own"
    )
    parser.add_argument("--uv", type=Path, required=True, help="its program")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--constraints", type=Path, nargs="*", default=[], help="files of versions, for what is needed")
    parser.add_argument("--own-constraints", type=Path, help="folder of EXTRA.txt, which replaces these for that extra")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    uv = Uv(arguments.uv, arguments.cache)
    matrix = Matrix(uv, arguments.folder.resolve(), arguments.constraints, arguments.own_constraints)
    waiting = SimpleQueue[str]()
    for extra in arguments.extras:
        waiting.put(extra)
    with ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        lanes = [pool.submit(matrix.work, lane, waiting) for lane in range(max(1, arguments.jobs))]
        failures = [failure for lane in lanes for failure in lane.result()]
    print(*failures, sep="\n", end="", file=sys.stderr)
    sys.exit(bool(failures))


class Uv:
    """uv, with the package indexes that pip is configured for."""

    def __init__(self, program: Path, cache: Path | None) -> None:
        self._program = program.resolve()
        self._options = ["--quiet", "--no-python-downloads", *(["--cache-dir", cache.resolve()] if cache else [])]

    def environment(self, folder: Path) -> Path:
        """Make a new environment; return its Python."""
        call([self._program, *self._options, "--no-config", "venv", "--python", sys.executable, folder])
        return folder / "bin" / "python"

    def resolve(self, what: str, *options: object) -> str:
        """Return the requirement and all it needs, each with its version, as lines for `sync`."""
        return self._pip("compile", "--no-header", "--no-annotate", *options, "-", given=what)

    def sync(self, python: Path, pinned: Path) -> None:
        """Make an environment hold these packages and no others."""
        self._pip("sync", "--python", python, pinned)

    def _pip(self, *words: object, given: str | None = None) -> str:
        return call([sys.executable, WITH_INDEXES, self._program, *self._options, "pip", *words], given)


class Matrix:
    """The wheel of this checkout, and its extras one after another."""

    def __init__(self, uv: Uv, folder: Path, constraints: Sequence[Path], own_constraints: Path | None) -> None:
        self._uv, self._folder = uv, folder
        self._constraints, self._own_constraints = constraints, own_constraints
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
        call([*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT])
        (self._wheel,) = folder.glob("*.whl")

    def work(self, lane: int, waiting: SimpleQueue[str]) -> list[str]:
        """Try extras in an environment of this lane until none waits; return what went wrong."""
        python = self._uv.environment(self._folder / f"env-{lane}")
        failures = []
        with suppress(Empty):
            while True:
                extra = waiting.get_nowait()
                try:
                    done = self._resolve(extra) if extra in RESOLVED else self._install(extra, python)
                    print(f"moe-replay[{extra}]: {done}", flush=True)
                except subprocess.CalledProcessError as error:
                    failures.append(f"moe-replay[{extra}]: {shlex.join(map(str, error.cmd))}\n{error.output}")
                except AssertionError as wrong:
                    failures.append(f"moe-replay[{extra}]: {wrong}")
        return failures

    def _install(self, extra: str, python: Path) -> str:
        began, files = time.monotonic(), self._folder / extra
        files.mkdir()
        chosen = [word for file in self._constraints_of(extra) for word in ("--constraints", file.resolve())]
        pinned = files / "pinned.txt"
        pinned.write_text(self._uv.resolve(self._requirement(extra), "--python", python, *chosen))
        self._uv.sync(python, pinned)
        packages = packages_of(python)
        left = left_over(packages)
        assert not left, f"the environment has what no package of it owns: {left}"
        link_bytecode(Path(sysconfig.get_path("purelib")), packages)
        installed = time.monotonic()
        call([python, STEPS, extra, files])
        return f"installed in {installed - began:.1f} s, one step in {time.monotonic() - installed:.1f} s"

    def _resolve(self, extra: str) -> str:
        lines = self._uv.resolve(self._requirement(extra), "--python-platform", GPU_PLATFORM).splitlines()
        versions = dict(line.split("==") for line in lines if "==" in line)
        package, tested = RESOLVED[extra]
        assert versions[package] == tested, f"resolves to {package} {versions[package]}, but {tested} was run"
        return f"resolves to {package} {tested}, torch {versions['torch']}"

    def _requirement(self, extra: str) -> str:
        return f"moe-replay[{extra}] @ {self._wheel.as_uri()}"

    def _constraints_of(self, extra: str) -> Sequence[Path]:
        own = self._own_constraints and self._own_constraints / f"{extra}.txt"
        return [own] if own and own.exists() else self._constraints


def packages_of(python: Path) -> Path:
    """Return the folder of the packages of an environment."""
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return packages


def link_bytecode(ours: Path, theirs: Path) -> None:
    """Link compiled modules from one folder of packages into another that has the modules, and not yet compiled.

    Python compares size and time of a module with what its bytecode was made from, and compiles again if they differ.
    """
    for folder, _, files in os.walk(ours):
        other = theirs / Path(folder).relative_to(ours)
        if not folder.endswith("/__pycache__") or not other.parent.is_dir():
            continue
        has, compiled = set(os.listdir(other.parent)), set(os.listdir(other)) if other.is_dir() else set()
        wanted = [file for file in files if file not in compiled and f"{file.split('.')[0]}.py" in has]
        if wanted:
            other.mkdir(exist_ok=True)
        for file in wanted:
            with suppress(OSError):  # another file system: it is compiled when it is imported
                os.link(Path(folder, file), other / file)


def left_over(packages: Path) -> list[str]:
    """Return what could be imported in an environment although no installed package has it."""
    owned = {file.parts[0] for one in distributions(path=[str(packages)]) for file in one.files or ()}
    kept = {"__pycache__", "_virtualenv.py", "_virtualenv.pth"}  # uv's own
    return sorted({file.name for file in packages.iterdir()} - owned - kept)


def call(words: Sequence[object], given: str | None = None) -> str:
    """Return what a command printed on stdout; it knows nothing of the checkout that it is called from."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command = [str(word) for word in words]
    done = subprocess.run(
        command, cwd=ROOT.anchor, env=clean, input=given, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
