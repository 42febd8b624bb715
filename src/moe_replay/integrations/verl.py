"""Routing replay in verl, without a fork of it: `actor_rollout_ref.model.external_lib=moe_replay.integrations.verl`.

verl imports this module in every process of a run. Engines are replaced in verl's registry as soon as verl itself
imports them; a version that was not tested is refused here. docs/coming-from.md has settings and metrics.
"""

from __future__ import annotations

from types import ModuleType

from moe_replay.integrations.hosts import VERL, after_import


def _replace_fsdp(module: ModuleType) -> None:
    from moe_replay.integrations.verl_fsdp import install

    install(module)


def _guard_megatron(module: ModuleType) -> None:
    from moe_replay.integrations.verl_megatron import install

    if hasattr(module.RouterReplay, "get_replay_topk"):  # from 0.9.0 on
        install(module)


def _refuse_replay(module: ModuleType) -> None:
    from moe_replay.integrations.verl_batch import refuse_replay

    refuse_replay(module)


VERL.check_version()
after_import("verl.workers.engine.fsdp.transformer_impl", _replace_fsdp)
after_import("verl.workers.engine.megatron.transformer_impl", _guard_megatron)
for _engine in ("fsdp.fsdp_turbo_impl", "torchtitan.transformer_impl", "automodel.transformer_impl"):
    after_import(f"verl.workers.engine.{_engine}", _refuse_replay)
