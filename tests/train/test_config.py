"""Configurations: what they are made from, what is refused, and how it is said."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.cli.train import USUAL, TrainCommand, help_text
from moe_replay.engines.registry import ENGINES, EngineSpec
from moe_replay.megatron.weights import WEIGHT_MAPS
from moe_replay.routes.router_families import ROUTER_FAMILIES
from moe_replay.train.config.checks import warnings
from moe_replay.train.config.file import load_config, to_toml
from moe_replay.train.config.keys import ALIASES, RENAMED, ConfigError, all_fields, sections
from moe_replay.train.config.reference import recipe_schema, reference
from moe_replay.train.config.registries import (
    ADVANTAGES,
    ENVIRONMENTS,
    LOSSES,
    REWARDS,
    SINKS,
    TOOL_FORMATS,
    WEIGHT_TRANSPORTS,
    PluginName,
    WeightTransport,
)
from moe_replay.train.config.train_config import TrainConfig
from moe_replay.utils.secrets import is_secret_name

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "recipe.toml"
    path.write_text(text if "[model]" in text else f'model.path = ""\n{text}')
    return path


def refused(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(written(folder, text), overrides)
    return str(caught.value)


# ---- where values come from ------------------------------------------------------------------------------------------


def test_without_anything_there_are_defaults() -> None:
    config = load_config(None)
    assert config == TrainConfig()
    assert (config.rollout.sequences, config.sequences_per_update) == (64, 64)


def test_the_command_line_wins_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = written(tmp_path, "steps = 7\n[optim]\nlr = 1e-3\neps = 1e-6\n")
    config = load_config(path, ["--optim.lr", "1e-4", "--name=mine"])
    assert (config.steps, config.optim.lr, config.optim.eps, config.name) == (7, 1e-4, 1e-6, "mine")
    assert config.optim.weight_decay == TrainConfig().optim.weight_decay


def test_only_the_outcome_has_to_make_sense(tmp_path: Path) -> None:
    text = '[rollout]\nengine = "rollout_server"\n'
    assert "rollout.urls" in refused(text, tmp_path)
    urls = ("http://a:1", "http://b:2")
    assert load_config(written(tmp_path, text), ["--rollout.urls", *urls]).rollout.urls == urls


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--rollout.sleep"], "rollout.sleep", True),
        (["--rollout.sleep", "true"], "rollout.sleep", True),
        (["--replay.no-observe"], "replay.observe", False),
        (["--replay.observe", "False"], "replay.observe", False),
        (["--no-resume"], "resume", False),
        (["--data.max-prompt-length", "9"], "data.max_prompt_length", 9),
        (["--data.max_prompt_length=9"], "data.max_prompt_length", 9),
        (["--optim.betas", "0.5", "0.6"], "optim.betas", (0.5, 0.6)),
        (["--reward.weights", "2"], "reward.weights", (2.0,)),
        (["--reward.weights", "none"], "reward.weights", None),
        (["--output", "runs/mine"], "output", Path("runs/mine")),
        (["--output", "none"], "output", None),
        (["--algorithm.advantage", "rloo"], "algorithm.advantage", "rloo"),
        (["--steps", "3", "--steps", "4"], "steps", 4),
    ],
)
def test_words_of_the_command_line(words: list[str], key: str, value: object) -> None:
    section, _, name = key.rpartition(".")
    config = load_config(None, words)
    assert getattr(getattr(config, section) if section else config, name) == value


def test_the_command_line_adds_to_the_options_of_an_engine(tmp_path: Path) -> None:
    path = written(tmp_path, "[rollout]\noptions = {seed = 1, dtype = 'half'}\n")
    words = ["--rollout.options", "seed", "2", "eager", "true", "ratio", "0.5", "name", "a.b", "flag", "False"]
    options = load_config(path, words).rollout.options
    assert options == {"seed": 2, "dtype": "half", "eager": True, "ratio": 0.5, "name": "a.b", "flag": False}
    assert [type(value) for value in options.values()] == [int, str, bool, float, str, bool]


@pytest.mark.parametrize(("spelled", "mode"), [("R2", "r2"), ("R3", "r3"), ("disabled", "off"), ("auto", "auto")])
@pytest.mark.parametrize("name", [name for name, ours in ALIASES.items() if ours == "replay.mode"] + ["replay.mode"])
def test_modes_as_others_spell_them(name: str, spelled: str, mode: str, tmp_path: Path) -> None:
    assert load_config(written(tmp_path, f'{name} = "{spelled}"')).replay.mode == mode
    assert load_config(None, [f"--{name.replace('_', '-')}", spelled]).replay.mode == mode


@pytest.mark.parametrize("name", [name for name, ours in ALIASES.items() if "updates" in ours])
def test_steps_per_generation(name: str, tmp_path: Path) -> None:
    assert load_config(written(tmp_path, f"{name} = 4")).algorithm.updates_per_rollout == 4
    assert load_config(None, [f"--{name}", "4"]).algorithm.updates_per_rollout == 4


def test_two_spellings_of_one_setting_are_refused(tmp_path: Path) -> None:
    told = refused('router_replay_mode = "R3"\n[replay]\nmode = "r3"\n', tmp_path)
    assert "router_replay_mode and replay.mode are the same setting" in told


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[replay]\nmdoe = 'r3'\n", "replay.mdoe: no such key; did you mean replay.mode?"),
        ("[rolout]\nengine = 'vllm'\n", "rolout: no such key; did you mean rollout?"),
        ("lr = 1.0\n", "lr: no such key; did you mean optim.lr?"),
        ("[optim]\nnum_generation = 4\n", "optim.num_generation: no such key; did you mean rollout.num_generations?"),
        ("[rollout]\nlr = 1.0\n", "rollout.lr: no such key; did you mean optim.lr?"),
        ("clip_hgh = 0.2\n", "clip_hgh: no such key; did you mean algorithm.clip_high?"),
        ("router_replay_mod = 'R3'\n", "did you mean router_replay_mode?"),
        ("[weights]\nkind = 'http'\n", "weights: no such key; it is now weight_sync"),
        ("[algorithm]\nbaseline = 'std'\n", "algorithm.baseline: no such key; it is now algorithm.advantage"),
        ("xyzzy = 1\n", "xyzzy: no such key"),
    ],
)
def test_a_wrong_key_in_a_file_is_refused_with_a_suggestion(text: str, told: str, tmp_path: Path) -> None:
    lines = refused(text, tmp_path).splitlines()
    assert str(tmp_path / "recipe.toml") in lines[0]
    assert lines[1].endswith(told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--replay.mdoe", "r3"], "--replay.mdoe: no such option; did you mean --replay.mode?"),
        (["--lr", "1"], "--lr: no such option; did you mean --optim.lr?"),
        (["--no-steps"], "--no-steps: no such option"),
        (["--weights.kind", "ipc"], "--weights.kind: no such option; it is now --weight_sync.transport"),
        (["--rollout.options.seed", "1"], "did you mean"),
        (["--steps", "1", "2"], "--steps takes one value: found 1 2"),
        (["--steps"], "--steps takes one value: found none"),
        (["--rollout.options", "seed"], "--rollout.options takes pairs"),
        (["r3"], "'r3' belongs to no option"),
        (["--replay.mode", "r4"], "replay.mode: should be 'off', 'r2', 'r3' or 'auto', found 'r4'"),
        (["--steps", "many"], "steps: should be a valid integer"),
    ],
)
def test_a_wrong_command_line_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert told in str(caught.value)
    assert ("Put the recipe before" in str(caught.value)) == (words == ["--steps", "1", "2"])


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    told = refused("steps = 0\n[rollout]\nnum_generations = 1\ntemprature = 2\n", tmp_path)
    assert "steps: should be greater than or equal to 1, found 0" in told
    assert f"found 1 ({all_fields()['rollout.num_generations'].description})" in told
    assert "did you mean rollout.temperature?" in told


def test_problems_of_one_setting_and_across_settings_are_said_together(tmp_path: Path) -> None:
    text = 'steps = "ten"\n[backend]\nkind = "megatrn"\ntensor_parallel = 2\n[rollout]\nlora = true\n[optm]\nlr = 1\n'
    told = refused(text, tmp_path)
    assert "\n  steps: " in told
    assert "\n  backend.kind: " in told
    assert "\n  optm: no such key; did you mean optim?" in told
    assert "\n  rollout.lora: no adapter to send" in told
    assert "fsdp only shards" not in told  # the kind of the backend is not known


def test_all_wrong_options_are_said_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["--rollout.lorra", "true", "--step", "3", "--optim.lr", "1", "2"])
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["the", "--rollout.lorra:", "--step:", "--optim.lr"]


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    told = refused("steps = 1\n[optim\nlr = 1\n", tmp_path)
    assert f"{tmp_path / 'recipe.toml'} is not valid TOML" in told
    assert "line 3" in told


def test_a_file_that_names_no_model_is_refused_unless_it_is_shrunk(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("steps = 0\n[model]\ndtype = 'float32'\n")
    with pytest.raises(ConfigError, match=r"steps: (.|\n)*model.path: the recipe names no model; set a folder"):
        load_config(path)
    path.write_text("steps = 2\n")
    with pytest.raises(ConfigError, match=r"model.path: the recipe names no model"):
        load_config(path)
    assert load_config(path, ["--model.path", "m", "--data.path", "d"]).model.path == "m"
    assert load_config(path, tiny=True).model.path == ""


def test_a_shrunk_file_may_have_other_types_than_settings_have(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text("rollout = 1\nmodel = []\n")
    assert load_config(path, tiny=True).model.path == ""
    path.write_text("[model]\nlora_rank = 2\nlora_target_modules = 5\n")
    with pytest.raises(ConfigError, match=r"model\.lora_target_modules: should be a valid tuple, found 5"):
        load_config(path, tiny=True)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.toml")


MEGATRON = {"kind": "megatron"}
RAY: dict[str, Any] = {"launcher": "ray", "engines": 2}
COLOCATED: dict[str, Any] = {"placement": "colocated", "trainer_nodes": 2}
SERVER = {"engine": "rollout_server", "urls": ["http://a"]}
PROMPTS = {"model": {"path": "m"}, "data": {"path": "d"}}


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"rollout": {"num_generations": 1}}, "num_generations"),
        ({"rollout": {"temperature": 0.0}}, "temperature"),
        ({"rollout": {"prompts_per_step": 3, "num_generations": 2}, "algorithm": {"updates_per_rollout": 4}}, "use 3"),
        ({"rollout": {"sleep": True, "max_staleness": 1}}, "rollout.sleep"),
        ({"rollout": {"engine": "sglang_server"}}, "rollout.urls: sglang_server needs"),
        ({"rollout": {"urls": ["http://a"]}}, "rollout.urls: vllm runs in this process"),
        ({"rollout": SERVER | {"urls": ["a:8000"]}}, "write http://a:8000"),
        ({"rollout": {"environment": "game"}}, "unknown environment 'game'; write tools, module:name"),
        ({"rollout": {"engine": "vlm"}}, "unknown engine 'vlm'; write vllm, "),
        ({"rollout": {"engine": "vllm_serve"}}, "rollout.urls: vllm_serve needs"),
        ({"rollout": {"engine": "vllm_server"}}, "engine 'vllm_server' is now 'rollout_server'"),
        ({"algorithm": {"advantage": "grp"}}, "rloo, module:name; did you mean 'grpo'?"),
        ({"algorithm": {"advantage": "std"}}, "advantage estimator 'std' is now 'grpo'"),
        ({"algorithm": {"loss": "dapo"}}, "algorithm.loss: policy loss 'dapo' is now algorithm.loss_aggregation"),
        ({"reward": {"functions": ["format", "acuracy"]}}, "reward.functions: unknown reward 'acuracy'"),
        (
            {"reward": {"functions": ["exact"]}},
            "accuracy, format, module:name, verl:module:name",
        ),
        ({"log": {"sinks": ["tensorbord"]}}, "log.sinks: unknown metric sink 'tensorbord'"),
        ({"rollout": {"dtype": "bf16"}}, "dtype"),
        ({"rollout": {"capture": "theirs"}}, "rollout.capture"),
        ({"rollout": {"options": {"capture": "kv_slot"}}}, "rollout.options.capture: set rollout.capture instead"),
        ({"rollout": {"engine": "transformers", "capture": "kv_slot"}}, "transformers has no capture option"),
        ({"rollout": SERVER | {"capture": "vllm"}}, "remove it, and set it when starting the servers"),
        (
            {"rollout": {"capture": "cross_check", "options": {"pipeline_parallel_size": 2}}},
            "rollout.capture: capture 'cross_check' cannot be used with pipeline parallelism",
        ),
        ({"model": {"dtype": "fp8"}}, "dtype"),
        ({"model": {"base_dtype": "fp8"}}, "model.base_dtype: only of frozen weights on FSDP2"),
        (
            {"model": {"base_dtype": "fp8", "lora_rank": 8}, "backend": MEGATRON},
            r"set model.lora_rank and backend.kind = fsdp",
        ),
        (
            {"model": {"gradient_checkpointing": "offload"}, "backend": MEGATRON},
            "backend.megatron.fine_grained_activation_offloading with offload_modules",
        ),
        ({"model": {"lora_rank": 8, "lora_target_modules": []}}, "model.lora_target_modules"),
        ({"model": {"lora_rank": 8, "lora_target_modules": ["self_attn.q_proj"]}}, "write e.g. q_proj"),
        ({"model": {"lora_rank": 8, "lora_target_modules": [""]}}, "model.lora_target_modules"),
        ({"model": {"lora_rank": -1}}, "lora_rank"),
        ({"model": {"lora_target_modules": ["q_proj"]}}, "model.lora_rank: 0 trains all weights"),
        ({"rollout": {"lora": True}}, "rollout.lora: no adapter to send"),
        (
            {"rollout": {"lora": True, "engine": "transformers"}, "model": {"lora_rank": 8}},
            "vllm and rollout_server take adapters",
        ),
        ({"model": {"lora_merge": False}}, "model.lora_rank: 0 trains all weights"),
        ({"model": {"attn_implementation": "flash_attention_2", "dtype": "float32"}}, "does not support float32"),
        ({"model": {"attn_implementation": "flash_attention_2"}, "backend": {"device": "cpu"}}, "needs a GPU"),
        ({"model": {"path": "somewhere"}}, "data.path"),
        (PROMPTS | {"eval": {"every": 5}}, "data.eval_path"),
        ({"backend": {"tensor_parallel": 2}}, "backend.tensor_parallel: fsdp"),
        ({"backend": {"expert_tensor_parallel": 2}}, "backend.expert_tensor_parallel: fsdp"),
        ({"backend": {"pipeline_parallel": 2}}, "backend.pipeline_parallel: fsdp"),
        ({"backend": {"virtual_pipeline": 2}}, "backend.virtual_pipeline: fsdp"),
        ({"batch": {"balance": "experts"}}, "set backend.expert_parallel, or"),
        (
            {"backend": {"context_parallel": 2}, "model": {"attn_implementation": "sdpa"}},
            "backend.context_parallel: sdpa",
        ),
        ({"backend": {"distributed_optimizer": True}}, "backend.distributed_optimizer: fsdp"),
        ({"backend": {"weight_family": "mixtral"}}, "backend.weight_family: fsdp"),
        (
            {"model": {"router_family": "qwen3_moe"}, "backend": MEGATRON},
            "model.router_family: not used with Megatron-Core",
        ),
        (
            {"backend": MEGATRON | {"weight_family": "gpt2"}},
            "unknown weight family 'gpt2'; write deepseek_v3",
        ),
        ({"backend": {"megatron": {"a": 1}}}, "backend.megatron: fsdp"),
        ({"backend": MEGATRON | {"tensor_parallel": 0}}, "tensor_parallel"),
        ({"backend": MEGATRON | {"virtual_pipeline": 2}}, "set backend.pipeline_parallel > 1"),
        (
            {"backend": MEGATRON | {"megatron": {"context_parallel_size": 2}}},
            "set backend.context_parallel instead",
        ),
        ({"backend": MEGATRON | {"megatron": {"moe_router_fusion": True}}}, "fused router"),
        (
            {"backend": MEGATRON | {"megatron": {"moe_input_jitter_eps": 0.05}}},
            "two passes over the same tokens would differ",
        ),
        ({"algorithm": {"beta": -0.1}}, "beta"),
        ({"algorithm": {"clip_low": -0.1}}, "clip_low"),
        ({"algorithm": {"clip_low": 1.1}}, "clip_low"),
        ({"algorithm": {"clip_high": -0.1}}, "clip_high"),
        ({"algorithm": {"rollout_correction_low": 1.5}}, "correction_low"),
        ({"algorithm": {"rollout_correction_high": 0.5}}, "correction_high"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas"),
        ({"optim": {"warmup_steps": 11}, "steps": 10}, "at most steps = 10"),
        ({"reward": {"functions": []}}, "functions"),
        ({"reward": {"functions": ["accuracy", "format"], "weights": [1.0]}}, "1 weights for 2 functions"),
        ({"cluster": RAY, "rollout": {"engines_per_node": 2}}, "remove one of them"),
        ({"cluster": RAY, "rollout": SERVER}, "name the engine to start"),
        ({"cluster": RAY | COLOCATED | {"engines": 3}}, "3 engines cannot be spread evenly over 2 trainer nodes"),
        ({"cluster": {"launcher": "ray"} | COLOCATED}, "no engines to place"),
        ({"cluster": RAY | COLOCATED, "rollout": {"max_staleness": 1}}, "set rollout.max_staleness = 0"),
        ({"reward": {"functions": ["format", "format"]}}, "'format' is listed twice"),
        (
            {"rollout": {"engine": "transformers", "workers": 2}},
            "rollout.workers: transformers runs in the process of rank 0",
        ),
        ({"checkpoint": {"keep": 0}}, "keep"),
        ({"steps": True}, "should be a number or text, not true or false"),
        ({"optim": {"betas": [0.9, True]}}, "should be a number or text, not true or false"),
        ({"rollout": {"workers": True}}, "should be a number or text, not true or false"),
        ({"rollout": {"temperature": 1e-300}}, "greater than or equal to 0.01"),
        ({"eval": {"temperature": 1e-300}}, "should be 0, or at least 0.01"),
        ({"name": "a/b"}, "name"),
    ],
)
def test_what_cannot_work_is_refused(tables: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="validation error") as caught:
        TrainConfig.model_validate(tables)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": SERVER | {"max_staleness": 1}},
        {"rollout": {"sleep": True}},
        {"rollout": {"capture": "cross_check"}},
        {"rollout": {"engines_per_node": 2, "capture": "vllm", "options": {"pipeline_parallel_size": 2}}},
        {
            "backend": MEGATRON
            | {"pipeline_parallel": 2, "virtual_pipeline": 2, "megatron": {"sequence_parallel": True}}
        },
        {"model": {"lora_rank": 8}},
        {"model": {"lora_rank": 8}, "backend": MEGATRON},
        PROMPTS,
        {"eval": {"every": 5}},
        {"reward": {"functions": ["accuracy", "format"], "weights": [1.0, 0.5]}},
        {"cluster": RAY | COLOCATED},
        {"cluster": RAY, "rollout": {"lora": True}, "model": {"lora_rank": 2}},
        {"rollout": SERVER | {"lora": True}, "model": {"lora_rank": 2}},
        {"rollout": {"engines_per_node": 2, "lora": True}, "model": {"lora_rank": 2}},
        {"cluster": RAY | {"launcher": "torchrun"}, "rollout": SERVER},
    ],
)
def test_what_can_work_is_not_refused(tables: dict[str, Any]) -> None:
    assert TrainConfig.model_validate(tables)


@pytest.mark.parametrize(
    ("section", "key", "value", "needed"),
    [
        ("model", "reference", "base", {"algorithm": {"beta": 0.1}}),
        ("model", "lora_alpha", 16.0, {"model": {"lora_rank": 8}}),
        ("rollout", "sleep_level", 1, {"rollout": {"sleep": True}}),
        ("rollout", "sampling_mask", "off", {"rollout": {"top_p": 0.9}}),
        ("rollout", "max_turns", 3, {"rollout": {"environment": "my_game:play"}}),
        ("rollout", "tool_timeout_s", 5.0, {"rollout": {"tools": ["my_tools:search"], "environment": "tools"}}),
        ("algorithm", "max_refills", 9, {"algorithm": {"dynamic_sampling": True}}),
        ("algorithm", "rollout_correction_low", 0.1, {"algorithm": {"rollout_correction": "token_mask"}}),
        ("eval", "prompts", 9, {"eval": {"every": 5}}),
        ("log", "num_completions_to_print", 9, {"log": {"completions": True}}),
        ("checkpoint", "hub_private", False, {"checkpoint": {"push_to_hub": "me/mine"}}),
        ("cluster", "ranks_per_node", 8, {"cluster": {"launcher": "ray"}}),
        ("cluster", "max_restarts", 0, {"cluster": {"launcher": "ray"}}),
    ],
)
def test_a_setting_without_effect_is_warned_of(section: str, key: str, value: Any, needed: dict[str, Any]) -> None:
    (line,) = warnings(TrainConfig.model_validate({section: {key: value}}))
    (owner,) = needed
    assert line.startswith(f"{section}.{key} = {value} has no effect without ")
    assert any(f"{owner}.{name}" in line for name in needed[owner])
    tables = {**needed, section: {key: value} | needed.get(section, {})}
    assert list(warnings(TrainConfig.model_validate(tables))) == []


def test_defaults_are_no_settings_without_effect(tmp_path: Path) -> None:
    """Also where a file has all of them, as that of a run folder."""
    (tmp_path / "config.toml").write_text(to_toml(TrainConfig()))
    assert list(warnings(load_config(tmp_path / "config.toml"))) == []


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        TrainConfig().replay.mode = "r2"


# ---- and back --------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
NAME = TEXT.filter(lambda name: not is_secret_name(name))  # tokens and passwords are not written
HOST = st.from_regex(r"[a-z0-9]{1,8}(:[1-9][0-9]{0,3})?", fullmatch=True)


@pytest.mark.slow
@given(
    path=TEXT,
    options=st.dictionaries(NAME, TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)),
    urls=st.lists(HOST.map("http://{}".format), unique=True),
    lr=st.floats(min_value=0, max_value=1e30),
    output=st.none() | st.just(Path("runs/a b")),
)
def test_toml_gives_the_same_configuration_again(
    path: str, options: dict[str, Any], urls: list[str], lr: float, output: Path | None, tmp_path_factory: Any
) -> None:
    config = TrainConfig.model_validate(
        {
            "output": output,
            "model": {"path": path},
            "data": {"path": "prompts.jsonl"},
            "rollout": {"engine": "rollout_server" if urls else "vllm", "urls": urls, "options": options},
            "optim": {"lr": lr},
        }
    )
    recipe = tmp_path_factory.getbasetemp() / "round.toml"
    recipe.write_bytes(to_toml(config).encode())
    assert load_config(recipe) == config


def test_settings_of_megatron_may_be_lists(tmp_path: Path) -> None:
    words = ["--backend.kind", "megatron", "--backend.megatron", "recompute_modules", '["moe", "mlp"]']
    config = load_config(None, words)
    assert config.backend.megatron == {"recompute_modules": ["moe", "mlp"]}
    (tmp_path / "recipe.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "recipe.toml") == config


def test_the_token_is_not_written(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, '[rollout]\ntoken = "very-secret"\n'))
    assert config.rollout.token == "very-secret"
    assert "very-secret" not in to_toml(config) + repr(config)


# ---- what is said about it -------------------------------------------------------------------------------------------


def test_every_key_is_explained_in_a_sentence() -> None:
    short = {name: field.description for name, field in all_fields().items() if not (field.description or "").strip()}
    assert not short
    assert len(all_fields()) > 70


def test_the_help_has_every_key_and_its_default() -> None:
    told = help_text(120, recipe_schema())
    for name in all_fields():
        assert f"--{name.replace('_', '-')} " in told
    assert "[off|r2|r3|auto, default auto]" in " ".join(told.split())
    assert max(map(len, told.splitlines())) <= 120


def test_the_short_help_has_the_twenty_usual_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert len(USUAL) == 20
    assert set(USUAL) <= all_fields().keys()
    TrainCommand.from_arguments(["--help"])()
    short = capsys.readouterr().out
    assert re.findall(r"^  --(\S+\.\S+|steps|output) ", short, re.M) == [
        name.replace("_", "-") for name in sorted(USUAL, key=list(all_fields()).index)
    ]
    assert "`moe-replay train --help-all` shows all settings" in short
    TrainCommand.from_arguments(["--help-all"])()
    whole = capsys.readouterr().out
    assert all(f"  --{name.replace('_', '-')} " in whole for name in all_fields())
    assert len(short.splitlines()) < 80 < len(whole.splitlines())


PLUGGED: dict[str, tuple[Mapping[str, Any], Any]] = {
    "model.router_family": (ROUTER_FAMILIES, ROUTER_FAMILIES["qwen3_moe"]),
    "backend.weight_family": (WEIGHT_MAPS, WEIGHT_MAPS["qwen3_moe"]),
    "rollout.engine": (ENGINES, EngineSpec("somewhere:start", "an engine of the test")),
    "rollout.environment": (ENVIRONMENTS, lambda episode: None),
    "rollout.tool_format": (TOOL_FORMATS, lambda text: []),
    "weight_sync.transport": (WEIGHT_TRANSPORTS, WeightTransport("A transport of the test.")),
    "algorithm.advantage": (ADVANTAGES, lambda rewards: rewards),
    "algorithm.loss": (LOSSES, lambda inputs, settings: None),
    "reward.functions": (REWARDS, lambda **columns: []),
    "log.sinks": (SINKS, lambda context: None),
}


def test_every_key_that_names_an_implementation_is_in_the_table_above() -> None:
    named = {key for key, field in all_fields().items() if PluginName.of(field)}
    assert named - PLUGGED.keys() == {"rollout.tools"}, "tools are the user's own"
    assert PLUGGED.keys() <= named


@pytest.mark.parametrize("key", PLUGGED)
def test_a_new_entry_of_a_registry_is_accepted_and_listed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry, entry = PLUGGED[key]
    needed = {
        "backend.weight_family": ["--backend.kind", "megatron"],
    }
    words = [f"--{key}", "freshly_plugged_in", *needed.get(key, [])]
    with pytest.raises(ConfigError, match=r"unknown .* 'freshly_plugged_in'"):
        load_config(None, words)
    assert "freshly_plugged_in" not in help_text(120, recipe_schema()) + reference()
    monkeypatch.setitem(cast(dict, registry), "freshly_plugged_in", entry)
    assert load_config(None, words)
    if key == "model.router_family":  # too many to list: docs/routers.md has them
        return
    assert "freshly_plugged_in|module:name" in re.sub(r"\s+", "", help_text(120, recipe_schema()))
    assert "`freshly_plugged_in`, `module:name`" in reference()


def test_what_is_built_in_is_explained() -> None:
    found = re.findall(r"\| `(\S+)` \| `(\S+)` \| (.*) \|", reference().partition("## Built-in names")[2])
    assert {"rollout.engine", "algorithm.advantage", "reward.functions", "log.sinks"} <= {key for key, _, _ in found}
    assert [name for _, name, text in found if len(text.split()) < 2] == []


def test_the_reference_is_up_to_date() -> None:
    remedy = "python -m moe_replay.train.config.reference > docs/config.md"
    assert (ROOT / "docs" / "config.md").read_text() == reference(), remedy


def test_former_names_lead_to_keys_that_exist() -> None:
    names = {*all_fields(), *(name for name, _ in sections())}
    assert set(RENAMED.values()) <= names
    assert not set(RENAMED) & names
