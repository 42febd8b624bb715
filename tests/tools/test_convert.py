"""`moe-replay convert`: commands of ms-swift and verl into recipes that our configuration accepts."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.cli.main import main
from moe_replay.tools.convert import convert, read_command
from moe_replay.tools.convert.draft import ConversionError
from moe_replay.train.config.file import load_config
from moe_replay.train.config.train_config import TrainConfig

SWIFT = r"""
# the layout of a large run
NPROC_PER_NODE=8 CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron rlhf \
    --rlhf_type grpo \
    --model "Qwen/Qwen3-30B-A3B-Instruct-2507" \
    --save_safetensors true --context_parallel_size 2 --tensor_model_parallel_size 2 \
    --expert_model_parallel_size 4 --pipeline_model_parallel_size 2 \
    --dataset open-r1/DAPO-Math-17k-Processed \
    --global_batch_size 64 --micro_batch_size 2 --steps_per_generation 2 --num_generations 8 \
    --reward_funcs accuracy format \
    --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.3 --vllm_tensor_parallel_size 4 \
    --vllm_max_model_len 16384 --max_length 8192 --max_completion_length 8192 \
    --lr 5e-5 --bf16 true --beta 0.00 --importance_sampling_level sequence \
    --epsilon 3e-4 --epsilon_high 4e-4 --overlong_filter true --loss_type grpo --sleep_level 2 \
    --recompute_granularity selective --dataloader_num_workers 8 --finetune \
    --attention_backend flash --temperature 1.0 --padding_free true --sequence_parallel true \
    --report_to wandb \
    --router_replay_mode R3 # or R2
"""

MINIMAL = "--rlhf_type grpo --model m --dataset d.jsonl --reward_funcs accuracy"

SWIFT_SERVER = r"""
swift rollout --model Qwen/Qwen3-30B-A3B-Instruct-2507 --vllm_tensor_parallel_size 2 \
   --vllm_max_model_len 10240 --vllm_engine_kwargs '{"enable_return_routed_experts": true, "max_num_seqs": 64}'
"""

VERL_MINIMAL = "algorithm.adv_estimator=grpo data.train_files=d.parquet actor_rollout_ref.model.path=m"

VERL = r"""
#!/usr/bin/env bash
python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer \
    data.train_files="['math/train.parquet']" \
    data.train_batch_size=64 data.max_prompt_length=1024 data.max_response_length=2048 \
    actor_rollout_ref.actor.strategy=megatron \
    actor_rollout_ref.actor.policy_loss.loss_mode=gspo \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_low=3e-4 \
    actor_rollout_ref.actor.clip_ratio_high=4e-4 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=12288 \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.router_replay.mode=R3 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32 \
    ++actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=8 \
    trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_training_steps=100 \
    trainer.save_freq=-1
