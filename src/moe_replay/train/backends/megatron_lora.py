"""LoRA adapters of a Megatron-Core policy: added as configured, disabled for the reference, read by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from moe_replay.distributed.ranks import raise_on_all_ranks
from moe_replay.megatron import lora
from moe_replay.megatron.weights.checkpoint import Checkpoint
from moe_replay.megatron.weights.family import Family
from moe_replay.megatron.weights.local_shards import ParameterSpec
from moe_replay.megatron.weights.lora_export import adapter_tensors
from moe_replay.megatron.weights.lora_plan import LoraPlan
from moe_replay.rollout.adapter import Adapter
from moe_replay.train.config.train_config import TrainConfig


@dataclass(frozen=True)
class MegatronLora:
    """The adapters of this rank, by the parameter that they belong to."""

    plan: LoraPlan
    adapters: dict[ParameterSpec, lora.LoraAdapter]

    @classmethod
    def of(cls, config: TrainConfig, chunks: Sequence[nn.Module], folder: str, family: Family) -> MegatronLora:
        """Freeze the chunks of this rank and add adapters. All ranks call it."""
        model = config.model
        plan = LoraPlan.of(model.lora_rank, model.lora_alpha, model.lora_targets, Checkpoint(folder), family)
        with raise_on_all_ranks("adding LoRA adapters"):
            return cls(plan, lora.add_adapters(chunks, plan, config.seed))

    def off(self) -> AbstractContextManager[None]:
        """Disable the adapters inside a context."""
        return lora.adapters_off(self.adapters)

    def adapter(self, chunks: Sequence[nn.Module]) -> Adapter:
        """Return the adapters of all ranks; reading the tensors is a collective operation."""
        return Adapter(adapter_tensors(chunks, self.plan, self.adapters), self.plan.rank, self.plan.alpha)
