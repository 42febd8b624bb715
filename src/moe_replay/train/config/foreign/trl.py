"""Options of TRL's GRPO trainer, read in TRL 1.16."""

from __future__ import annotations

from moe_replay.train.config.foreign.options import Option, derived, same
from moe_replay.train.config.foreign.swift import AGGREGATIONS, BASELINES, CORRECTIONS
from moe_replay.train.config.foreign.swift import OPTIONS as SWIFT

_AS_IN_SWIFT = """
    learning_rate lr_scheduler_type weight_decay max_grad_norm adam_beta1 adam_beta2 adam_epsilon warmup_steps
    warmup_ratio num_generations max_completion_length temperature top_p top_k min_p repetition_penalty
    generation_batch_size steps_per_generation per_device_train_batch_size gradient_accumulation_steps
    gradient_checkpointing max_steps
    use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_server_base_url vllm_server_host
    vllm_server_port vllm_server_timeout beta epsilon epsilon_high delta importance_sampling_level
    reward_weights sync_ref_model ref_model_sync_steps ref_model_mixup_alpha top_entropy_quantile
    output_dir save_steps save_total_limit eval_steps logging_steps report_to run_name seed bf16 fp16 lora_alpha
    lora_dropout deepspeed num_train_epochs num_iterations log_completions
"""

OPTIONS: dict[str, Option] = {
    **{name: SWIFT[name] for name in _AS_IN_SWIFT.split()},
    **same(
        {
            "model_name_or_path": "model.path",
            "dtype": "model.dtype",
            "attn_implementation": "model.attention",
            "trust_remote_code": "model.trust_remote_code",
            "lora_r": "model.lora_rank",
            "lora_target_modules": "model.lora_targets",
            "dataset_name": "data.path",
            "shuffle_dataset": "data.shuffle",
            "max_prompt_length": "data.max_prompt_tokens",
            "vllm_max_model_length": "rollout.max_length",
            "vllm_enable_sleep_mode": "rollout.sleep",
            "max_tool_calling_iterations": "rollout.max_turns",
            "mask_truncated_completions": "algorithm.overlong_filter",
            "vllm_importance_sampling_clip_max": "algorithm.correction_high",
            "vllm_importance_sampling_cap": "algorithm.correction_high",
            "vllm_importance_sampling_clip_min": "algorithm.correction_low",
        }
    ),
    "loss_type": Option("algorithm.loss", AGGREGATIONS),
    "scale_rewards": Option("algorithm.baseline", BASELINES),
    "vllm_importance_sampling_mode": Option("algorithm.correction", CORRECTIONS),
    **derived(
        {
            "use_peft": ("model.lora_rank", "0: all weights are trained"),
            "vllm_importance_sampling_correction": ("algorithm.correction", "off, token_truncate, ..."),
        }
    ),
}