"""


def loaded(text: str, tmp_path: Path) -> TrainConfig:
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    return load_config(path)


def converted(trainer: str, command: str, tmp_path: Path) -> tuple[TrainConfig, str]:
    text, problems = convert(trainer, [command])
    assert problems == []
    return loaded(text, tmp_path), text


def setting(config: TrainConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


# ---- ms-swift --------------------------------------------------------------------------------------------------------


def test_the_example_of_ms_swift(tmp_path: Path) -> None:
    config, text = converted("swift", SWIFT, tmp_path)
    assert config.model.path == "Qwen/Qwen3-30B-A3B-Instruct-2507"
    assert (config.backend.kind, config.backend.tensor_parallel, config.backend.context_parallel) == ("megatron", 2, 2)
    assert (config.backend.pipeline_parallel, config.backend.expert_parallel) == (2, 4)
    assert config.backend.expert_tensor_parallel == 1  # ms-swift's default, which is not ours
    assert config.backend.megatron == {"recompute_granularity": "selective", "attention_backend": "flash"}
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (16, 8)
    assert config.algorithm.updates_per_rollout == 2
    assert (config.data.max_prompt_length, config.rollout.max_tokens, config.max_length) == (8192, 8192, 16384)
    assert config.batch.tokens_per_micro_batch == 2 * 16384
    assert (config.algorithm.importance_sampling_level, config.algorithm.loss_aggregation) == (
        "sequence",
        "seq_mean_token_mean",
    )
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.beta) == (3e-4, 4e-4, 0.0)
    assert config.rollout.options == {"gpu_memory_utilization": 0.3, "tensor_parallel_size": 4}
    assert (config.rollout.sleep, config.rollout.sleep_level) == (True, 2)
    assert config.replay.mode == "r3"
    assert config.reward.functions == ("accuracy", "format")
    assert (config.optim.lr, config.optim.schedule, config.optim.betas) == (5e-5, "cosine", (0.9, 0.95))
    assert "torchrun --nproc-per-node 8 -m moe_replay.cli.main train" in text
    for left_out in ("--dataloader_num_workers 8", "--sequence_parallel true", "--finetune"):
        assert f"#   {left_out}: " in text


def test_the_rollout_command_of_ms_swift_becomes_that_of_our_server() -> None:
    text, _ = convert("swift", [SWIFT_SERVER])
    assert (
        "moe-replay rollout --model Qwen/Qwen3-30B-A3B-Instruct-2507 --max-length 10240 "
        "--engine-options tensor_parallel_size 2 max_num_seqs 64" in text
    )


def test_every_option_is_a_setting_or_a_comment() -> None:
    text, _ = convert("swift", [SWIFT])
    written = {word[2:] for word in SWIFT.split() if word.startswith("--")} - {"rlhf_type"}
    assert sorted(name for name in written if name not in text) == ["use_vllm"]  # vLLM is the default


def test_defaults_that_differ_are_written_down(tmp_path: Path) -> None:
    config, text = converted("swift", f"megatron rlhf {MINIMAL}", tmp_path)
    assert (config.rollout.temperature, config.algorithm.beta, config.rollout.max_tokens) == (0.9, 0.04, 512)
    assert (config.replay.mode, config.seed, config.rollout.prompts_per_step) == ("off", 42, 2)
    assert "temperature = 0.9" in text
    assert "--temperature: the default" in text
    assert "num_generations" not in tomllib.loads(text)["rollout"]  # 8 in both


def test_the_batch_of_swift_rlhf_is_that_of_trl(tmp_path: Path) -> None:
    """Sequences of a rollout: per device x ranks x steps_per_generation; an update takes some of these passes."""
    command = (
        f"NPROC_PER_NODE=4 swift rlhf {MINIMAL} --tuner_type full --use_vllm true "
        "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --steps_per_generation 8 --num_generations 16 "
        "--max_steps 100"
    )
    config, _ = converted("swift", command, tmp_path)
    assert config.backend.kind == "fsdp"
    assert (config.rollout.prompts_per_step, config.algorithm.updates_per_rollout) == (2 * 4 * 8 // 16, 4)
    assert config.steps == 25  # 100 updates
    assert (config.model.lora_rank, config.optim.lr, config.model.gradient_checkpointing) == (0, 1e-5, True)


def test_servers_of_ms_swift(tmp_path: Path) -> None:
    command = (
        "megatron rlhf --rlhf_type grpo --model m --dataset d.jsonl --reward_funcs accuracy "
        "--vllm_mode server --vllm_server_host a b "
        "--vllm_server_port 8000 8001 --vllm_tensor_parallel_size 2"
    )
    config, text = converted("swift", command, tmp_path)
    assert (config.rollout.engine, config.rollout.urls) == ("rollout_server", ("http://a:8000", "http://b:8001"))
    assert not config.rollout.options  # the engine's own, on the server
    assert "moe-replay rollout --engine-options tensor_parallel_size 2" in text


def test_lora_of_swift_rlhf(tmp_path: Path) -> None:
    command = f"swift rlhf {MINIMAL} --per_device_train_batch_size 8 --tuner_type lora --target_modules q_proj v_proj"
    config, _ = converted("swift", command, tmp_path)
    assert (config.model.lora_rank, config.model.lora_alpha) == (8, 32.0)
    assert config.model.lora_target_modules == ("q_proj", "v_proj")
    full, text = converted("swift", f"{command.replace('lora ', 'full ')} --lora_rank 4", tmp_path)
    assert full.model.lora_rank == 0
    assert "#   --lora_rank: no effect without --tuner_type lora" in text


def test_lora_on_megatron(tmp_path: Path) -> None:
    command = f"megatron rlhf {MINIMAL} --tuner_type lora --vllm_enable_lora true"
    config, _ = converted("swift", command, tmp_path)
    assert (config.backend.kind, config.model.lora_rank, config.model.lora_target_modules) == (
        "megatron",
        8,
        ("all-linear",),
    )
    assert config.rollout.lora


def test_arguments_without_a_launcher_are_those_of_training(tmp_path: Path) -> None:
    text, _ = convert("swift", ["--model", "m", "--dataset", "d.jsonl", "--tensor_model_parallel_size=2"])
    config = loaded(text, tmp_path)
    assert (config.backend.kind, config.backend.tensor_parallel) == ("megatron", 2)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--dataloader_num_workers 8", "--dataloader_num_workers 8: prompts are read and tokenized once"),
        ("--sync_ref_model false --ref_model_sync_steps 8", "--ref_model_sync_steps 8: the reference model is frozen"),
        ("--report_to swanlab", "--report_to swanlab: a custom metric sink"),
        ("--eval_steps 5", "--eval_steps 5: without effect: set data.eval_path too"),
    ],
)
def test_what_does_not_change_the_run_is_listed_as_lost(flags: str, told: str, tmp_path: Path) -> None:
    _, text = converted("swift", f"megatron rlhf {MINIMAL} {flags}", tmp_path)
    lost = text.partition("# Lost, without a counterpart:\n")[2].partition("#\n")[0]
    assert f"#   {told}" in lost


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--loss_type fipo", "loss: --loss_type fipo: not implemented; grpo, bnpo, dapo, dr_grpo, sapo, cispo are"),
        ("--loss_type cispo", "loss: --epsilon: cispo clips all ratios above 0.2, also those near 1"),
        ("--importance_sampling_level group", "loss: --importance_sampling_level group: only token, sequence"),
        ("--scale_rewards batch", "loss: --scale_rewards batch: only group, none"),
        ("--rollout_importance_sampling_mode sequence_mask", "loss: --rollout_importance_sampling_mode sequence_mask:"),
        ("--top_entropy_quantile 0.2", "loss: --top_entropy_quantile 0.2: not implemented"),
        ("--kl_in_reward true", "loss: --kl_in_reward true: KL is a loss term"),
        ("--reward_funcs accuracy mine", "reward: --reward_funcs mine: not built in"),
        ("--reward_model m", "reward: --reward_model m: call it from a reward function"),
        ("--min_p 0.1", "sampling: --min_p 0.1: not supported: the engine would sample from another distribution"),
        ("--multi_turn_scheduler a-b", "environment: --multi_turn_scheduler a-b: write it as a function"),
        ("--use_gym_env true", "environment: --use_gym_env true: environments are functions"),
        ("--dataset a.jsonl b.jsonl", "data: --dataset b.jsonl: data.path takes one dataset"),
        ("--dataset a.jsonl#500", "data: --dataset a.jsonl#500: all rows are used, not 500"),
        ("--dataset a/b:x/y", "data: --dataset a/b:x/y: data.subset is one"),
        ("--template other", "data: --template other: the chat template in the model's folder is used"),
        ("--system prompt.txt", "data: --system prompt.txt: a file: put its text into data.system"),
        ("--columns nonsense", "data: --columns nonsense: not a JSON object"),
        ("--lora_dropout 0.1", "model: --lora_dropout 0.1: adapters have no dropout"),
        ("--lr_warmup_fraction 0.1", "optimizer: --lr_warmup_fraction 0.1: set optim.warmup_steps"),
        ("--min_lr 1e-6", "optimizer: --min_lr 1e-6: the learning rate decays to 0"),
        ("--router_replay_mode R4", "replay: --router_replay_mode R4: replay.mode: Input should be"),
        ("--num_generations many", "sampling: --num_generations many: not a number; 8 was used instead"),
        ("--num_generations 0", "sampling: --num_generations 0: an impossible number; 8 was used instead"),
        ("--global_batch_size 0", "unknown option: --global_batch_size 0: an impossible number; 16 was used instead"),
        ("--steps_per_generation 0", "loss: --steps_per_generation 0: an impossible number"),
        ("--lr_warmup_fraction some", "optimizer: --lr_warmup_fraction some: not a number; 0.0 was used instead"),
        ("--epsilon", "loss: --epsilon: "),
        ("--columns [1]", "data: --columns [1]: not a JSON object; set data.columns"),
        ("--system a b.txt", "data: --system a b.txt: a file: put its text into data.system"),
        (
            "--vllm_engine_kwargs [1]",
            "unknown option: --vllm_engine_kwargs [1]: not a JSON object; set rollout.options",
        ),
        ("--vllm_engine_kwargs nonsense", "unknown option: --vllm_engine_kwargs nonsense: not a JSON object"),
        ("--no_such_option 3", "unknown option: --no_such_option 3: whether it changes the run is not known"),
    ],
)
def test_what_makes_another_run_is_a_reason_for_status_1(
    flags: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe is printed all the same, and what is left of it is valid."""
    with pytest.raises(SystemExit) as ended:
        main(["convert", "swift", f"megatron rlhf {MINIMAL} {flags}"])
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert f"#   {told}" in printed.out.partition("# Not the run of this command yet:\n")[2].partition("\n#\n")[0]
    assert f"not the same run yet: {told}" in printed.err
    assert loaded(printed.out, tmp_path).model.path == "m"


