"""Routing replay in verl, without a fork of it: `actor_rollout_ref.model.external_lib=moe_replay.integrations.verl`.

verl imports this module in every process of a run. Engines are replaced in verl's registry as soon as verl itself
imports them; a version that was not tested is refused here. docs/coming-from.md has settings and metrics.
"""

from moe_replay.integrations.hosts import VERL, after_import

VERL.check_version()
after_import("verl.workers.engine.fsdp.transformer_impl", "moe_replay.integrations.verl_fsdp:install")
after_import("verl.workers.engine.megatron.transformer_impl", "moe_replay.integrations.verl_megatron:install")
for _engine in ("fsdp.fsdp_turbo_impl", "torchtitan.transformer_impl", "automodel.transformer_impl"):
    after_import(f"verl.workers.engine.{_engine}", "moe_replay.integrations.verl_batch:refuse_replay")
