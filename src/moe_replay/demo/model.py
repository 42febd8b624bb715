"""The model of the embedded default: a Qwen3-MoE small enough for two CPU cores, with a dense first layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_replay.demo.settings import DemoSettings
from moe_replay.demo.tokenizer import END, PAD, TOKENS, VOCABULARY
from moe_replay.errors import MissingExtraError

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

HEAD_SIZE = 32  # the least that vLLM's CPU attention takes
LONGEST = 1024


def build_model(settings: DemoSettings) -> Qwen3MoeForCausalLM:
    """The model with random weights of `settings.seed`, in float32. The caller's random state is left as it was."""
    try:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    except ImportError as missing:
        raise MissingExtraError(
            "the embedded default needs Transformers", remedy="pip install 'moe-replay[train]'"
        ) from missing
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        moe_intermediate_size=settings.hidden_size // 2,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // HEAD_SIZE,
        num_key_value_heads=settings.hidden_size // HEAD_SIZE // 2,
        head_dim=HEAD_SIZE,  # type: ignore[unexpected-keyword]  it is there, by the rules of the config itself
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        mlp_only_layers=[0],  # layers that route are then not numbered from 0: as in most models of this kind
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TOKENS.index(END),
        pad_token_id=TOKENS.index(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return Qwen3MoeForCausalLM(config)
