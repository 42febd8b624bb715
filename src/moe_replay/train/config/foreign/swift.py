"""Options of ms-swift 4.6 (`megatron rlhf`, `swift rlhf`, `--rlhf_type grpo`) and of TRL 1.16, which it extends."""

from __future__ import annotations

from moe_replay.train.config.foreign.options import (
    MEGATRON_SETTINGS,
    PARALLEL_SIZES,
    VLLM_SETTINGS,
    Option,
    derived,
    entries,
    only,
    same,
    without,
)

SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
ADVANTAGES = {"group": "grpo", "none": "dr_grpo", "true": "grpo", "false": "dr_grpo"}
AGGREGATIONS = {
    "grpo": "seq_mean_token_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm",
}
LOSSES = {"sapo": "seq_mean_token_mean", "cispo": "token_mean"}
"""Losses other than the clipped surrogate, with their aggregation."""
LEVELS = {"token": "token", "sequence": "sequence", "sequence_token": "sequence"}  # the last two have one gradient
CORRECTIONS = {"token_truncate": "token_truncate", "token_mask": "token_mask"}
SUBSETS = {"open-r1/DAPO-Math-17k-Processed": "all"}
"""Subsets that ms-swift reads of data sets that have several, if the command names none."""
ATTENTION = {"flash_attn": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa"}

OPTIONS: dict[str, Option] = {
    **same(
        {
            "model": "model.path",
            "ref_model": "model.reference",
            "torch_dtype": "model.dtype",
            "lora_rank": "model.lora_rank",
            "lora_alpha": "model.lora_alpha",
            "merge_lora": "model.lora_merge",
            "vllm_enable_lora": "rollout.lora",
            "target_modules": "model.lora_target_modules",
            "gradient_checkpointing": "model.gradient_checkpointing",
            **PARALLEL_SIZES,
            "use_distributed_optimizer": "backend.distributed_optimizer",
            "max_length": "data.max_prompt_length",
            "dataset_shuffle": "data.shuffle",
            "system": "data.system",
            "num_train_epochs": "data.epochs",
            "num_generations": "rollout.num_generations",
            "max_completion_length": "rollout.max_tokens",
            "vllm_max_model_len": "rollout.max_length",
            "temperature": "rollout.temperature",
            "top_p": "rollout.top_p",
            "max_turns": "rollout.max_turns",
            "router_replay_mode": "replay.mode",
            "epsilon": "algorithm.clip_low",
            "epsilon_high": "algorithm.clip_high",
            "beta": "algorithm.beta",
            "num_iterations": "algorithm.num_iterations",
            "dynamic_sample": "algorithm.dynamic_sampling",
            "max_resample_times": "algorithm.max_refills",
            "overlong_filter": "algorithm.overlong_filter",
            "delta": "algorithm.delta",
            "tau_pos": "algorithm.tau_pos",
            "tau_neg": "algorithm.tau_neg",
            "rollout_importance_sampling_threshold": "algorithm.rollout_correction_high",
            "lr learning_rate": "optim.lr",
            "weight_decay": "optim.weight_decay",
            "clip_grad max_grad_norm": "optim.max_grad_norm",
            "adam_eps adam_epsilon": "optim.eps",
            "padding_free": "batch.packed",
            "save_safetensors": "checkpoint.export",
            "save_total_limit": "checkpoint.keep",
            "log_completions": "log.completions",
            "wandb_project": "log.project",
            "wandb_exp_name run_name": "name",
            "output_dir": "output",
            "seed": "seed",
        }
    ),
    **entries("backend.megatron", MEGATRON_SETTINGS),
    **entries("rollout.options", VLLM_SETTINGS, prefix="vllm_"),
    "importance_sampling_level": Option("algorithm.importance_sampling_level", LEVELS),
    "use_chat_template": Option("data.chat_template", {"true": "auto", "false": "none"}),
    "lr_decay_style": Option("optim.schedule", SCHEDULES),
    "lr_scheduler_type": Option("optim.schedule", SCHEDULES),
    "scale_rewards": Option("algorithm.advantage", ADVANTAGES),
    "advantage_estimator": Option("algorithm.advantage", {"grpo": None, "rloo": "rloo"}),
    "rollout_importance_sampling_mode": Option("algorithm.rollout_correction", CORRECTIONS),
    "attn_impl": Option("model.attn_implementation", ATTENTION | {"eager": "eager"}),
    "bf16": Option("model.dtype", {"true": "bfloat16", "false": None}),
    "fp16": Option("model.dtype", {"true": "float16", "false": None}),
    "offload_model": Option("backend.offload", {"true": True, "false": None}),
    "offload_optimizer": Option("backend.offload", {"true": True, "false": None}),
    "no_save_optim": Option("checkpoint.optimizer", {"true": False, "false": True}),
    "async_generate": Option("rollout.max_staleness", {"true": 1, "false": None}),
    "use_vllm": Option("rollout.engine", {"true": None, "false": "transformers"}),
    **derived(
        {
            "rlhf_type": ("", "only grpo"),
            "loss_type": ("algorithm.loss", "sapo and cispo; for others algorithm.loss_aggregation"),
            "top_k": ("rollout.top_k", "0, not -1, disables it"),
            "columns": ("data.columns", "their name of the prompt is query"),
            "tuner_type train_type": ("model.lora_rank", "lora: the rank; full: 0"),
            "multi_turn_scheduler": (
                "rollout.environment",
                "a function of the trainer's, module:name: docs/coming-from.md#turns-as-samples",
            ),
            "dataset": ("data.path", "one dataset"),
            "val_dataset": ("data.eval_path", "one dataset"),
            "global_batch_size": ("rollout.prompts_per_step", "sequences per update"),
            "generation_batch_size": ("rollout.prompts_per_step", "sequences per rollout"),
            "per_device_train_batch_size": ("rollout.prompts_per_step", "sequences per forward pass"),
            "steps_per_generation": ("algorithm.updates_per_rollout", "updates; in swift rlhf: forward passes"),
            "gradient_accumulation_steps": ("algorithm.updates_per_rollout", "forward passes per update"),
            "micro_batch_size": ("batch.tokens_per_micro_batch", "sequences times maximum length"),
            "train_iters max_steps": ("steps", "in updates; a step here is one rollout with all its updates"),
            "save_steps": ("checkpoint.every", "in updates; a step here is one rollout with all its updates"),
            "eval_steps": ("eval.every", "in updates; a step here is one rollout with all its updates"),
            "lr_warmup_iters warmup_steps": (
                "optim.warmup_steps",
                "in updates; a step here is one rollout with all its updates",
            ),
            "lr_warmup_fraction warmup_ratio": ("optim.warmup_steps", "a fraction of all steps"),
            "adam_beta1": ("optim.betas", "the first value"),
            "adam_beta2": ("optim.betas", "the second value"),
            "reward_funcs": ("reward.functions", "built-in names or module:name"),
            "reward_weights": ("reward.weights", "for the converted functions"),
            "report_to": ("log.wandb", "also log.tensorboard"),
            "sleep_level": ("rollout.sleep", "false for 0; rollout.sleep_level is 1 or 2"),
            "vllm_mode": ("rollout.engine", "colocate: vllm, server: rollout_server"),
            "vllm_server_host vllm_server_port": ("rollout.urls", "http://HOST:PORT of `moe-replay rollout`"),
            "vllm_server_base_url": ("rollout.urls", "addresses of `moe-replay rollout`"),
            "vllm_engine_kwargs": ("rollout.options", "each item of the JSON object is one option"),
        }
    ),
    **without(
        {
            "sequence parallelism is always on with tensor parallelism": "sequence_parallel",
            "metrics are logged every step": "logging_steps log_rollout_offpolicy_metrics log_entropy",
            "prompts are read and tokenized once, at startup": (
                "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
                "dataset_num_proc load_from_cache_file streaming lazy_tokenize data_seed train_dataloader_shuffle"
            ),
            "training starts from the weights of model.path": "finetune no_initialization perform_initialization",
            "read from the model folder": "model_type max_shard_size template_backend",
            "names are those of the Hugging Face Hub": "use_hf",
            "longer prompts are dropped": "truncation_strategy",
            "each turn has rollout.max_tokens": "completion_length_limit_scope",
            "name reward functions as module:name in reward.functions": "external_plugins",
            "the trainer is FSDP2 or Megatron-Core": "deepspeed fsdp tuner_backend use_ray ddp_backend ddp_timeout",
            "gradient reduction is not overlapped": (
                "overlap_grad_reduce overlap_param_gather align_grad_reduce align_param_gather "
                "overlap_param_gather_with_optimizer_step accumulate_allreduce_grads_in_fp32"
            ),
            "the reference model is frozen": "ref_model_sync_steps ref_model_mixup_alpha",
            "adapters have the type of the model": "lora_dtype",
            "checkpoints are complete and verified by digest: docs/checkpoints.md": (
                "async_save use_persistent_ckpt_worker no_load_optim no_load_rng save_strategy"
            ),
            "weights are streamed tensor by tensor": "move_model_batches offload_bridge enable_flattened_weight_sync",
            "HTTP timeouts are fixed: docs/engines.md": ("vllm_server_timeout vllm_server_group_port"),
            "backend.offload moves the optimizer to host memory during rollouts": "optimizer_cpu_offload",
            "checkpoints always contain the RNG states": "no_save_rng",
            "metrics go to W&B, completions to a parquet file": "wandb_log_unique_prompts",
            "text models only": (
                "freeze_vit freeze_aligner freeze_llm vllm_limit_mm_per_prompt max_pixels vllm_mm_processor_cache_gb"
            ),
            "of rewards that are not converted": (
                "cosine_min_len_value_wrong cosine_max_len_value_wrong cosine_min_len_value_correct cosine_max_len "
                "cosine_max_len_value_correct repetition_n_grams repetition_max_penalty soft_max_length "
                "soft_cache_length"
            ),
        }
    ),
    **only(
        "sampling",
        "not supported: the engine would sample from another distribution than the trainer scores",
        "min_p=0 repetition_penalty=1 stop_words structured_outputs_regex",
    ),
    **only(
        "environment",
        "environments are functions or tools: rollout.environment, docs/environments.md",
        "use_gym_env=false gym_env vllm_server_pass_dataset=false",
    ),
    **only("data", "the chat template in the model's folder is used", "template agent_template"),
    **only("data", "the training data is not split", "split_dataset_ratio=0"),
    **only("reward", "call it from a reward function, module:name", "reward_model reward_model_plugin"),
    **only(
        "model",
        "adapters have no dropout and no bias, and are scaled by alpha / rank",
        "lora_dropout=0 lora_bias=none use_rslora=false use_dora=false",
    ),
    **only("model", "the newest revision is used", "model_revision=main"),
    **only(
        "loss",
        "not implemented: write a policy loss, docs/extending.md",
        (
            "top_entropy_quantile=1 off_policy_sequence_mask_delta real_tau fipo_decay_rate fipo_clip_range "
            "fipo_clip_high_only fipo_safety_threshold"
        ),
    ),
    **only("loss", "the reference model is frozen", "sync_ref_model=false"),
    **only("loss", "KL is a loss term, not part of the reward", "kl_in_reward=false"),
    **only("loss", "there is no teacher", "teacher_model teacher_model_server teacher_kl_coef"),
    **only("optimizer", "the learning rate decays to 0", "min_lr=0 lr_decay_iters lr_warmup_init=0"),
    **only("optimizer", "the optimizer is AdamW", "optimizer=adam"),
}

RENAMED = {
    "train_type": "tuner_type",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
}
"""Older names."""

_DEFAULTS = {
    "max_completion_length": "512",
    "temperature": "0.9",
    "beta": "0.04",
    "loss_type": "grpo",
    "weight_decay": "0.1",
    "adam_beta2": "0.95",
    "seed": "42",
    "save_steps": "500",
    "max_resample_times": "3",
    "report_to": "tensorboard",
}
MEGATRON_DEFAULTS = _DEFAULTS | {
    "router_replay_mode": "disabled",
    "lr_decay_style": "cosine",
    "expert_tensor_parallel_size": "1",
    "use_distributed_optimizer": "true",
    "global_batch_size": "16",
    "recompute_granularity": "selective",
}
"""Defaults of `megatron rlhf` that differ from ours."""
SWIFT_DEFAULTS = _DEFAULTS | {
    "lr_scheduler_type": "cosine",
    "gradient_checkpointing": "true",
    "padding_free": "false",
    "num_train_epochs": "3",
    "tuner_type": "lora",
    "use_vllm": "false",
}
"""Defaults of `swift rlhf` that differ from ours."""


# ---- TRL -------------------------------------------------------------------------------------------------------------

_SHARED_WITH_TRL = """
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

TRL_OPTIONS: dict[str, Option] = {
    **{name: OPTIONS[name] for name in _SHARED_WITH_TRL.split()},
    **same(
        {
            "model_name_or_path": "model.path",
            "dtype": "model.dtype",
            "attn_implementation": "model.attn_implementation",
            "trust_remote_code": "model.trust_remote_code",
            "lora_r": "model.lora_rank",
            "lora_target_modules": "model.lora_target_modules",
            "dataset_name": "data.path",
            "shuffle_dataset": "data.shuffle",
            "max_prompt_length": "data.max_prompt_length",
            "vllm_max_model_length": "rollout.max_length",
            "vllm_enable_sleep_mode": "rollout.sleep",
            "max_tool_calling_iterations": "rollout.max_turns",
            "mask_truncated_completions": "algorithm.overlong_filter",
            "vllm_importance_sampling_clip_max": "algorithm.rollout_correction_high",
            "vllm_importance_sampling_cap": "algorithm.rollout_correction_high",
            "vllm_importance_sampling_clip_min": "algorithm.rollout_correction_low",
        }
    ),
    "loss_type": Option("algorithm.loss_aggregation", AGGREGATIONS),
    "scale_rewards": Option("algorithm.advantage", ADVANTAGES),
    "vllm_importance_sampling_mode": Option(
        "algorithm.rollout_correction", CORRECTIONS | {"sequence_mask": "sequence_mask"}
    ),
    **derived(
        {
            "use_peft": ("model.lora_rank", "0: all weights are trained"),
            "vllm_importance_sampling_correction": ("algorithm.rollout_correction", "off, token_truncate, ..."),
        }
    ),
}