def test_ranks_in_a_word_of_torchrun() -> None:
    text, reasons = convert("swift", [f"NPROC_PER_NODE=gpu swift rlhf {MINIMAL}"])
    assert "torchrun --nproc-per-node gpu -m moe_replay.cli.main train" in text
    assert "sampling: NPROC_PER_NODE=gpu: how many ranks there are is not said; 1 was assumed" in reasons


def test_values_that_mean_nothing_are_no_reason(tmp_path: Path) -> None:
    flags = (
        "--min_p 0.0 --repetition_penalty 1 --kl_in_reward false --use_gym_env False --top_k -1 --min_lr 0 "
        "--lora_dropout 0 --top_entropy_quantile 1.0 --split_dataset_ratio 0"
    )
    assert converted("swift", f"megatron rlhf {MINIMAL} {flags}", tmp_path)[0].rollout.top_k == 0


@pytest.mark.parametrize("option", ["--model m", "--dataset d.jsonl", "--reward_funcs accuracy"])
def test_a_command_without_model_data_or_reward_is_no_recipe(option: str) -> None:
    _, reasons = convert("swift", [f"megatron rlhf {MINIMAL.replace(option, '')}"])
    subject = {"--model": "model", "--dataset": "data", "--reward_funcs": "reward"}[option.split()[0]]
    assert [reason.partition(":")[0] for reason in reasons] == [subject]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--loss_type sapo --tau_pos 2 --tau_neg 3", {"algorithm.loss": "sapo", "algorithm.tau_neg": 3.0}),
        ("--loss_type sapo", {"algorithm.loss_aggregation": "seq_mean_token_mean", "algorithm.tau_pos": 1.0}),
        ("--loss_type cispo --epsilon_high 5", {"algorithm.loss": "cispo", "algorithm.clip_high": 4.0}),
        ("--loss_type cispo --epsilon_high 5", {"algorithm.clip_low": 1.0, "algorithm.loss_aggregation": "token_mean"}),
        ("--epsilon 0.1", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ("--epsilon 0.1 --epsilon_high 0.3", {"algorithm.clip_high": 0.3}),
        ("--delta 4", {"algorithm.delta": 4.0}),
        ("--importance_sampling_level sequence_token", {"algorithm.importance_sampling_level": "sequence"}),
        ("--dynamic_sample true", {"algorithm.max_refills": 3}),
        ("--rollout_importance_sampling_mode token_mask", {"algorithm.rollout_correction_low": 0.0}),
        ("--top_k 50", {"rollout.top_k": 50}),
        ("--dataset hf::a/b:x", {"data.path": "a/b", "data.subset": "x"}),
        ("--dataset open-r1/DAPO-Math-17k-Processed", {"data.subset": "all"}),
        ("""--columns '{"problem": "query", "answer": "solution"}'""", {"data.columns.problem": "prompt"}),
        ("--system 'Think first.'", {"data.system": "Think first.", "data.chat_template": "auto"}),
        ("--use_chat_template false", {"data.chat_template": "none"}),
    ],
)
def test_options_of_ms_swift(flags: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config, _ = converted("swift", f"megatron rlhf {MINIMAL} {flags}", tmp_path)
    assert {key: setting(config, key) for key in expected} == expected


def test_other_methods_than_grpo_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"only GRPO.*--rlhf_type dpo"):
        convert("swift", ["megatron rlhf --rlhf_type dpo --model m"])


