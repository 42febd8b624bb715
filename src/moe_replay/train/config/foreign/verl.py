"""Options of verl 0.9's `main_ppo`, by dotted name."""

from __future__ import annotations

from moe_replay.train.config.foreign.options import PARALLEL_SIZES, Option, derived, entries, only, same, without

ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
TRANSFORMER_CONFIG = f"{MEGATRON}.override_transformer_config."
REPLAY_MODES = {"disabled": "off", "R2": "r2", "R3": "r3"}
AGGREGATIONS = {
    mode: mode.replace("-", "_") for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
}
ESTIMATORS = {"grpo": None, "rloo": "rloo"}
LOSSES = {"vanilla": "ppo_clip", "gspo": "ppo_clip", "sapo": "sapo", "cispo": "cispo"}
ENGINES = {"vllm": "vllm", "sglang": "sglang_server", "hf": "transformers"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
VLLM_SETTINGS = """
    gpu_memory_utilization enforce_eager max_num_seqs max_num_batched_tokens enable_chunked_prefill
    enable_prefix_caching data_parallel_size
"""

OPTIONS: dict[str, Option] = {
    **same(
        {
            f"{MODEL}.path": "model.path",
            f"{MODEL}.trust_remote_code": "model.trust_remote_code",
            f"{MODEL}.enable_gradient_checkpointing": "model.gradient_checkpointing",
            f"{MODEL}.use_remove_padding": "batch.packed",
            f"{MODEL}.lora_rank": "model.lora_rank",
            f"{MODEL}.lora_alpha": "model.lora_alpha",
            f"{MODEL}.target_modules": "model.lora_target_modules",
            f"{MODEL}.lora.rank": "model.lora_rank",
            f"{MODEL}.lora.alpha": "model.lora_alpha",
            f"{MODEL}.lora.merge": "model.lora_merge",
            f"{MEGATRON}.use_distributed_optimizer": "backend.distributed_optimizer",
            f"{MEGATRON}.use_remove_padding": "batch.packed",
            f"{MEGATRON}.dtype": "model.dtype",
            f"{ACTOR}.ulysses_sequence_parallel_size": "backend.context_parallel",
            f"{ACTOR}.fsdp_config.dtype": "model.dtype",
            f"{ACTOR}.use_remove_padding": "batch.packed",
            f"{ACTOR}.ppo_max_token_len_per_gpu": "batch.tokens_per_micro_batch",
            f"{ACTOR}.clip_ratio_c": "algorithm.delta",
            f"{ACTOR}.tau_pos": "algorithm.tau_pos",
            f"{ACTOR}.tau_neg": "algorithm.tau_neg",
            f"{ACTOR}.clip_ratio_low": "algorithm.clip_low",
            f"{ACTOR}.clip_ratio_high": "algorithm.clip_high",
            f"{ACTOR}.optim.lr": "optim.lr",
            f"{ACTOR}.optim.weight_decay": "optim.weight_decay",
            f"{ACTOR}.optim.betas": "optim.betas",
            f"{ACTOR}.optim.clip_grad": "optim.max_grad_norm",
            f"{ACTOR}.optim.lr_warmup_steps": "optim.warmup_steps",
            f"{ACTOR}.grad_clip": "optim.max_grad_norm",
            f"{ACTOR}.ppo_epochs": "algorithm.num_iterations",
            f"{ROLLOUT}.n": "rollout.num_generations",
            f"{ROLLOUT}.temperature": "rollout.temperature",
            f"{ROLLOUT}.top_p": "rollout.top_p",
            f"{ROLLOUT}.max_model_len": "rollout.max_length",
            f"{ROLLOUT}.dtype": "rollout.dtype",
            f"{ROLLOUT}.free_cache_engine": "rollout.sleep",
            f"{ROLLOUT}.multi_turn.max_assistant_turns": "rollout.max_turns",
            f"{ROLLOUT}.val_kwargs.temperature": "eval.temperature",
            f"{ROLLOUT}.tensor_model_parallel_size": "rollout.options.tensor_parallel_size",
            f"{ROLLOUT}.pipeline_model_parallel_size": "rollout.options.pipeline_parallel_size",
            f"{ROLLOUT}.response_length": "rollout.max_tokens",
            f"{ROLLOUT}.prompt_length": "data.max_prompt_length",
            "async_training.partial_rollout": "rollout.partial_rollout",
            "data.max_prompt_length": "data.max_prompt_length",
            "data.max_response_length": "rollout.max_tokens",
            "data.shuffle": "data.shuffle",
            "trainer.total_epochs": "data.epochs",
            "data.val_max_samples": "eval.prompts",
            "algorithm.filter_groups.enable": "algorithm.dynamic_sampling",
            "algorithm.filter_groups.max_num_gen_batches": "algorithm.max_refills",
            "algorithm.rollout_correction.rollout_is_threshold": "algorithm.rollout_correction_high",
            "trainer.total_training_steps": "steps",
            "trainer.save_freq": "checkpoint.every",
            "trainer.test_freq": "eval.every",
            "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
            "trainer.project_name": "log.project",
            "trainer.experiment_name": "name",
            "trainer.default_local_dir": "output",
        }
    ),
    **same(PARALLEL_SIZES, prefix=f"{MEGATRON}."),
    **entries("rollout.options", VLLM_SETTINGS, prefix=f"{ROLLOUT}."),
    f"{ROLLOUT}.name": Option("rollout.engine", ENGINES),
    f"{ROLLOUT}.expert_parallel_size": Option("rollout.options.enable_expert_parallel", {"1": None}),
    f"{ACTOR}.loss_agg_mode": Option("algorithm.loss_aggregation", AGGREGATIONS),
    f"{ACTOR}.optim.lr_decay_style": Option("optim.schedule", SCHEDULES),
    f"{ACTOR}.optim.lr_scheduler_type": Option("optim.schedule", SCHEDULES),
    f"{ACTOR}.optim.warmup_style": Option("optim.schedule", SCHEDULES),
    f"{ACTOR}.kl_loss_type": Option("algorithm.beta", {"low_var_kl": None, "k3": None}),
    "algorithm.adv_estimator": Option("algorithm.advantage", ESTIMATORS),
    "algorithm.norm_adv_by_std_in_grpo": Option("algorithm.advantage", {"true": "grpo", "false": "dr_grpo"}),
    "algorithm.rollout_correction.rollout_is": Option("algorithm.rollout_correction", {"token": "token_truncate"}),
    "trainer.resume_mode": Option("resume", {"auto": True, "disable": False, "resume_path": None}),
    **{
        name: Option("backend.offload", {"true": True, "false": None})
        for name in (
            f"{MEGATRON}.param_offload",
            f"{MEGATRON}.optimizer_offload",
            f"{MEGATRON}.grad_offload",
            f"{ACTOR}.fsdp_config.param_offload",
            f"{ACTOR}.fsdp_config.optimizer_offload",
        )
    },
    **derived(
        {
            **{
                f"{prefix}router_replay.{name}": ("replay.mode", "off, r2 or r3")
                for prefix in ("", f"{ACTOR}.", f"{MEGATRON}.", f"{ACTOR}.veomni.", f"{ACTOR}.fsdp_config.")
                for name in ("mode", "enabled")
            },
            f"{ROLLOUT}.enable_rollout_routing_replay": ("replay.mode", "r3; needs nothing else here"),
            f"{MODEL}.enable_activation_offload": ("model.gradient_checkpointing", "offload"),
            f"{ACTOR}.policy_loss.loss_mode": ("algorithm.loss", "gspo: algorithm.importance_sampling_level"),
            f"{ROLLOUT}.agent.default_agent_loop": (
                "rollout.environment",
                "tools, or a function: docs/coming-from.md#turns-as-samples",
            ),
            f"{ROLLOUT}.top_k": ("rollout.top_k", "0, not -1, disables it"),
            "data.prompt_key": ("data.columns", "{NAME = prompt}"),
            "async_training.staleness_threshold": ("rollout.max_staleness", "in steps, rounded up"),
            f"{ACTOR}.strategy model_engine {ACTOR}.model_engine": ("backend.kind", "megatron, else fsdp"),
            "data.train_files": ("data.path", "one file"),
            "data.val_files": ("data.eval_path", "one file"),
            "data.train_batch_size": ("rollout.prompts_per_step", "prompts per step"),
            f"{ACTOR}.ppo_mini_batch_size": (
                "algorithm.updates_per_rollout",
                "data.train_batch_size / ppo_mini_batch_size",
            ),
            f"{ACTOR}.ppo_micro_batch_size_per_gpu": ("batch.tokens_per_micro_batch", "sequences times maximum length"),
            f"{ACTOR}.use_dynamic_bsz": ("batch.tokens_per_micro_batch", "always: micro-batches are filled by tokens"),
            f"{ACTOR}.clip_ratio": ("algorithm.clip_low", "also clip_high"),
            f"{ACTOR}.use_kl_loss": ("algorithm.beta", "0 without it"),
            f"{ACTOR}.kl_loss_coef": ("algorithm.beta", "with use_kl_loss"),
            f"{ACTOR}.optim.lr_warmup_steps_ratio": ("optim.warmup_steps", "a fraction of all steps"),
            "reward.custom_reward_function.path reward.custom_reward_function.name custom_reward_function.path "
            "custom_reward_function.name": ("reward.functions", "verl:MODULE:NAME"),
            "trainer.logger": ("log.wandb", "also log.tensorboard"),
            "trainer.n_gpus_per_node": ("", "torchrun --nproc-per-node"),
            "trainer.nnodes": ("", "torchrun --nnodes"),
        }
    ),
    **without(
        {
            "save and load routes with mr.save_trace and mr.load_trace": (
                f"{MEGATRON}.router_replay.record_file {MEGATRON}.router_replay.replay_file"
            ),
            "sequence parallelism is always on with tensor parallelism": f"{MEGATRON}.sequence_parallel",
            "evaluation samples once per prompt, at eval.temperature": (
                f"{ROLLOUT}.val_kwargs.n {ROLLOUT}.val_kwargs.top_p {ROLLOUT}.val_kwargs.top_k "
                f"{ROLLOUT}.val_kwargs.do_sample"
            ),
            "weights are converted by our own maps: docs/megatron.md": (
                f"{MEGATRON}.use_mbridge {MEGATRON}.vanilla_mbridge {MEGATRON}.use_dist_checkpointing "
                f"{MEGATRON}.dist_checkpointing_path {ROLLOUT}.load_format {ROLLOUT}.layered_summon"
            ),
            "longer prompts are dropped": (
                "data.filter_overlong_prompts data.truncation data.filter_overlong_prompts_workers"
            ),
            "prompts are read and tokenized once, at startup": (
                "data.dataloader_num_workers data.seed data.return_raw_chat data.return_full_prompt "
                "data.return_raw_input_ids data.val_batch_size data.gen_batch_size"
            ),
            "log.completions writes them to the run folder": (
                "trainer.rollout_data_dir trainer.validation_data_dir trainer.log_val_generations"
            ),
            "KL is a loss term: use_kl_loss": "algorithm.kl_ctrl.kl_coef algorithm.kl_ctrl.type",
            "there is no critic": "trainer.critic_warmup algorithm.gamma algorithm.lam",
            "the engine's log-probs are always returned and compared": f"{ROLLOUT}.calculate_log_probs",
            "the engine takes and returns token ids": f"{ROLLOUT}.skip_tokenizer_init {ROLLOUT}.disable_log_stats",
            "the engine schedules requests itself": f"{ROLLOUT}.mode {ROLLOUT}.scheduling_policy",
            "scoring uses the micro-batches of training": (
                f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu {ROLLOUT}.log_prob_use_dynamic_bsz "
                f"{ROLLOUT}.log_prob_max_token_len_per_gpu {ROLLOUT}.log_prob_micro_batch_size"
            ),
            "sequences are always balanced over ranks by tokens": "trainer.balance_batch",
            "entropies are always computed": f"{ACTOR}.calculate_entropy",
            "there is one trainer": "trainer.use_legacy_worker_impl",
            "the whole sequence is scored in any case": f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode",
            "evaluation runs after a step, not before training": "trainer.val_before_train trainer.val_only",
            "detected automatically: backend.device": "trainer.device",
            "environments run in threads: rollout.environment_threads": f"{ROLLOUT}.agent.num_workers",
            "kernels are chosen by torch, Transformers or Megatron-Core": (
                f"{MODEL}.use_fused_kernels {MODEL}.use_liger {ACTOR}.use_torch_compile {ACTOR}.use_fused_kernels"
            ),
            "the reference model runs with the policy's settings": "actor_rollout_ref.ref",
            "processes are started by torchrun, without Ray": "ray_kwargs actor_rollout_ref.hybrid_engine",
            "reward.workers": "reward.num_workers",
        }
    ),
    **only(
        "sampling",
        "not supported: the engine would sample from another distribution than the trainer scores",
        f"{ROLLOUT}.do_sample=true {ROLLOUT}.ignore_eos=false",
    ),
    **only("data", "all rows are used", "data.train_max_samples=-1"),
    **only(
        "environment",
        "tools are functions: rollout.environment = tools, rollout.tools = module:name, docs/environments.md",
        (
            f"{ROLLOUT}.multi_turn.enable=false {ROLLOUT}.multi_turn.tool_config_path "
            f"{ROLLOUT}.multi_turn.format=hermes {ROLLOUT}.multi_turn.function_tool_path "
            f"{ROLLOUT}.agent.agent_loop_config_path data.tool_config_path"
        ),
    ),
    **only(
        "reward",
        "call it from a reward function: reward.functions = module:name",
        (
            "reward_model.enable=false reward.reward_model.enable=false reward_model.reward_manager=naive "
            "reward.reward_manager.name=naive"
        ),
    ),
    **only("reward", "the column that names the reward is data_source", "data.reward_fn_key=data_source"),
    **only("loss", "KL is a loss term, not part of the reward", "algorithm.use_kl_in_reward=false"),
    **only("loss", "an entropy bonus needs a custom loss: docs/extending.md", f"{ACTOR}.entropy_coeff=0"),
}

GROUPS: dict[str, Option] = {
    **without(
        {
            "the reference model runs with the policy's settings": "actor_rollout_ref.ref.",
            "processes are started by torchrun, without Ray": "ray_kwargs.",
            "there is no critic": "critic.",
            "run torch.profiler around moe_replay.train": f"global_profiler. {ACTOR}.profiler. {ROLLOUT}.profiler.",
            "an option of the SGLang server": f"{ROLLOUT}.engine_kwargs.sglang.",
            "engines on separate GPUs are servers: rollout.urls": "rollout.",
            "rollout.max_staleness": "async_training. trainer.v1.",
            "samples go to the ranks directly": "transfer_queue.",
            "FSDP2 shards every layer over all ranks": f"{ACTOR}.fsdp_config.",
            "the trainer is FSDP2 or Megatron-Core": f"{ACTOR}.veomni.",
            "checkpoints have all state: docs/checkpoints.md": f"{ACTOR}.checkpoint.",
            "multi-token prediction layers are not trained": f"{MODEL}.mtp.",
            "weights are streamed tensor by tensor": f"{ROLLOUT}.checkpoint_engine.",
        }
    ),
    **only(
        "environment", "environments are functions: docs/environments.md", f"{ROLLOUT}.multi_turn. {ROLLOUT}.agent."
    ),
    **only("optimizer", "AdamW: [optim]", f"{ACTOR}.optim.override_optimizer_config."),
    **only("model", "the model's config.json is used", f"{MODEL}.override_config."),
    **only("loss", "not implemented: write a policy loss, docs/extending.md", f"{ACTOR}.policy_loss."),
    **only("loss", "not implemented", "algorithm."),
    **only("data", "not implemented", "data."),
    **only("reward", "call it from a reward function: reward.functions = module:name", "reward_model."),
    **only("reward", "rewards are functions: reward.functions", "reward."),
}
"""Reasons by prefix, for options that are not in the table."""

DEFAULTS = {
    "data.train_batch_size": "1024",
    "data.max_response_length": "512",
    f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{MODEL}.enable_gradient_checkpointing": "true",
    f"{ROLLOUT}.free_cache_engine": "true",
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{ACTOR}.optim.weight_decay": "0.01",
    f"{ACTOR}.clip_ratio_c": "3.0",
    f"{ROLLOUT}.gpu_memory_utilization": "0.5",
    f"{ROLLOUT}.tensor_model_parallel_size": "2",
    f"{MEGATRON}.use_distributed_optimizer": "true",
    "trainer.save_freq": "-1",
    "trainer.total_epochs": "30",
    "trainer.logger": "[console,wandb]",
}
"""Defaults of verl that differ from ours."""
