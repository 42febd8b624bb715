"""Releases of vLLM: refused at start with the version to install, or used with what they have."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import moe_replay
from moe_replay.engines.vllm.release import (
    INSTALL,
    NEWEST,
    OLDEST,
    RUN_ON,
    VllmRelease,
    check_version,
    chosen_capture,
    missing_names,
    release_numbers,
    returns_routes,
)
from moe_replay.errors import EngineError, EngineOptionError
from moe_replay.utils.tested_versions import TESTED, is_newer, notice_if_newer


@pytest.mark.parametrize("version", ["0.8.5", "0.22.0", "0.25.1", "0.27.0", "0.28.0", "0.29.0rc1", "0.29.1+cpu"])
def test_older_releases_are_refused_with_the_version_to_install(version: str) -> None:
    with pytest.raises(EngineError) as refused:
        VllmRelease(version).check()
    assert f"vLLM {version} cannot be used" in str(refused.value)
    assert "pip install 'vllm>=0.30,<0.34'" in str(refused.value)
    with pytest.raises(EngineError, match=r"at http://a:1 cannot be used.*there"):
        check_version(version, " at http://a:1")


@pytest.mark.parametrize("version", ["0.30.0", "0.30.1+cpu", "0.31.0", "0.32.0", "0.33.0", "0.34.0.dev7+g1234", "dev"])
def test_supported_and_newer_releases_are_used(version: str) -> None:
    release = VllmRelease(version)
    release.check()
    assert str(release.name) == f"vLLM {version}"


def test_a_release_without_what_is_used() -> None:
    with pytest.raises(EngineError, match=r"vLLM 0\.40\.0 cannot return routes.*found 0\.40\.0 without enable_return"):
        VllmRelease("0.40.0", missing=("enable_return_routed_experts",)).check()
    with pytest.raises(EngineError, match=r"vLLM 0\.40\.0 cannot be used.*without vllm\.exceptions:VLLMClientError"):
        VllmRelease("0.40.0", missing=("vllm.exceptions:VLLMClientError",)).check()


def test_names_are_looked_for_where_they_are_used() -> None:
    used = ("moe_replay.errors:EngineError", "moe_replay.errors:Nothing", "moe_replay.nothing:EngineError")
    assert list(missing_names(used)) == list(used[1:])


def test_our_capture_is_not_chosen_in_a_release_without_what_it_uses() -> None:
    lacks = ("vllm.model_executor.layers.fused_moe.layer:MoERunner",)
    assert chosen_capture("auto", {}) == "kv_slot"
    assert chosen_capture("auto", {}, lacks) == "vllm"
    assert chosen_capture("vllm", {}, lacks) == "vllm"
    for asked in ("kv_slot", "cross_check"):
        with pytest.raises(EngineOptionError, match=f"{asked}' cannot be used with a vLLM without .*MoERunner"):
            chosen_capture(asked, {}, lacks)


@pytest.mark.parametrize("on", [True, False])
def test_the_setting_of_routes_before_and_after_it_moved(on: bool) -> None:
    setting = SimpleNamespace(enable_return_routed_experts=on)
    assert returns_routes(SimpleNamespace(model_config=setting)) is on
    moved = SimpleNamespace(model_config=SimpleNamespace(), aux_output_config=setting)
    assert returns_routes(moved) is on


def test_the_extras_require_the_oldest_that_was_run_and_bound_none_from_above() -> None:
    assert sorted(RUN_ON) == [(0, minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert f"vllm>=0.{OLDEST[1]},<0.{NEWEST[1] + 1}" in INSTALL
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    required = [text for extra in project["project"]["optional-dependencies"].values() for text in extra]
    for package in ("vllm", "transformers", "megatron-core", "trl"):
        stated = {text for text in required if re.match(rf"{package}\b(?!\])", text)}
        (floor,) = {release_numbers(text.removeprefix(f"{package}>=")) for text in stated}
        assert floor[: len(TESTED[package][0])] == TESTED[package][0]


def test_a_newer_package_is_tried_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_newer("vllm", "0.34.0")
    assert not is_newer("vllm", "0.32.7")
    assert not is_newer("vllm", "dev")
    for _ in range(2):
        notice_if_newer("sglang", "0.5.99")
    assert capsys.readouterr().err == "SGLang 0.5.99 is newer than the newest tested (0.5.23); it is tried\n"
    notice_if_newer("sglang", "0.5.23")
    assert capsys.readouterr().err == ""


def test_the_installed_release_has_all_that_is_used() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    release = VllmRelease.installed()
    release.check()
    assert release_numbers(release.version) >= OLDEST
    assert release.missing_for_capture == ()


def test_every_name_that_is_imported_from_vllm_is_in_the_installed_one() -> None:
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("vLLM is not installed here")
    root = Path(package.submodule_search_locations[0]).parent
    folder = Path(moe_replay.__file__).parent
    absent = []
    for file in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                module = root.joinpath(*str(node.module).split("."))
                source = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
                known = _top_level_names(source) | {path.stem for path in module.glob("*")}
                absent += [f"{file.name}: {node.module}.{one.name}" for one in node.names if one.name not in known]
    assert absent == []


def _top_level_names(source: Path) -> set[str]:
    """Names that a module defines, imports, or lists as strings to be imported when they are used."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names