# ---- verl ------------------------------------------------------------------------------------------------------------


def test_a_command_of_verl(tmp_path: Path) -> None:
    config, text = converted("verl", VERL, tmp_path)
    assert (config.backend.kind, config.backend.expert_parallel) == ("megatron", 8)
    assert config.backend.megatron == {"moe_router_dtype": "fp32", "recompute_num_layers": 1}
    assert (config.data.path, config.data.max_prompt_length, config.rollout.max_tokens) == (
        "math/train.parquet",
        1024,
        2048,
    )
    assert (config.rollout.prompts_per_step, config.rollout.num_generations) == (64, 16)
    assert (config.algorithm.updates_per_rollout, config.batch.tokens_per_micro_batch) == (4, 12288)
    assert (config.algorithm.importance_sampling_level, config.algorithm.loss_aggregation) == (
        "sequence",
        "seq_mean_token_mean",
    )
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.beta) == (3e-4, 4e-4, 0.0)
    assert (config.replay.mode, config.steps, config.checkpoint.every) == ("r3", 100, 0)
    assert config.log.wandb
    assert config.reward.functions == ("verl:verl.utils.reward_score:default_compute_score",)
    assert "actor_rollout_ref.ref.megatron.expert_model_parallel_size=8: the reference model runs" in text


