"""The commands of the pull requests on routing replay: converted, planned, and two steps of each on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.distributed import harness, megatron_models

pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("pydantic", reason="the trainer's own dependency")

from moe_replay.tools.convert import convert
from moe_replay.tools.dry_run import dry_run
from moe_replay.train.config.file import load_config
from moe_replay.train.config.train_config import TrainConfig
from tests.cli.test_train_command import QWEN3_30B_A3B

harness.PRELOADED.extend(megatron_models.PRELOADED)

SWIFT = r"""
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
NPROC_PER_NODE=8 \
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
megatron rlhf \
    --rlhf_type grpo \
    --model Qwen/Qwen3-30B-A3B-Instruct-2507 \
    --save_safetensors true \
    --merge_lora false \
    --context_parallel_size 2 \
    --tensor_model_parallel_size 2 \
    --expert_model_parallel_size 4 \
    --pipeline_model_parallel_size 2 \
    --dataset open-r1/DAPO-Math-17k-Processed \
    --num_train_epochs 1 \
    --global_batch_size 64 \
    --micro_batch_size 2 \
    --steps_per_generation 2 \
    --num_generations 8 \
    --reward_funcs accuracy format \
    --use_vllm true \
    --vllm_mode colocate \
    --vllm_gpu_memory_utilization 0.3 \
    --vllm_tensor_parallel_size 4 \
    --vllm_max_model_len 16384 \
    --max_length 8192 \
    --max_completion_length 8192 \
    --tuner_type lora \
    --lr 5e-5 \
    --bf16 true \
    --beta 0.00 \
    --importance_sampling_level sequence \
    --epsilon 3e-4 \
    --epsilon_high 4e-4 \
    --dynamic_sample false \
    --overlong_filter true \
    --loss_type grpo \
    --sleep_level 2 \
    --offload_model true \
    --offload_bridge false \
    --offload_optimizer true \
    --logging_steps 1 \
    --recompute_granularity selective \
    --finetune \
    --dataloader_num_workers 8 \
    --dataset_num_proc 8 \
    --no_save_optim \
    --no_save_rng \
    --attention_backend flash \
    --temperature 1.0 \
    --padding_free true \
    --sequence_parallel true \
    --log_completions true \
    --report_to wandb \
    --router_replay_mode R3 # Options: "R2", "R3"
"""

VERL = """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet
    data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.model.path=MODEL
    actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 trainer.logger=['console']
""".replace("\n", " ")

# verl's examples/router_replay/run_qwen30_a3b_megatron_vllm.sh as the shell expands it, with a model and data filled in
VERL_EXAMPLE = """
python3 -m verl.trainer.main_ppo --config-path=config --config-name=ppo_megatron_trainer.yaml
    algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=8
    data.max_prompt_length=1024 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
    actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.actor.megatron.router_replay.mode=R3
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.bias_activation_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1
    +actor_rollout_ref.actor.megatron.override_transformer_config.gradient_accumulation_fusion=True
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True
    actor_rollout_ref.actor.megatron.param_offload=True actor_rollout_ref.actor.megatron.optimizer_offload=True
    actor_rollout_ref.actor.megatron.grad_offload=True actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.mode=async actor_rollout_ref.actor.megatron.use_mbridge=True
    actor_rollout_ref.rollout.gpu_memory_utilization=0.65 actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.enable_chunked_prefill=True actor_rollout_ref.rollout.max_num_batched_tokens=2048
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3
    actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=1
    actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
    actor_rollout_ref.ref.megatron.expert_model_parallel_size=8
    actor_rollout_ref.ref.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.ref.megatron.param_offload=True actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True algorithm.use_kl_in_reward=False trainer.critic_warmup=0
    trainer.logger=['console'] trainer.project_name=verl_grpo_example_gsm8k_math
    trainer.experiment_name=Node1_bs8_1281_2_minbs8_micro_bs3 trainer.nnodes=1 trainer.n_gpus_per_node=8
    trainer.save_freq=-1 trainer.test_freq=10 trainer.total_training_steps=50000 trainer.balance_batch=False
    trainer.use_legacy_worker_impl=enable trainer.val_before_train=False
""".replace("\n", " ")


def method_1(folder: Path) -> str:
    """The block of verl's #4101 in a configuration file; the rest of the file is that of the command."""
    import yaml

    tree: dict[str, Any] = {"router_replay": {"enabled": True, "mode": "R2"}}
    for word in VERL.split()[3:]:
        name, _, value = word.partition("=")
        *sections, key = name.split(".")
        table = tree
        for section in sections:
            table = table.setdefault(section, {})
        table[key] = yaml.safe_load(value)
    path = folder / "trainer.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def method_2(folder: Path) -> str:
    return f'{VERL} actor_rollout_ref.actor.router_replay.mode="R2"'


