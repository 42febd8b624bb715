"""The demo model: a Qwen3-MoE small enough for two CPU cores, and a tokenizer with one token per character.

Both are built in code, so that nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_replay.demo.task import CHARACTERS
from moe_replay.errors import needs_extra

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

HEAD_SIZE = 32  # minimum of vLLM's CPU attention
MAX_LENGTH = 1024
PAD, END, UNKNOWN, USER, ASSISTANT = "<pad>", "<end>", "<unknown>", "<user>", "<assistant>"
TOKENS = (PAD, END, UNKNOWN, USER, ASSISTANT, *CHARACTERS)
VOCABULARY = 32  # above len(TOKENS), and divisible by every tensor-parallel size up to 32
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('<assistant>' if message['role'] == 'assistant' else '<user>') + message['content'] + '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Sizes of the task, the model and its warm start; a hash of them names the cache folder."""

    seed: int = 0  # of data, weights and batches
    terms: tuple[int, int] = (3, 4)  # minimum and maximum number of digits per problem
    train_rows: int = 2048  # training prompts
    eval_rows: int = 128  # evaluation prompts; seen neither in training nor in the warm start
    hidden_size: int = 64  # 64 is the minimum of vLLM's CPU kernels
    layers: int = 4  # decoder layers; the first is dense
    num_experts: int = 16  # in each other layer, `top_k` per token
    top_k: int = 4
    batch_size: int = 128  # problems per warm-start step
    learning_rate: float = 3e-3  # of the warm start, after `warmup_steps`; decays linearly to a tenth at `max_steps`
    warmup_steps: int = 50
    max_steps: int = 500  # maximum number of steps on worked answers
    enough: float = 0.8  # probability of a correct answer at which these steps end
    mixed_steps: int = 40  # steps that follow, with a fraction `worked` of worked answers, the rest estimates
    worked: float = 0.3


FULL = DemoSettings()
QUICK = DemoSettings(
    terms=(2, 2),
    train_rows=32,
    eval_rows=8,
    layers=3,
    num_experts=8,
    batch_size=32,
    warmup_steps=10,
    max_steps=40,
    mixed_steps=10,
)
"""Built in seconds, for tests: complete, but the model knows little."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = character_tokenizer(TOKENS, pad=PAD, end=END, unknown=UNKNOWN, special=(USER, ASSISTANT))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def character_tokenizer(
    tokens: Sequence[str], *, pad: str, end: str, unknown: str, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and special tokens; a token's id is its index."""
    with needs_extra("the embedded default needs Transformers", "train"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=unknown))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=pad,
        eos_token=end,
        unk_token=unknown,
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    )


def model_config(settings: DemoSettings) -> Qwen3MoeConfig:
    """Return the config of the model; imports no modeling code."""
    with needs_extra("the embedded default needs Transformers", "train"):
        from transformers import Qwen3MoeConfig
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.hidden_size,
        intermediate_size=2 * settings.hidden_size,
        moe_intermediate_size=settings.hidden_size // 2,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.hidden_size // HEAD_SIZE,
        num_key_value_heads=settings.hidden_size // HEAD_SIZE // 2,
        head_dim=HEAD_SIZE,  # type: ignore[unexpected-keyword]
        num_experts=settings.num_experts,
        num_experts_per_tok=settings.top_k,
        mlp_only_layers=[0],  # so that MoE layers do not start at index 0, as in most models of this kind
        norm_topk_prob=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TOKENS.index(END),
        pad_token_id=TOKENS.index(PAD),
    )


def build_model(settings: DemoSettings) -> Qwen3MoeForCausalLM:
    """Return the model in float32 with random weights of `settings.seed`; keeps the caller's random state."""
    config = model_config(settings)
    from transformers import Qwen3MoeForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        return Qwen3MoeForCausalLM(config)