def test_ulysses_of_verl_is_context_parallel(tmp_path: Path) -> None:
    key = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    config, _ = converted("verl", f"{VERL_MINIMAL} {key}=4", tmp_path)
    assert (config.backend.kind, config.backend.context_parallel) == ("fsdp", 4)


@pytest.mark.parametrize(
    "key",
    [
        "actor_rollout_ref.actor.router_replay.mode",
        "actor_rollout_ref.actor.megatron.router_replay.mode",
        "router_replay.mode",
    ],
)
@pytest.mark.parametrize("mode", ["R2", "R3", "disabled"])
def test_the_replay_mode_of_verl_under_all_of_its_names(key: str, mode: str, tmp_path: Path) -> None:
    config, _ = converted("verl", f"{VERL_MINIMAL} {key}={mode}", tmp_path)
    assert config.replay.mode == {"R2": "r2", "R3": "r3", "disabled": "off"}[mode]


@pytest.mark.parametrize(("enabled", "mode"), [("true", "r2"), ("false", "off")])
def test_the_trainer_configuration_of_the_pull_request(enabled: str, mode: str, tmp_path: Path) -> None:
    """Its method 1, a block of YAML; it lacks all but the mode."""
    pytest.importorskip("yaml")
    (tmp_path / "trainer.yaml").write_text(
        f'router_replay:\n  enabled: {enabled}\n  mode: "R2"  # Options: "R2", "R3"\n'
    )
    text, reasons = convert("verl", [str(tmp_path / "trainer.yaml")])
    assert tomllib.loads(text)["replay"]["mode"] == mode
    assert [reason.split(":")[0] for reason in reasons] == ["model", "data", "loss"]


@pytest.mark.parametrize(
    ("options", "key", "value"),
    [
        ("actor_rollout_ref.actor.use_kl_loss=True", "algorithm.beta", 0.001),
        ("actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01", "algorithm.beta", 0.01),
        ("actor_rollout_ref.actor.clip_ratio=0.3", "algorithm.clip_high", 0.3),
        ("algorithm.norm_adv_by_std_in_grpo=False", "algorithm.advantage", "dr_grpo"),
        ("algorithm.adv_estimator=rloo", "algorithm.advantage", "rloo"),
        ("actor_rollout_ref.rollout.name=sglang", "rollout.engine", "sglang_server"),
        ("async_training.staleness_threshold=0.5", "rollout.max_staleness", 1),
        ("custom_reward_function.path=rewards/mine.py", "reward.functions", ("verl:mine:compute_score",)),
        ("actor_rollout_ref.model.enable_activation_offload=True", "model.gradient_checkpointing", "offload"),
        ("trainer.resume_mode=disable", "resume", False),
        ("actor_rollout_ref.rollout.free_cache_engine=False", "rollout.sleep", False),
        ("+actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=64", "rollout.options.max_num_seqs", 64),
        ("data.train_files=[a.parquet]", "data.path", "a.parquet"),
        ("data.prompt_key=question", "data.columns.question", "prompt"),
        ("actor_rollout_ref.rollout.top_k=20", "rollout.top_k", 20),
        ("actor_rollout_ref.actor.clip_ratio=0.2", "algorithm.delta", 3.0),
        ("actor_rollout_ref.actor.clip_ratio_c=5", "algorithm.delta", 5.0),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algorithm.delta", math.inf),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "algorithm.loss", "sapo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=cispo", "algorithm.loss", "cispo"),
    ],
)
def test_options_of_verl(options: str, key: str, value: Any, tmp_path: Path) -> None:
    config, _ = converted("verl", f"python -m verl.trainer.main_ppo {VERL_MINIMAL} {options}", tmp_path)
    assert setting(config, key) == value


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
            "loss: actor_rollout_ref.actor.policy_loss.loss_mode=",
        ),
        (
            "actor_rollout_ref.actor.policy_loss.clip_cov_ratio=0.1",
            "loss: actor_rollout_ref.actor.policy_loss.clip_cov",
        ),
        ("actor_rollout_ref.actor.entropy_coeff=0.01", "loss: actor_rollout_ref.actor.entropy_coeff=0.01: an entropy"),
        ("algorithm.adv_estimator=gae", "loss: algorithm.adv_estimator=gae: only grpo, rloo can be converted"),
        ("algorithm.use_kl_in_reward=True", "loss: algorithm.use_kl_in_reward=True: KL is a loss term"),
        ("algorithm.pf_ppo.reweight_method=pow", "loss: algorithm.pf_ppo.reweight_method=pow: not implemented"),
        ("reward_model.enable=True", "reward: reward_model.enable=True: call it from a reward function"),
        ("reward_model.reward_manager=dapo", "reward: reward_model.reward_manager=dapo: call it from"),
        (
            "actor_rollout_ref.rollout.multi_turn.enable=True",
            "environment: actor_rollout_ref.rollout.multi_turn.enable=",
        ),
        ("data.train_files=[a.parquet,b.parquet]", "data: data.train_files=b.parquet: data.path takes one file"),
        ("data.custom_cls.path=mine.py", "data: data.custom_cls.path=mine.py: not implemented"),
        (
            "actor_rollout_ref.actor.router_replay.mode=R5",
            "replay: actor_rollout_ref.actor.router_replay.mode=R5: only",
        ),
        ("router_replay.enabled=true", "replay: router_replay.enabled: which routes are replayed is not said"),
        (
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True",
            "replay: enable_rollout_routing_replay: which",
        ),
        ("no.such.key=3", "unknown option: no.such.key=3: whether it changes the run is not known"),
        ("actor_rollout_ref.model.path=", "model: the command names none; set model.path"),
    ],
)
def test_what_makes_another_run_than_that_of_verl(options: str, told: str) -> None:
    _, reasons = convert("verl", [f"python -m verl.trainer.main_ppo {VERL_MINIMAL} {options}"])
    assert [reason for reason in reasons if reason.startswith(told)], reasons


