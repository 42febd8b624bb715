"""Options of ms-swift: `megatron rlhf` and `swift rlhf` with `--rlhf_type grpo`, read in ms-swift 4.6."""

from __future__ import annotations

from moe_replay.train.config.foreign.options import (
    MEGATRON_SETTINGS,
    VLLM_SETTINGS,
    Option,
    derived,
    entries,
    same,
    without,
)

SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
BASELINES = {"group": "std", "none": "none", "true": "std", "false": "none"}
AGGREGATIONS = {"grpo": "grpo", "bnpo": "dapo", "dapo": "dapo", "dr_grpo": "dr_grpo"}
CORRECTIONS = {"token_truncate": "token_truncate", "token_mask": "token_mask", "sequence_mask": "sequence_mask"}
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
            "target_modules": "model.lora_targets",
            "gradient_checkpointing": "model.gradient_checkpointing",
            "tensor_model_parallel_size": "backend.tensor_parallel",
            "pipeline_model_parallel_size": "backend.pipeline_parallel",
            "virtual_pipeline_model_parallel_size": "backend.virtual_pipeline",
            "context_parallel_size": "backend.context_parallel",
            "expert_model_parallel_size": "backend.expert_parallel",
            "expert_tensor_parallel_size": "backend.expert_tensor_parallel",
            "use_distributed_optimizer": "backend.distributed_optimizer",
            "max_length": "data.max_prompt_tokens",
            "dataset_shuffle": "data.shuffle",
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
            "importance_sampling_level": "algorithm.level",
            "rollout_importance_sampling_threshold": "algorithm.correction_high",
            "lr": "optim.lr",
            "learning_rate": "optim.lr",
            "weight_decay": "optim.weight_decay",
            "clip_grad": "optim.max_grad_norm",
            "max_grad_norm": "optim.max_grad_norm",
            "adam_eps": "optim.eps",
            "adam_epsilon": "optim.eps",
            "padding_free": "batch.packed",
            "save_safetensors": "checkpoint.export",
            "save_total_limit": "checkpoint.keep",
            "log_completions": "log.completions",
            "wandb_project": "log.project",
            "wandb_exp_name": "name",
            "run_name": "name",
            "output_dir": "output",
            "seed": "seed",
        }
    ),
    **entries("backend.megatron", MEGATRON_SETTINGS),
    **entries("rollout.options", VLLM_SETTINGS, prefix="vllm_"),
    "loss_type": Option("algorithm.loss", AGGREGATIONS),
    "lr_decay_style": Option("optim.schedule", SCHEDULES),
    "lr_scheduler_type": Option("optim.schedule", SCHEDULES),
    "scale_rewards": Option("algorithm.baseline", BASELINES),
    "advantage_estimator": Option("algorithm.baseline", {"grpo": None, "rloo": "leave_one_out"}),
    "rollout_importance_sampling_mode": Option("algorithm.correction", CORRECTIONS),
    "attn_impl": Option("model.attention", ATTENTION | {"eager": "eager"}),
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
            "tuner_type": ("model.lora_rank", "lora: the rank; full: 0"),
            "train_type": ("model.lora_rank", "lora: the rank; full: 0"),
            "dataset": ("data.path", "one data set"),
            "val_dataset": ("data.eval_path", "one data set"),
            "global_batch_size": ("rollout.prompts_per_step", "sequences of an update"),
            "generation_batch_size": ("rollout.prompts_per_step", "sequences of a rollout"),
            "per_device_train_batch_size": ("rollout.prompts_per_step", "sequences of a forward"),
            "steps_per_generation": ("algorithm.updates_per_rollout", "updates; in swift rlhf: forwards of a rollout"),
            "gradient_accumulation_steps": ("algorithm.updates_per_rollout", "forwards of an update"),
            "micro_batch_size": ("batch.tokens_per_micro_batch", "sequences times their greatest length"),
            "train_iters": ("steps", "updates; a step here is one rollout and all its updates"),
            "max_steps": ("steps", "updates; a step here is one rollout and all its updates"),
            "save_steps": ("checkpoint.every", "updates; a step here is one rollout and all its updates"),
            "eval_steps": ("eval.every", "updates; a step here is one rollout and all its updates"),
            "lr_warmup_iters": ("optim.warmup_steps", "updates; a step here is one rollout and all its updates"),
            "warmup_steps": ("optim.warmup_steps", "updates; a step here is one rollout and all its updates"),
            "lr_warmup_fraction": ("optim.warmup_steps", "a fraction of the steps"),
            "warmup_ratio": ("optim.warmup_steps", "a fraction of the steps"),
            "adam_beta1": ("optim.betas", "the first of the two"),
            "adam_beta2": ("optim.betas", "the second of the two"),
            "reward_funcs": ("reward.functions", "built-in names, or module:name"),
            "reward_weights": ("reward.weights", "of the functions that are converted"),
            "report_to": ("log.wandb", "also log.tensorboard"),
            "sleep_level": ("rollout.sleep", "false for 0; rollout.sleep_level is 1 or 2"),
            "vllm_mode": ("rollout.engine", "colocate: vllm, server: vllm_server"),
            "vllm_server_host": ("rollout.urls", "http://HOST:PORT of `moe-replay rollout`"),
            "vllm_server_port": ("rollout.urls", "http://HOST:PORT of `moe-replay rollout`"),
            "vllm_server_base_url": ("rollout.urls", "of `moe-replay rollout`"),
            "vllm_engine_kwargs": ("rollout.options", "a JSON object; each of its items is an option"),
        }
    ),
    **without(
        {
            "sequence parallelism is always on with tensor parallelism": "sequence_parallel",
            "tokens are sampled from the policy itself, so that trainer and engine agree on their log-probs": (
                "min_p repetition_penalty stop_words structured_outputs_regex"
            ),
            "set rollout.top_k: 0, not -1, is off": "top_k",
            "metrics are written for every step": "logging_steps log_rollout_offpolicy_metrics log_entropy",
            "prompts are read and tokenized once, at the start": (
                "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor "
                "dataset_num_proc load_from_cache_file streaming lazy_tokenize data_seed split_dataset_ratio "
                "train_dataloader_shuffle"
            ),
            "training starts from the weights of model.path": "finetune no_initialization perform_initialization",
            "taken from the model's folder": (
                "model_type template model_revision max_shard_size system use_chat_template template_backend "
                "agent_template"
            ),
            "longer prompts are left out": "truncation_strategy",
            "an environment is a function, or a list of tools: rollout.environment, docs/environments.md": (
                "multi_turn_scheduler use_gym_env gym_env completion_length_limit_scope vllm_server_pass_dataset"
            ),
            "a reward function in a file is named module:name in reward.functions": "external_plugins",
            "the trainer is FSDP2 or Megatron-Core": "deepspeed fsdp tuner_backend use_ray optimizer ddp_backend",
            "gradients are reduced when they are complete": (
                "overlap_grad_reduce overlap_param_gather align_grad_reduce align_param_gather "
                "overlap_param_gather_with_optimizer_step accumulate_allreduce_grads_in_fp32"
            ),
            "clip_high = inf and a loss of your own: docs/extending.md": "delta tau_pos tau_neg top_entropy_quantile",
            "the learning rate falls to 0": "min_lr lr_decay_iters lr_warmup_init",
            "LoRA adapters are plain: no dropout, no bias": "lora_dropout lora_bias lora_dtype use_rslora use_dora",
            "the reference model is fixed": "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha",
            "the divergence is a term of the loss": "kl_in_reward",
            "checkpoints are whole and read back with their digests: docs/checkpoints.md": (
                "async_save use_persistent_ckpt_worker no_load_optim no_load_rng save_strategy"
            ),
            "weights are streamed tensor by tensor": "move_model_batches offload_bridge enable_flattened_weight_sync",
            "a server is asked over HTTP with the timeouts of docs/engines.md": (
                "vllm_server_timeout vllm_server_group_port"
            ),
            "the optimizer is in host memory while the engine samples: backend.offload": "optimizer_cpu_offload",
            "a checkpoint holds the states of all generators": "no_save_rng",
            "metrics go to W&B, texts to a parquet file": "wandb_log_unique_prompts",
            "text only": "freeze_vit freeze_aligner freeze_llm vllm_limit_mm_per_prompt max_pixels",
        }
    ),
}

