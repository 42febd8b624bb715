"""Break the code in the ways that `mutants.toml` lists, and see that the test named for each notices.

    make mutants                              # all of them; minutes
    make mutants ONLY="merge clash"           # those whose name contains it

A mutant is killed if its test fails, and survives if it passes. One whose text is no longer found in its file, or whose
test cannot be run, is an error: the list must follow the code.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("src/moe_replay")
LIST = Path(__file__).with_name("mutants.toml")

OUTCOMES = {pytest.ExitCode.TESTS_FAILED: "killed", pytest.ExitCode.OK: "SURVIVED"}  # others: the test was not run
OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--no-header", "--show-capture=no")
PRELOADED = ("torch._dynamo", "transformers.models.qwen3_moe.modeling_qwen3_moe")  # once, not for each mutant


@dataclass(frozen=True)
class Mutant:
    """One change of the code that a test must notice.

    name  what the changed code does
    file  of the package
    old   text that occurs in it once
    new   what takes its place
    test  path and name of the test that must fail, with or without its parameters
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> Path:
        """Path of the file, from the root of the repository."""
        return PACKAGE / self.file

    def applied_to(self, text: str) -> str:
        """Return the text of the file with the change."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} has its text {text.count(self.old)} times instead of once")
        return text.replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Return the mutants of the list."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]


def start_tests(folder: Path, tests: Sequence[str]) -> int:
    """Run tests on the source in a folder, in a process of their own; return its id. The output goes to `folder`."""
    process = os.fork()
    if process:
        return process
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, str(folder / "src"))
    paths = [str(folder / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # for the processes that a test starts
    import moe_replay

    right = Path(moe_replay.__file__).is_relative_to(folder)  # and not the package that is installed
    os._exit(pytest.main([*OPTIONS, *tests]) if right else pytest.ExitCode.INTERNAL_ERROR)


def check_unchanged(snapshot: Path, mutants: Sequence[Mutant]) -> None:
    """Stop unless all tests pass without any change: only then does a failure mean anything."""
    process = start_tests(snapshot, sorted({mutant.test for mutant in mutants}))
    if os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != pytest.ExitCode.OK:
        raise SystemExit((snapshot / "output").read_text()[-4000:] + "\nfailed without any change of the code")


class Run:
    """The mutants that are being tried: copies of a snapshot of the source, each with its change."""

    def __init__(self, snapshot: Path) -> None:
        self.snapshot = snapshot
        self.survivors = 0
        self.running: dict[int, tuple[Mutant, Path, float]] = {}

    def start(self, mutant: Mutant) -> None:
        """Make the copy of a mutant and start its test."""
        folder = Path(tempfile.mkdtemp(dir=self.snapshot.parent))
        shutil.copytree(self.snapshot / "src", folder / "src")
        path = folder / mutant.path
        path.write_text(mutant.applied_to(path.read_text()))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()
        self.running[start_tests(folder, [mutant.test])] = (mutant, folder, time.monotonic())

    def finish_one(self) -> None:
        """Wait for a test to end, and say what became of its mutant."""
        process, status = os.wait()
        mutant, folder, began = self.running.pop(process)
        code = os.waitstatus_to_exitcode(status)
        outcome = OUTCOMES.get(code, f"NOT RUN ({code})")
        if outcome != "killed":
            self.survivors += 1
            print((folder / "output").read_text()[-2000:])
        print(f"{outcome:<9} {time.monotonic() - began:5.0f} s  {mutant.file}: {mutant.name}", flush=True)
        shutil.rmtree(folder)


def main() -> int:
    """Try the mutants; return 1 unless each is killed."""
    parser = argparse.ArgumentParser(description="Break the code and see that the tests notice.")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    arguments = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if arguments.only in mutant.name]
    if not mutants:
        parser.error(f"no mutant has {arguments.only!r} in its name")
    os.chdir(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "snapshot"
        shutil.copytree("src", snapshot / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for mutant in mutants:
            mutant.applied_to((snapshot / mutant.path).read_text())
        print(f"{len(mutants)} mutants; first their tests without any change", flush=True)
        check_unchanged(snapshot, mutants)
        run = Run(snapshot)
        for mutant in mutants:
            if len(run.running) == arguments.jobs:
                run.finish_one()
            run.start(mutant)
        while run.running:
            run.finish_one()
    print(f"{len(mutants) - run.survivors} of {len(mutants)} killed")
    return 1 if run.survivors else 0


if __name__ == "__main__":
    sys.exit(main())