DUAL_CLIP = {"delta": 3.0, "loss_aggregation": "token_mean"}
GSPO = {"importance_sampling_level": "sequence", "clip_low": 3e-4, "clip_high": 4e-4}
OBJECTIVES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "ms-swift #8196": (
        lambda folder: SWIFT,
        "r3",
        GSPO | {"loss_aggregation": "seq_mean_token_mean", "overlong_filter": True, "updates_per_rollout": 2},
    ),
    "verl #4101, method 1": (
        method_1,
        "r2",
        {"delta": 3.0, "loss_aggregation": "token_mean", "updates_per_rollout": 2},
    ),
    "verl #4101, method 2": (
        method_2,
        "r2",
        {"delta": 3.0, "loss_aggregation": "token_mean", "updates_per_rollout": 2},
    ),
    "verl's example": (lambda folder: VERL_EXAMPLE, "r3", DUAL_CLIP | {"updates_per_rollout": 1}),
}
"""Name -> the command, its replay mode, and its objective in our words."""


def recipe_of(name: str, folder: Path) -> Path:
    pytest.importorskip("yaml")
    text, reasons = convert("swift" if "swift" in name else "verl", [OBJECTIVES[name][0](folder)])
    assert reasons == []
    path = folder / "recipe.toml"
    path.write_text(text)
    return path


def check_objective(name: str, config: TrainConfig) -> None:
    _, mode, objective = OBJECTIVES[name]
    assert config.replay.mode == mode
    assert (config.algorithm.loss, config.algorithm.advantage, config.algorithm.beta) == ("ppo_clip", "grpo", 0.0)
    assert {key: getattr(config.algorithm, key) for key in objective} == objective


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_command_becomes_the_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reason for status 1, its objective, and a plan for the model."""
    score = tmp_path / "verl" / "utils" / "reward_score.py"  # verl's default reward needs verl
    score.parent.mkdir(parents=True)
    score.write_text("def default_compute_score(**sample):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    config = load_config(recipe_of(name, tmp_path), ["--model.path", str(model)])
    check_objective(name, config)
    assert config.backend.kind == "megatron"
    mode = OBJECTIVES[name][1]
    plan = dry_run(config).report
    assert plan.startswith(f"replay   {mode}: as configured\n")
    assert "48 decoder layers, 48 of them route, top 8 of 128" in plan


def test_the_data_and_rewards_of_ms_swift(tmp_path: Path) -> None:
    config = load_config(recipe_of("ms-swift #8196", tmp_path))
    assert (config.data.path, config.data.subset) == ("open-r1/DAPO-Math-17k-Processed", "all")
    assert (config.data.chat_template, config.data.epochs) == ("auto", 1.0)
    assert config.reward.functions == ("accuracy", "format")
    assert (config.model.lora_rank, config.model.lora_target_modules) == (8, ("all-linear",))


def test_the_example_of_verl_as_it_is_has_no_model_and_no_data() -> None:
    """Its script leaves HF_MODEL_PATH and TRAIN_DATA_PATH empty."""
    command = VERL_EXAMPLE.replace("path=Qwen/Qwen3-30B-A3B", "path=").replace("files=train.parquet", "files=")
    _, reasons = convert("verl", [command])
    assert [reason.partition(":")[0] for reason in reasons] == ["model", "data"]


def two_steps(recipe: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Train on this rank as `moe-replay train RECIPE --tiny` does without vLLM; the lines of the metrics."""
    from moe_replay.train.loop import train

    with mock.patch("moe_replay.train.config.file.find_spec", return_value=None):
        config = load_config(Path(recipe), overrides, tiny=True)
    return [json.loads(line) for line in (train(config) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.whole_runs
@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_steps_of_each_command(demo_files: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("megatron.core")
    recipe = recipe_of(name, tmp_path)
    settings = {
        **{"model.path": demo_files.model, "data.path": demo_files.train, "output": tmp_path / "run"},
        **{"reward.workers": 0, "rollout.max_tokens": 8, "steps": 2},
    }
    overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    (lines,) = harness.run_ranks(1, two_steps, str(recipe), overrides)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["routing/replayed_fraction"] > 0.5 for line in lines)
    trained = load_config(tmp_path / "run" / "config.toml")
    assert trained.backend.kind == "megatron"
    check_objective(name, trained)