RENAMED = {
    "train_type": "tuner_type",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
}
"""Older names of options."""

MEGATRON_DEFAULTS = {
    "max_completion_length": "512",
    "temperature": "0.9",
    "beta": "0.04",
    "loss_type": "grpo",
    "router_replay_mode": "disabled",
    "lr_decay_style": "cosine",
    "weight_decay": "0.1",
    "adam_beta2": "0.95",
    "seed": "42",
    "expert_tensor_parallel_size": "1",
    "use_distributed_optimizer": "true",
    "save_steps": "500",
    "global_batch_size": "16",
    "recompute_granularity": "selective",
    "report_to": "tensorboard",
}
"""Of `megatron rlhf`, where ours differ."""
SWIFT_DEFAULTS = {
    "max_completion_length": "512",
    "temperature": "0.9",
    "beta": "0.04",
    "loss_type": "grpo",
    "lr_scheduler_type": "cosine",
    "weight_decay": "0.1",
    "adam_beta2": "0.95",
    "seed": "42",
    "gradient_checkpointing": "true",
    "padding_free": "false",
    "num_train_epochs": "3",
    "tuner_type": "lora",
    "save_steps": "500",
    "report_to": "tensorboard",
    "use_vllm": "false",
}
"""Of `swift rlhf`, where ours differ."""
