"""Options of OpenRLHF's `train_ppo_ray`: dotted names (2026) and the older plain ones."""

from __future__ import annotations

from moe_replay.train.config.foreign.options import Option, derived, same, without

OPTIONS: dict[str, Option] = {
    **same(
        {
            "actor.model_name_or_path pretrain": "model.path",
            "ds.param_dtype": "model.dtype",
            "ds.attn_implementation attn_implementation": "model.attn_implementation",
            "actor.gradient_checkpointing_enable gradient_checkpointing": "model.gradient_checkpointing",
            "ds.lora.rank": "model.lora_rank",
            "ds.lora.alpha": "model.lora_alpha",
            "ds.lora.target_modules": "model.lora_target_modules",
            "data.prompt_dataset prompt_data": "data.path",
            "eval.dataset eval_dataset": "data.eval_path",
            "prompt_max_len": "data.max_prompt_length",
            "data.max_len max_len": "rollout.max_length",
            "rollout.batch_size rollout_batch_size": "rollout.prompts_per_step",
            "rollout.n_samples_per_prompt n_samples_per_prompt": "rollout.num_generations",
            "rollout.max_new_tokens generate_max_len": "rollout.max_tokens",
            "vllm.enable_sleep vllm_enable_sleep": "rollout.sleep",
            "vllm.tensor_parallel_size vllm_tensor_parallel_size": "rollout.options.tensor_parallel_size",
            "vllm.gpu_memory_utilization vllm_gpu_memory_utilization": "rollout.options.gpu_memory_utilization",
            "actor.eps_clip eps_clip": "algorithm.clip_low",
            "algo.kl.init_coef init_kl_coef": "algorithm.beta",
            "algo.dynamic_filtering_enable dynamic_filtering": "algorithm.dynamic_sampling",
            "algo.advantage.is_correction_threshold vllm_is_truncated_threshold": "algorithm.rollout_correction_high",
            "actor.adam.lr actor_learning_rate": "optim.lr",
            "actor.adam.betas adam_betas": "optim.betas",
            "actor.adam.eps": "optim.eps",
            "actor.adam.weight_decay": "optim.weight_decay",
            "actor.lr_scheduler lr_scheduler": "optim.schedule",
            "actor.max_norm max_norm": "optim.max_grad_norm",
            "ds.packing_samples packing_samples": "batch.packed",
            "train.max_tokens_per_gpu train_max_tokens_per_gpu": "batch.tokens_per_micro_batch",
            "ckpt.save_steps": "checkpoint.every",
            "ckpt.max_num max_ckpt_num": "checkpoint.keep",
            "ckpt.save_hf save_hf_ckpt": "checkpoint.export",
            "ckpt.output_dir save_path": "output",
            "eval.steps": "eval.every",
            "eval.temperature eval_temperature": "eval.temperature",
            "logger.wandb.project": "log.project",
            "logger.wandb.run_name wandb_run_name": "name",
            "train.seed": "seed",
        }
    ),
    **derived(
        {
            "actor.eps_clip_low_high eps_clip_low_high": ("algorithm.clip_low", "also algorithm.clip_high"),
            "actor.policy_loss_type policy_loss_type": ("algorithm.importance_sampling_level", "gspo: sequence"),
            "algo.advantage.estimator": ("algorithm.advantage", "group_norm: grpo, dr_grpo, rloo"),
            "train.batch_size train_batch_size": (
                "algorithm.updates_per_rollout",
                "sequences per rollout / train batch size",
            ),
            "train.async_enable async_train": ("rollout.max_staleness", "1 or more"),
            "algo.advantage.is_correction_enable enable_vllm_is_correction": (
                "algorithm.rollout_correction",
                "token_truncate, token_mask, ...",
            ),
            "train.agent_func_path agent_func_path": ("rollout.environment", "module:name"),
            "use_wandb": ("log.wandb", "true"),
            "reward.remote_url remote_rm_url": ("reward.functions", "module:name of a function that queries it"),
        }
    ),
    **without(
        {
            "processes are started by torchrun, without Ray": (
                "actor.num_nodes actor.num_gpus_per_node actor_num_nodes actor_num_gpus_per_node train.colocate_all "
                "colocate_all_models"
            ),
            "there is no critic": "critic_pretrain critic_learning_rate critic.model_name_or_path",
            "the trainer is FSDP2 or Megatron-Core": "ds.zero_stage zero_stage ds.adam_offload adam_offload",
        }
    ),
}