STEP_WISE = "docs/coming-from.md#turns-as-samples"


@pytest.mark.parametrize(
    ("trainer", "command", "name", "splits"),
    [
        ("swift", f"swift rlhf {MINIMAL} --multi_turn_scheduler {{}}", "thinking_tips_scheduler", True),
        ("swift", f"swift rlhf {MINIMAL} --multi_turn_scheduler {{}}", "my_scheduler", True),
        ("swift", f"swift rlhf {MINIMAL} --multi_turn_scheduler {{}}", "math_tip_trick", False),
        ("verl", f"{VERL_MINIMAL} actor_rollout_ref.rollout.agent.default_agent_loop={{}}", "my_agent", True),
    ],
)
def test_an_agent_of_verl_or_ms_swift_becomes_a_function_to_write(
    trainer: str, command: str, name: str, splits: bool
) -> None:
    text, reasons = convert(trainer, [command.format(name)])
    (reason,) = [reason for reason in reasons if reason.startswith("environment: ")]
    assert name in reason
    assert (STEP_WISE in reason) == splits
    recipe = tomllib.loads(text)
    assert recipe["rollout"]["environment"] == f"environments:{name}"
    assert recipe.get("algorithm", {}).get("advantage_turns") == ("episode" if splits else None)


def test_the_agent_loops_that_verl_has_are_no_functions_to_write() -> None:
    option = "actor_rollout_ref.rollout.agent.default_agent_loop"
    text, reasons = convert("verl", [f"{VERL_MINIMAL} {option}=single_turn_agent"])
    assert "environment" not in text
    text, reasons = convert("verl", [f"{VERL_MINIMAL} {option}=tool_agent"])
    assert [reason for reason in reasons if reason.startswith(f"environment: {option}=tool_agent: tools are functions")]
    assert "environments:" not in text


def test_what_our_configuration_does_not_accept_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    command = "python -m verl.trainer.main_ppo actor_rollout_ref.model.path=m data.train_batch_size=10"
    with pytest.raises(SystemExit) as left:
        main(["convert", "verl", command])
    printed = capsys.readouterr()
    assert left.value.code == 1
    assert "# Not the run of this command yet:\n#   data: the command names none; set data.path" in printed.out
    assert "not the same run yet: data: the command names none; set data.path" in printed.err


# ---- SkyRL -----------------------------------------------------------------------------------------------------------

SKYRL = """
uv run --isolated --extra megatron -m skyrl.train.entrypoints.main_base
    data.train_data="['gsm8k/train.parquet']" data.val_data="['gsm8k/validation.parquet']"
    trainer.algorithm.advantage_estimator="grpo" trainer.policy.model.path=moonlight16b
    trainer.placement.colocate_all=true trainer.strategy=megatron trainer.placement.policy_num_gpus_per_node=8
    generator.inference_engine.tensor_parallel_size=8 trainer.policy.megatron_config.expert_model_parallel_size=8
    trainer.train_batch_size=128 trainer.policy_mini_batch_size=64 trainer.micro_train_batch_size_per_gpu=4
    trainer.max_prompt_length=512 generator.sampling_params.max_generate_length=1024 trainer.epochs=20
    trainer.policy.optimizer_config.lr=1.0e-6 generator.n_samples_per_prompt=5 trainer.logger=wandb
    environment.env_class=gsm8k
""".replace("\n", " ")
CAPTURED = "cfg.generator.inference_engine.enable_return_routed_experts=True"
REPLAYED = "cfg.trainer.policy.megatron_config.moe_enable_routing_replay=True"


