"""One token for each character of arithmetic: a tokenizer made in code, so that nothing has to be downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_replay.demo.arithmetic import CHARACTERS
from moe_replay.errors import MissingExtraError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END, UNKNOWN, USER, ASSISTANT = "<pad>", "<end>", "<unknown>", "<user>", "<assistant>"
TOKENS = (PAD, END, UNKNOWN, USER, ASSISTANT, *CHARACTERS)
VOCABULARY = 32  # a round number above len(TOKENS), which every tensor-parallel size up to 32 divides
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ ('<assistant>' if message['role'] == 'assistant' else '<user>') + message['content'] + '<end>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; `save_pretrained` writes it beside a model, where AutoTokenizer finds it."""
    tokenizer = character_tokenizer(TOKENS, pad=PAD, end=END, unknown=UNKNOWN, special=(USER, ASSISTANT))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def character_tokenizer(
    tokens: Sequence[str], *, pad: str, end: str, unknown: str, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token for each character, and special tokens; the id of a token is its index."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as missing:
        raise MissingExtraError(
            "the embedded default needs Transformers", remedy="pip install 'moe-replay[train]'"
        ) from missing
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
