"""A tiny mixture of experts under TRL's GRPOTrainer, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_replay.integrations.trl import RouterReplayMixin
from tests.models import tiny_qwen3_moe

CHARACTERS = "0123456789+=- "
LAYERS = (1, 2, 3)  # the first one is dense


def tokenizer() -> Any:
    """One token a character; 0 is padding, 1 the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<pad>", "<end>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<end>")


def model(**overrides: Any) -> nn.Module:
    """Weights wide enough for routes and next tokens to depend on the context."""
    tiny = tiny_qwen3_moe(vocab_size=2 + len(CHARACTERS), eos_token_id=1, pad_token_id=0, **overrides)
    with torch.no_grad():
        for parameter in tiny.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return tiny


def prompts() -> Any:
    """Of different lengths, so that they are padded."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["1+1=", "20+3=", "7-5=", "100-40="] * 4})


def reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Something that differs between completions of one prompt."""
    return [sum(map(ord, completion)) % 7 + len(completion) / 10 for completion in completions]


def settings(folder: Path | str, **overrides: Any) -> Any:
    from trl import GRPOConfig

    chosen = {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
    }
    return GRPOConfig(**chosen | overrides)


def trainer_class(plain: bool = False) -> type:
    from trl import GRPOTrainer

    if plain:
        return GRPOTrainer

    class Trainer(RouterReplayMixin, GRPOTrainer):
        pass

    return Trainer


ARGUMENTS = (
    "engine",
    "rollout_func",
    "peft_config",
    "callbacks",
    "reward_funcs",
    "train_dataset",
    "processing_class",
    "tools",
    "environment_factory",
)


def make(folder: Path | str, replay: str | None = "r3", policy: Any = None, **options: Any) -> Any:
    """A trainer; `replay=None` is TRL's own. Options that are not the trainer's are TRL's settings."""
    ours = {"reward_funcs": reward, "train_dataset": prompts(), "processing_class": tokenizer()}
    ours |= {name: options.pop(name) for name in ARGUMENTS if name in options}
    if replay is not None:
        ours["replay"] = replay
    return trainer_class(plain=replay is None)(
        model=policy or model(),
        args=settings(folder, **options),
        eval_dataset=options.pop("evaluate", None),
        **ours,
    )


def trained(trainer: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """What a run logged at each step, and its weights."""
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logged, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


TIMES = ("step_time", "preparation_time", "profiling", "runtime", "per_second")


def numbers_of_trl(logged: list[dict[str, float]]) -> list[dict[str, float]]:
    """What TRL logs by itself, but for durations."""
    ours = ("routing/", "mismatch/")
    return [
        {k: v for k, v in entry.items() if not k.startswith(ours) and not any(time in k for time in TIMES)}
        for entry in logged
    ]
