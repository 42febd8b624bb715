"""`MegatronRecipe`: builds a Megatron-Core model that computes the same function as a Transformers model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch

from moe_replay.megatron import cpu as megatron_cpu
from moe_replay.megatron import without_transformer_engine
from moe_replay.megatron.core_attention import use_plain_attention
from moe_replay.megatron.grouped_experts import check as check_grouped_experts
from moe_replay.megatron.grouped_experts import is_aligned, use_grouped_experts
from moe_replay.megatron.weights.family import Family, rope_parameters
from moe_replay.megatron.weights.tensor_slices import WeightMapError
from moe_replay.replay.adapters.megatron_settings import WRONG_EXPERT_GRADIENTS, has_wrong_expert_gradients
from moe_replay.utils.device import accelerator
from moe_replay.utils.misc import one_line

_REPLAY = "moe_enable_routing_replay"  # Megatron-Core has it from 0.16 on


@dataclass(frozen=True)
class MegatronRecipe:
    """Everything needed to build the model on this rank."""

    family: Family
    config: Any  # Megatron-Core's `TransformerConfig` or `MLATransformerConfig`
    arguments: dict[str, Any]  # of a `GPTModel`, except config, layer spec and pipeline stage
    transformer_engine: bool  # use Transformer Engine's layers

    def layer_spec(self, vp_stage: int | None = None, *, packed: bool = False) -> Any:
        """Return the layer spec of a model chunk; `packed`: with attention for packed sequences."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = get_gpt_decoder_block_spec(self.config, self.transformer_engine, vp_stage=vp_stage)
        spec = self.family.adapt_spec(spec, self.config)
        if not self.transformer_engine and (accelerator() or packed or self._needs_plain_attention):
            use_plain_attention(spec)
        if not self.transformer_engine and self.config.moe_grouped_gemm:
            use_grouped_experts(spec)
        return spec

    @property
    def _needs_plain_attention(self) -> bool:
        """Whether Megatron-Core's `DotProductAttention` does not support this model."""
        sinks = getattr(self.config, "softmax_type", "vanilla") != "vanilla"  # it does not mark them as sharded
        return sinks or self.config.multi_latent_attention or self.config.context_parallel_size > 1

    def build(self, *, packed: bool = False) -> list[Any]:
        """Build the model chunks of this rank, with random weights."""
        chunks = self.config.virtual_pipeline_model_parallel_size
        return [self._chunk(stage, packed) for stage in ([None] if chunks is None else range(chunks))]

    def _chunk(self, vp_stage: int | None, packed: bool) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

        chunk = GPTModel(
            config=self.config,
            transformer_layer_spec=self.layer_spec(vp_stage, packed=packed),
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            vp_stage=vp_stage,
            **self.arguments,
        )
        self.family.after_build(chunk)
        return chunk


def recipe(
    hf_config: Any, family: Family, settings: dict[str, Any], *, transformer_engine: bool = True
) -> MegatronRecipe:
    """Return the recipe for a Transformers config. `settings` of a `TransformerConfig` override those of the family."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    if accelerator() == "cuda":  # elsewhere MindSpeed or megatron.cpu patch it
        without_transformer_engine.enable()
    chosen = {**family.settings(hf_config), **_runtime_settings(settings), **settings}
    is_installed = accelerator() == "cuda" and find_spec("transformer_engine") is not None
    engine = transformer_engine and is_installed and not family.local_layers
    chosen.setdefault("moe_grouped_gemm", _can_group_experts(chosen, engine))
    kind = MLATransformerConfig if chosen.get("multi_latent_attention") else TransformerConfig
    chosen |= _enum_settings(kind, chosen)
    field_names = {field.name for field in fields(kind)}
    if _REPLAY not in field_names:
        del chosen[_REPLAY]
    # Megatron-Core reads these from its config, which has no such fields
    yarn = {name: chosen.pop(name) for name in [*chosen] if name.startswith("yarn_") and name not in field_names}
    try:
        config = kind(**chosen)
    except (ValueError, TypeError, AssertionError, LookupError, AttributeError) as error:
        raise WeightMapError(
            f"Megatron-Core rejected these settings: {one_line(error)}", found=", ".join(map(str, settings))
        ) from error
    vars(config).update(yarn)
    if hf_config.vocab_size % config.tensor_model_parallel_size:
        raise WeightMapError(
            "the vocabulary cannot be sharded evenly, and padding it would change the log-probabilities",
            expected=f"vocab_size divisible by tensor_model_parallel_size {config.tensor_model_parallel_size}",
            found=hf_config.vocab_size,
        )
    tensor_parallel, expert_parallel = config.tensor_model_parallel_size, config.expert_model_parallel_size
    if has_wrong_expert_gradients(tensor_parallel, config.expert_tensor_parallel_size, expert_parallel):
        raise WeightMapError(
            WRONG_EXPERT_GRADIENTS,
            expected=f"expert_tensor_parallel_size {config.tensor_model_parallel_size}, as tensor_model_parallel_size",
            found=f"{config.expert_tensor_parallel_size} with expert_model_parallel_size 1",
            remedy="Set them equal, or use expert parallelism",
        )
    if config.moe_grouped_gemm and not engine:
        check_grouped_experts(config)
    arguments = {
        "vocab_size": hf_config.vocab_size,
        "max_sequence_length": hf_config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rope_parameters(hf_config)["rope_theta"],
        "rotary_percent": rope_parameters(hf_config).get("partial_rotary_factor", 1.0),
        "share_embeddings_and_output_weights": hf_config.tie_word_embeddings,
        **family.arguments(hf_config),
    }
    return MegatronRecipe(family, config, arguments, engine)


def _can_group_experts(settings: dict[str, Any], engine: bool) -> bool:
    """Default of moe_grouped_gemm: on for GPUs in bfloat16 where a grouped kernel is available."""
    if settings["params_dtype"] != torch.bfloat16 or accelerator() != "cuda":
        return False
    shards = settings.get("expert_tensor_parallel_size") or settings.get("tensor_model_parallel_size", 1)
    sizes = settings["hidden_size"], settings["moe_ffn_hidden_size"]
    return engine or (hasattr(torch.nn.functional, "grouped_mm") and is_aligned(*sizes, torch.bfloat16, shards))


def _enum_settings(kind: type, settings: dict[str, Any]) -> dict[str, Enum]:
    """Convert settings that Megatron-Core declares as enums from their names, e.g. attention_backend = "flash"."""
    enums = {field.name: type(field.default) for field in fields(kind) if isinstance(field.default, Enum)}
    named = {name: value for name, value in settings.items() if name in enums and isinstance(value, str)}
    for name, value in named.items():
        if value not in enums[name].__members__:
            raise WeightMapError(
                f"invalid value of the Megatron-Core setting {name}",
                expected=", ".join(enums[name].__members__),
                found=repr(value),
            )
    return {name: enums[name][value] for name, value in named.items()}


def _runtime_settings(settings: dict[str, Any]) -> dict[str, Any]:
    half = torch.bfloat16 if settings.get("bf16") else torch.float16 if settings.get("fp16") else torch.float32
    dtype = settings.get("params_dtype", half)
    cpu = {} if accelerator() else megatron_cpu.SETTINGS
    return {
        **cpu,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "sequence_parallel": settings.get("tensor_model_parallel_size", 1) > 1,
    }
