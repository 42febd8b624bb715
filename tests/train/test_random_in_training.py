"""What a model's config makes random in training is off: scoring and training compute the same function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from moe_replay.train.backends.fsdp_loading import sharded_model
from moe_replay.train.config.sections import ModelConfig
from tests.models import random_ids
from tests.replay.adapters.families import RELEASE, tiny_model

CPU = torch.device("cpu")


def saved(model: Any, folder: Path, part: str | None, setting: str) -> str:
    """Return a folder of the model, whose config has a random setting in one of its parts."""
    config = model.config if part is None else getattr(model.config, part)
    setattr(config, setting, 0.3)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("family", "part", "setting"),
    [
        ("qwen3_moe", None, "attention_dropout"),
        ("mixtral", None, "router_jitter_noise"),
        ("dbrx", None, "resid_pdrop"),
        ("dbrx", "attn_config", "attn_pdrop"),
        ("dbrx", "ffn_config", "moe_jitter_eps"),
    ],
)
@pytest.mark.usefixtures("group")
def test_a_forward_in_training_is_one_in_scoring(tmp_path: Path, family: str, part: str | None, setting: str) -> None:
    folder = saved(tiny_model(family), tmp_path, part, setting)
    config = ModelConfig(dtype="float32", attn_implementation="eager")
    model, ids = sharded_model(folder, config, CPU, trained=True), random_ids(2, 9, seed=1, vocabulary=40)
    with torch.no_grad():
        scored = model.eval()(input_ids=ids, use_cache=False).logits
        assert torch.equal(model.train()(input_ids=ids, use_cache=False).logits, scored)


@pytest.mark.skipif(RELEASE < 5, reason="release 4 does not take the language model out of such a config")
@pytest.mark.usefixtures("group")
def test_the_text_part_of_a_config_counts(tmp_path: Path) -> None:
    from transformers import Qwen3_5MoeConfig

    text = tiny_model("qwen3_5_moe_text")
    text.config.attention_dropout = 0.3
    text.save_pretrained(tmp_path)
    Qwen3_5MoeConfig(text_config=text.config).save_pretrained(tmp_path)
    config = ModelConfig(dtype="float32", attn_implementation="eager")
    model, ids = sharded_model(str(tmp_path), config, CPU, trained=True), random_ids(2, 9, seed=1, vocabulary=40)
    with torch.no_grad():
        scored = model.eval()(input_ids=ids, use_cache=False).logits
        assert torch.equal(model.train()(input_ids=ids, use_cache=False).logits, scored)
