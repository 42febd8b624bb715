"""Options of other trainers: each has a key that exists here, and is answered with it where it is given to ours."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.train.config.command_line import apply_overrides
from moe_replay.train.config.file import load_config
from moe_replay.train.config.foreign import TABLES, TRAINERS
from moe_replay.train.config.foreign.swift import MEGATRON_DEFAULTS, RENAMED, SWIFT_DEFAULTS
from moe_replay.train.config.foreign.swift import OPTIONS as SWIFT
from moe_replay.train.config.foreign.verl import DEFAULTS as VERL_DEFAULTS
from moe_replay.train.config.foreign.verl import OPTIONS as VERL
from moe_replay.train.config.keys import ConfigError, all_fields


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_option_has_a_key_of_ours_or_a_reason(trainer: str) -> None:
    keys = all_fields()
    for name, option in TRAINERS[trainer].items():
        assert option.key or option.note or option.values, name
        table = option.key.rpartition(".")[0]
        assert option.key in ("", *keys) or table in TABLES, f"{name}: {option.key}"


def test_defaults_are_those_of_options_that_are_known() -> None:
    assert set(MEGATRON_DEFAULTS) | set(SWIFT_DEFAULTS) | set(RENAMED.values()) <= set(SWIFT)
    assert set(VERL_DEFAULTS) <= set(VERL)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--model", "--model: no such option; model of ms-swift is --model.path here"),
        ("--epsilon", "epsilon of ms-swift and TRL is --algorithm.clip_low here"),
        ("--rollout", "--rollout: no such option; it is a section: --rollout.{engine,urls,token,...}"),
        ("--per_device_train_batch_size", "is --rollout.prompts_per_step here (sequences per forward pass)"),
        ("--vllm-tensor-parallel-size", "is --rollout.options tensor_parallel_size ... here"),
        ("--actor_rollout_ref.rollout.n", "of verl is --rollout.num_generations here"),
        ("--n_samples_per_prompt", "of OpenRLHF is --rollout.num_generations here"),
        ("--sequence_parallel", "has no counterpart here: sequence parallelism is always on"),
        ("--max_length", "did you mean --rollout.max_length? max_length of ms-swift is --data.max_prompt_length here"),
        ("--model_name_or_path", "of TRL is --model.path here"),
        ("--backend.tensor_paralel", "did you mean --backend.tensor_parallel?"),
    ],
)
def test_an_option_of_another_trainer_is_answered_with_ours(option: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        apply_overrides({}, [option, "1"])
    assert told in str(refused.value)


def test_a_key_of_another_trainer_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("epsilon = 0.2\n[algorithm]\nepsilon_high = 0.3\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert "epsilon: no such key; epsilon of ms-swift and TRL is algorithm.clip_low here" in str(refused.value)
    assert "epsilon_high of ms-swift and TRL is algorithm.clip_high here" in str(refused.value)


def test_an_argument_of_verl_in_place_of_a_recipe() -> None:
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.rollout.n of verl is rollout.num_generations here"):
        load_config(Path("actor_rollout_ref.rollout.n=8"))
