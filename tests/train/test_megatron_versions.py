"""The versions of Megatron-Core: routers from 0.12 on, the trainer from 0.16 on; code, package and texts agree."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from moe_replay.errors import MissingExtraError
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.train.setup.preflight import check_packages
from moe_replay.utils.tested_versions import MEGATRON_TRAINER, TESTED, check_megatron_trainer, dotted

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["0.12.1", "0.13.1", "0.15.3", "0.15.3+abc"])
def test_the_trainer_refuses_what_does_not_train_and_says_what_does(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingExtraError, match=r"expected at least 0\.16; .* from 0\.12 on, found 0\.1[0-9.+abc]+"):
        check_megatron_trainer(version)
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: version if name == "megatron-core" else known(name))
    config = TrainConfig.model_validate({"backend": {"kind": "megatron"}, "rollout": {"engine": "transformers"}})
    pytest.importorskip("megatron.core")
    with pytest.raises(MissingExtraError, match=r"pip install 'megatron-core>=0\.16'"):
        check_packages(config)


@pytest.mark.parametrize("version", ["0.16.0", "0.16.1", "0.19.2", "0.20.0rc1", "core_r0.15", None])
def test_versions_that_train_or_cannot_be_judged_are_not_refused(version: str | None) -> None:
    check_megatron_trainer(version)
    assert MEGATRON_TRAINER == (0, 16)


def test_package_and_texts_name_these_versions() -> None:
    oldest, newest = map(dotted, TESTED["megatron-core"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"megatron-core>={oldest}" in project["project"]["optional-dependencies"]["megatron"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"| Megatron-Core | {oldest} to {newest}, the trainer from {dotted(MEGATRON_TRAINER)} on" in readme
    (chinese,) = [
        line for line in (ROOT / "README.zh.md").read_text("utf-8").splitlines() if "| Megatron-Core |" in line
    ]
    assert all(release in chinese for release in (oldest, newest, dotted(MEGATRON_TRAINER)))
    page = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    assert f"The trainer's backend needs {dotted(MEGATRON_TRAINER)}" in page
    made = (ROOT / "Makefile").read_text(encoding="utf-8")
    (run,) = [line for line in made.splitlines() if line.startswith("MEGATRON_VERSIONS ?=")]
    assert run.split()[2].startswith(oldest)
    assert run.split()[-1].startswith(newest)
