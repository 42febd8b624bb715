"""A task that any model with random weights can be trained on: prompts of random words, a reward for even ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from parts.random_weights import write_random_model

from moe_replay.utils.misc import text_of

REWARD = "parts.word_task:even_words"


def even_words(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Return the share of words with an even number."""
    words = [[int(number) for number in re.findall(r"w(\d+)", text_of(completion))] for completion in completions]
    return [sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1) for numbers in words]


def write_task(folder: Path, model: dict[str, Any], device: str, *, prompts: int = 128, words: int = 40) -> int:
    """Write `model` (random weights and a tokenizer of one word a token) and `train.jsonl`; return its parameters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig

    settings = {name: value for name, value in model.items() if name not in ("architectures", "model_type")}
    dtype = settings.pop("torch_dtype")
    config = Qwen3MoeConfig(**settings | {"bos_token_id": None, "pad_token_id": 0, "dtype": dtype})
    parameters = write_random_model(folder / "model", config, torch.device(device))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}  # no words: they are split off first
    names = [*special.values(), *(f"w{i}" for i in range(len(special), config.vocab_size))]
    vocabulary = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, clean_up_tokenization_spaces=False, **special)
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{draw.randrange(3, config.vocab_size)}" for _ in range(words))} for _ in range(prompts)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return parameters
