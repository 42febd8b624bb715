"""Options of SkyRL 0.4's `main_base`, by dotted name."""

from __future__ import annotations

from moe_replay.train.config.foreign.options import Option, derived, entries, only, same, without

POLICY = "trainer.policy"
MEGATRON = f"{POLICY}.megatron_config"
ENGINE = "generator.inference_engine"
ALGORITHM = "trainer.algorithm"
CAPTURE = f"{ENGINE}.enable_return_routed_experts"
REPLAY = f"{MEGATRON}.moe_enable_routing_replay"
"""R3 needs both."""
LOSSES = {"regular": None, "dual_clip": None, "gspo": None, "sapo": "sapo", "cispo": "cispo"}
AGGREGATIONS = {"token_mean": "token_mean", "sequence_mean": "seq_mean_token_mean"}
ENGINE_OPTIONS = """
    tensor_parallel_size pipeline_parallel_size data_parallel_size gpu_memory_utilization enforce_eager max_num_seqs
    max_num_batched_tokens enable_prefix_caching enable_chunked_prefill
"""

OPTIONS: dict[str, Option] = {
    **same(
        {
            f"{POLICY}.model.path": "model.path",
            f"{POLICY}.model.lora.rank": "model.lora_rank",
            f"{POLICY}.model.lora.alpha": "model.lora_alpha",
            f"{POLICY}.model.lora.target_modules": "model.lora_target_modules",
            f"{POLICY}.optimizer_config.lr": "optim.lr",
            f"{POLICY}.optimizer_config.adam_betas": "optim.betas",
            f"{POLICY}.optimizer_config.weight_decay": "optim.weight_decay",
            f"{POLICY}.optimizer_config.max_grad_norm": "optim.max_grad_norm",
            f"{MEGATRON}.tensor_model_parallel_size": "backend.tensor_parallel",
            f"{MEGATRON}.pipeline_model_parallel_size": "backend.pipeline_parallel",
            f"{MEGATRON}.context_parallel_size": "backend.context_parallel",
            f"{MEGATRON}.expert_model_parallel_size": "backend.expert_parallel",
            f"{MEGATRON}.expert_tensor_parallel_size": "backend.expert_tensor_parallel",
            f"{ALGORITHM}.eps_clip_low": "algorithm.clip_low",
            f"{ALGORITHM}.eps_clip_high": "algorithm.clip_high",
            f"{ALGORITHM}.sapo.tau_pos": "algorithm.tau_pos",
            f"{ALGORITHM}.sapo.tau_neg": "algorithm.tau_neg",
            "generator.n_samples_per_prompt": "rollout.num_generations",
            "generator.sampling_params.max_generate_length": "rollout.max_tokens",
            "generator.sampling_params.temperature": "rollout.temperature",
            "generator.sampling_params.top_p": "rollout.top_p",
            "generator.max_turns": "rollout.max_turns",
            "generator.apply_overlong_filtering": "algorithm.overlong_filter",
            "trainer.max_training_steps": "steps",
            "trainer.max_ckpts_to_keep": "checkpoint.keep",
            "trainer.max_prompt_length": "data.max_prompt_length",
            "trainer.train_batch_size": "rollout.prompts_per_step",
            "trainer.epochs": "data.epochs",
            "trainer.remove_microbatch_padding": "batch.packed",
            "trainer.gradient_checkpointing": "model.gradient_checkpointing",
            "trainer.update_epochs_per_batch": "algorithm.num_iterations",
            "trainer.ckpt_interval": "checkpoint.every",
            "trainer.eval.interval": "eval.every",
            "trainer.project_name": "log.project",
            "trainer.run_name": "name",
            "trainer.ckpt_path": "output",
            "trainer.seed": "seed",
        }
    ),
    **entries("rollout.options", ENGINE_OPTIONS, prefix=f"{ENGINE}."),
    f"{ENGINE}.backend": Option("rollout.engine", {"vllm": "vllm", "sglang": "sglang_server"}),
    f"{ALGORITHM}.advantage_estimator": Option("algorithm.advantage", {"grpo": None, "rloo": "rloo"}),
    f"{ALGORITHM}.grpo_norm_by_std": Option("algorithm.advantage", {"true": "grpo", "false": "dr_grpo"}),
    f"{ALGORITHM}.loss_reduction": Option("algorithm.loss_aggregation", AGGREGATIONS),
    f"{ALGORITHM}.kl_estimator_type": Option("algorithm.beta", {"k3": None}),
    "trainer.strategy": Option("backend.kind", {"megatron": "megatron", "fsdp": "fsdp", "fsdp2": "fsdp"}),
    "trainer.placement.colocate_all": Option("rollout.sleep", {"true": True, "false": False}),
    **derived(
        {
            CAPTURE: ("replay.mode", "r3, with moe_enable_routing_replay"),
            REPLAY: ("replay.mode", "r3, with enable_return_routed_experts"),
            "data.train_data": ("data.path", "one file"),
            "data.val_data": ("data.eval_path", "one file"),
            "trainer.policy_mini_batch_size": (
                "algorithm.updates_per_rollout",
                "trainer.train_batch_size / policy_mini_batch_size",
            ),
            "trainer.micro_train_batch_size_per_gpu": (
                "batch.tokens_per_micro_batch",
                "sequences times maximum length",
            ),
            f"{ALGORITHM}.policy_loss_type": ("algorithm.loss", "gspo: algorithm.importance_sampling_level"),
            f"{ALGORITHM}.clip_ratio_c": ("algorithm.delta", "with dual_clip"),
            f"{ALGORITHM}.use_kl_loss": ("algorithm.beta", "0 without it"),
            f"{ALGORITHM}.kl_loss_coef": ("algorithm.beta", "with use_kl_loss"),
            f"{ALGORITHM}.cispo.cispo_eps_clip_low": ("algorithm.clip_low", "with cispo"),
            f"{ALGORITHM}.cispo.cispo_eps_clip_high": ("algorithm.clip_high", "with cispo"),
            "generator.sampling_params.top_k": ("rollout.top_k", "0, not -1, disables it"),
            "trainer.logger": ("log.wandb", "also log.tensorboard"),
            "trainer.placement.policy_num_gpus_per_node": ("", "torchrun --nproc-per-node"),
            "trainer.placement.policy_num_nodes": ("", "torchrun --nnodes"),
        }
    ),
    **without(
        {
            "scoring uses the micro-batches of training": "trainer.micro_forward_batch_size_per_gpu",
            "kernels are chosen by torch, Transformers or Megatron-Core": "trainer.flash_attn",
            "evaluation runs after a step, at eval.temperature": "trainer.eval.batch_size trainer.eval.before_train",
            "weights go by weight_sync.transport": f"{ENGINE}.weight_sync_backend",
            "the engine schedules requests itself": (
                f"generator.batched {ENGINE}.async_engine {ENGINE}.run_engines_locally "
                f"{ENGINE}.distributed_executor_backend"
            ),
            "set resume, true by default": "trainer.resume_mode",
            "turns that only append are one sequence in any case": "generator.merge_stepwise_output",
            "set rollout.engines_per_node, the engines of each machine": f"{ENGINE}.num_engines",
            "exports are in the run folder": "trainer.export_path trainer.hf_save_interval trainer.log_path",
        }
    ),
    **only(
        "environment",
        "an environment that calls episode.rewrite has samples step by step: docs/environments.md",
        "generator.step_wise_trajectories=false",
    ),
    **only(
        "reward",
        "an environment of SkyRL scores its answers: name a function in reward.functions",
        "environment.env_class",
    ),
    **only("loss", "KL is a loss term, not part of the reward", f"{ALGORITHM}.use_kl_in_reward=false"),
    **only("loss", "an entropy bonus needs a custom loss: docs/extending.md", f"{ALGORITHM}.use_entropy_loss=false"),
}

GROUPS: dict[str, Option] = {
    **without(
        {
            "the reference model runs with the policy's settings": "trainer.ref. trainer.placement.",
            "there is no critic": "trainer.critic.",
        }
    ),
    **only("environment", "environments are functions: rollout.environment, docs/environments.md", "environment."),
    **only("loss", "not implemented", f"{ALGORITHM}."),
    **only("data", "not implemented", "data."),
}
"""Reasons by prefix, for options that are not in the table."""

DEFAULTS = {
    "generator.n_samples_per_prompt": "5",
    "generator.sampling_params.max_generate_length": "1024",
    "trainer.train_batch_size": "1024",
    "trainer.policy_mini_batch_size": "256",
    f"{ALGORITHM}.use_kl_loss": "true",
    f"{POLICY}.optimizer_config.weight_decay": "0.01",
    "trainer.placement.colocate_all": "true",
    "trainer.gradient_checkpointing": "true",
    "trainer.ckpt_interval": "10",
    "trainer.epochs": "1",
    "trainer.seed": "42",
}
"""Defaults of SkyRL that differ from ours."""
