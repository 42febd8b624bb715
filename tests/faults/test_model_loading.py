"""What libraries raise while a model is loaded on several ranks: one sentence, printed by one of them, and status 2."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")
pytest.importorskip("transformers", reason="tiny models")

from moe_replay.cli.main import main
from moe_replay.train.config.file import to_toml
from tests.distributed.harness import run_ranks
from tests.train.runs import tiny_config

pytestmark = pytest.mark.distributed


def train_on_rank(recipe: str, cases: list[list[str]]) -> list[list[Any]]:
    """What a rank prints to standard error, and its status, in each case."""
    ends = []
    for words in cases:
        printed = io.StringIO()
        with pytest.raises(SystemExit) as left, contextlib.redirect_stderr(printed):
            main(["train", recipe, *words])
        ends.append([printed.getvalue(), left.value.code])
    return ends


def ends_of(demo_files: Any, folder: Path, *cases: list[str]) -> list[str]:
    """The error that rank 0 of 2 prints in each case; rank 1 prints none. Warnings of libraries do not count."""
    recipe = folder / "recipe.toml"
    recipe.write_text(to_toml(tiny_config(demo_files.model, demo_files.train, folder / "run")))
    told = []
    for on_0, on_1 in zip(*run_ranks(2, train_on_rank, str(recipe), list(cases)), strict=True):
        assert on_0[1] == on_1[1] == 2
        assert "Traceback" not in on_0[0] + on_1[0]
        assert "error on rank" not in on_1[0]
        (line,) = [line for line in on_0[0].splitlines() if line.startswith("error on rank")]
        told.append(line)
    return told


def with_setting(model: Path, folder: Path, **settings: Any) -> list[str]:
    """Words that train a copy of a model whose config.json says something else."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return ["--model.path", str(folder)]


def test_what_transformers_raises_is_one_sentence(demo_files: Any, tmp_path: Path) -> None:
    flash, activation, dtype, lora = ends_of(
        demo_files,
        tmp_path,
        ["--model.attn_implementation", "flash_attention_2", "--model.dtype", "bfloat16"],
        with_setting(demo_files.model, tmp_path / "activation", hidden_act="nonsense"),
        with_setting(demo_files.model, tmp_path / "dtype", dtype=[]),
        ["--model.lora-rank", "2", "--model.lora-target-modules", "no_such_layer"],
    )
    assert "FlashAttention2" in flash
    assert flash.endswith("Install it, or set model.attn_implementation = 'sdpa'")
    assert "nonsense" in activation
    assert f"{tmp_path / 'dtype'}" in dtype
    assert "no_such_layer" in lora


def test_what_megatron_core_raises_is_one_sentence(demo_files: Any, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="the other backend")
    words = ["--backend.kind", "megatron"]
    ranks, norm = ends_of(
        demo_files,
        tmp_path,
        [*words, "--backend.tensor-parallel", "3"],
        [*words, "--backend.megatron", "normalization", "Nonsense"],
    )
    assert "Megatron-Core cannot divide the ranks: " in ranks
    assert "Megatron-Core cannot build the model: Only LayerNorm" in norm