def test_a_command_of_skyrl(tmp_path: Path) -> None:
    text, reasons = convert("skyrl", [f"{SKYRL} {CAPTURED} {REPLAYED}"])
    config = loaded(text, tmp_path)
    assert config.replay.mode == "r3"
    assert (config.model.path, config.data.path) == ("moonlight16b", "gsm8k/train.parquet")
    assert (config.backend.kind, config.backend.expert_parallel) == ("megatron", 8)
    assert (config.rollout.prompts_per_step, config.algorithm.updates_per_rollout) == (128, 2)
    assert (config.algorithm.beta, config.batch.tokens_per_micro_batch) == (0.001, 4 * 1536)
    assert [reason.partition(": an")[0] for reason in reasons] == ["reward: environment.env_class=gsm8k"]


def test_one_of_the_two_flags_of_skyrl_is_not_r3() -> None:
    assert tomllib.loads(convert("skyrl", [SKYRL])[0])["replay"]["mode"] == "off"
    for flag, other in ((CAPTURED, "moe_enable_routing_replay"), (REPLAYED, "enable_return_routed_experts")):
        _, reasons = convert("skyrl", [f"{SKYRL} {flag}"])
        assert [reason for reason in reasons if reason.startswith("replay: ") and f"{other}=true too" in reason]


def test_step_wise_trajectories_of_skyrl_are_left_to_the_environment() -> None:
    step_wise = "generator.step_wise_trajectories"
    _, reasons = convert("skyrl", [f"{SKYRL} {step_wise}=true generator.merge_stepwise_output=true"])
    (reason,) = [reason for reason in reasons if "step" in reason]
    assert reason.startswith(f"environment: {step_wise}=true")
    assert "episode.rewrite" in reason
    _, reasons = convert("skyrl", [f"{SKYRL} {step_wise}=false"])
    assert not [reason for reason in reasons if "step" in reason]


# ---- input -----------------------------------------------------------------------------------------------------------


def test_a_file_a_text_and_words_give_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["megatron", "rlhf", *MINIMAL.split()]
    (tmp_path / "train.sh").write_text(" \\\n  ".join(words))
    printed = []
    for arguments in ([str(tmp_path / "train.sh")], [" ".join(words)], words):
        main(["convert", "swift", *arguments])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert loaded(printed[0], tmp_path).model.path == "m"


def test_a_command_that_ends_with_the_name_of_a_yaml_file_is_no_file() -> None:
    words = ["data.train_files=d.parquet", "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml"]
    assert convert("verl", [" ".join(words)]) == convert("verl", words)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nemo", "x y"], "no such trainer: expected swift or verl or skyrl"),
        (["skyrl", "ls -l"], "not a command of SkyRL"),
        (["swift", "ls -l"], "not a command of ms-swift"),
        (["verl", "ls -l"], "not a command of verl"),
        (["swift", "no-such-file.sh"], "cannot be read"),
        (["swift", "megatron rlhf --model 'm"], "a quote is not closed"),
    ],
)
def test_wrong_input_is_told_in_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["convert", *arguments])
    printed = capsys.readouterr()
    assert (printed.out, left.value.code) == ("", 2)
    assert told in printed.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    main(["convert", "--help"])
    assert "moe-replay convert swift megatron rlhf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run 'a b' \"c d\" e\\ f", ["run", "a b", "c d", "e f"]),
        ("run '$A `b`' \\$C \"; | it's\"", ["run", "$A `b`", "$C", "; | it's"]),
        ("#!/bin/bash\nrun a \\\n  b # it's a comment\n", ["run", "a", "b"]),
        ("run a.jsonl#500 '#b'", ["run", "a.jsonl#500", "#b"]),
        ("run '{\"a\":\n 1}'\n\n", ["run", '{"a":\n 1}']),
    ],
)
def test_the_words_of_a_command_line(text: str, words: list[str]) -> None:
    assert read_command([text]).words == words


def test_environment_assignments_in_front_of_a_command() -> None:
    command = read_command(["export A=1 B='2 3'\nC=4 run D=5"])
    assert (command.words, command.environment) == (["run", "D=5"], {"A": "1", "B": "2 3", "C": "4"})
    assert read_command(["A=1", "run", "--b"]).environment == {"A": "1"}


