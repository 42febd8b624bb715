"""One real step of every recipe on the embedded model: what `moe-replay train RECIPE --tiny` runs without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed import harness, megatron_models

pytest.importorskip("transformers", minversion="5.0")
harness.PRELOADED.extend(megatron_models.PRELOADED)

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.toml"))
LIBRARY = {"lora": "peft", "1gpu": "peft", "megatron": "megatron.core", "gspo": "megatron.core"}


def one_step(recipe: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train on this rank as the command does; the lines of the metrics."""
    from moe_replay.train.config.file import load_config
    from moe_replay.train.loop import train

    with mock.patch("moe_replay.train.config.file.find_spec", return_value=None):
        config = load_config(Path(recipe), overrides, tiny=True)
    return [json.loads(line) for line in (train(config) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_trains_the_embedded_model(demo_files: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip(LIBRARY.get(name.rpartition("-")[2], "transformers"))
    settings = {
        **{"model.path": demo_files.model, "data.path": demo_files.train, "output": tmp_path / "run"},
        **{"reward.workers": 0, "rollout.max_tokens": 8, "steps": 1},
    }
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    ((line,),) = harness.run_ranks(1, one_step, str(ROOT / "recipes" / f"{name}.toml"), overrides)
    assert line["step"] == 1
    assert line["routing/replayed_fraction"] > 0.5
