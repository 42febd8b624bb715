"""Releases of vLLM: refused at start with the version to install, or used with what they have."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

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


@pytest.mark.parametrize("version", ["0.8.5", "0.22.0", "0.25.1", "0.27.0", "0.28.0", "0.29.0rc1", "0.29.1+cpu"])
def test_older_releases_are_refused_with_the_version_to_install(version: str) -> None:
    with pytest.raises(EngineError) as refused:
        VllmRelease(version).check()
    assert f"vLLM {version} cannot be used" in str(refused.value)
    assert "pip install 'vllm>=0.30,<0.33'" in str(refused.value)
    with pytest.raises(EngineError, match=r"at http://a:1 cannot be used.*there"):
        check_version(version, " at http://a:1")


@pytest.mark.parametrize("version", ["0.30.0", "0.30.1+cpu", "0.31.0", "0.32.0", "0.33.0.dev7+g1234", "dev"])
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


def test_the_extra_installs_what_was_run() -> None:
    assert sorted(RUN_ON) == [OLDEST, (0, 31), NEWEST]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    (pinned,) = project["project"]["optional-dependencies"]["vllm"]
    assert pinned == f"vllm>=0.{OLDEST[1]},<0.{NEWEST[1] + 1}"
    assert pinned in INSTALL


def test_the_installed_release_has_all_that_is_used() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here")
    release = VllmRelease.installed()
    release.check()
    assert release_numbers(release.version) >= OLDEST
    assert release.missing_for_capture == ()