@pytest.mark.parametrize(
    ("script", "syntax"),
    [
        ("run $A", r"found '\$A'"),
        ('run "${A[@]}"', r"found '\$\{A'"),
        ("run $(date)", r"found '\$\(date'"),
        ("run `date`", "found '`'"),
        ("DATA=(a b)", r"found '\('"),
        ("if [ a = b ]; then run; fi", "found ';'"),
        ("run a 2>&1 | tee log.txt", "found '>&'"),
        ("set -x\nrun a", "not a single command: found set -x; run a"),
        ("A=1", "not a single command: found none"),
    ],
)
def test_shell_syntax_is_refused(script: str, syntax: str) -> None:
    with pytest.raises(ConversionError, match=rf"{syntax}.*in front of the training command"):
        read_command([script])


@pytest.mark.parametrize("text", ["run 'a", 'run "a', "run \\"])
def test_an_open_quote_is_refused(text: str) -> None:
    with pytest.raises(ConversionError, match="not closed"):
        read_command([text])


def test_the_words_of_an_expanded_command_are_literal() -> None:
    assert read_command(["run", "$A", "a;b"]).words == ["run", "$A", "a;b"]


def test_a_hydra_file_of_verl(tmp_path: Path) -> None:
    """Nested keys as in `.hydra/config.yaml`; interpolations are resolved or named."""
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(
        "model_engine: dp\nalgorithm: {adv_estimator: grpo}\n"
        "data:\n  train_files: [d.parquet]\n  val_files: null\n  max_prompt_length: 256\n"
        "actor_rollout_ref:\n  model: {path: m}\n"
        "  actor: {router_replay: {mode: R3}, optim: {lr: 1e-6}}\n"
        "  rollout: {n: 4, prompt_length: '${data.max_prompt_length}', response_length: '${oc.select:a,8}'}\n"
        "trainer: {logger: [console, tensorboard], resume_mode: disable, experiment_name: 2026-08-01}\n"
    )
    text, reasons = convert("verl", [str(path)])
    config = loaded(text, tmp_path)
    assert (config.model.path, config.data.path, config.data.max_prompt_length) == ("m", "d.parquet", 256)
    assert (config.replay.mode, config.optim.lr, config.rollout.num_generations) == ("r3", 1e-6, 4)
    assert (config.log.tensorboard, config.log.wandb, config.resume) == (True, False, False)
    option = "actor_rollout_ref.rollout.response_length=${oc.select:a,8}"
    assert reasons == [f"unknown option: {option}: the interpolation is not resolved"]


def test_the_overrides_that_hydra_writes(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    overrides = ["data.train_files=d.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=4"]
    (tmp_path / "overrides.yaml").write_text("".join(f"- {override}\n" for override in overrides))
    assert convert("verl", [str(tmp_path / "overrides.yaml")]) == convert("verl", overrides)


def test_a_yaml_file_of_ms_swift(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "grpo.yml").write_text(
        "model: m\ndataset: [d.jsonl]\ntensor_model_parallel_size: 2\nreward_funcs: [accuracy, format]\n"
        "ref_model: null\nvllm_engine_kwargs: {max_num_seqs: 64}\npadding_free: true\n"
    )
    words = (
        "--model m --dataset d.jsonl --tensor_model_parallel_size 2 --reward_funcs accuracy format "
        "--vllm_engine_kwargs '{\"max_num_seqs\": 64}' --padding_free true"
    )
    assert convert("swift", [str(tmp_path / "grpo.yml")]) == convert("swift", [words])


@pytest.mark.parametrize(("content", "told"), [("a: [", "is not valid YAML"), ("just text", "has no options")])
def test_yaml_that_holds_no_options(content: str, told: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "bad.yaml").write_text(content)
    with pytest.raises(ConversionError, match=told):
        read_command([str(tmp_path / "bad.yaml")])


# ---- docs/coming-from.md ---------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from.md").read_text()
BESIDE = re.findall(r"```sh\n((?:(?!```).)*)```\n\n```toml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("command", "recipe"), BESIDE, ids=["swift", "verl"])
def test_the_recipes_of_the_page_load_and_are_what_the_commands_mean(command: str, recipe: str, tmp_path: Path) -> None:
    trainer = "verl" if "verl.trainer" in command else "swift"
    text, problems = convert(trainer, [command])
    assert problems == []
    assert loaded(recipe, tmp_path) == loaded(text, tmp_path)
    remarks = [line for line in text.splitlines() if line.startswith("#   ") and not line.endswith("RECIPE.toml")]
    assert [line for line in remarks if line not in recipe] == []


def test_the_server_of_the_page_is_what_the_command_means() -> None:
    command = re.findall(r"```sh\n(swift rollout.*?)```\n\n```\n(.*?)\n```", PAGE, re.DOTALL)
    ((theirs, ours),) = command
    assert ours in convert("swift", [theirs])[0]
