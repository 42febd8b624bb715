#!/bin/bash
# GRPO of verl 0.9.1 on FSDP2 with the routes of its vLLM replayed, on one node; further overrides follow the files:
#   examples/verl/run_r3.sh Qwen/Qwen3-30B-A3B train.parquet test.parquet trainer.n_gpus_per_node=8
# verl's own settings come first; the last ones turn R3 on.
set -euo pipefail

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.model.path="$1" \
    data.train_files="$2" \
    data.val_files="$3" \
    data.train_batch_size=128 \
    data.max_prompt_length=1024 \
    data.max_response_length=4096 \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    trainer.logger='[console]' \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.model.external_lib=moe_replay.integrations.verl \
    +actor_rollout_ref.actor.fsdp_config.router_replay.mode=R3 \
    actor_rollout_ref.rollout.enable_rollout_routing_replay=True \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    "${@:4}"
