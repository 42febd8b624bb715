"""Steps of TRL's GRPOTrainer on sequences that are given, so that its trainer is timed without a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from parts.training import now

from moe_replay.records import Trajectory


def trl_steps(
    folder: Path, device: torch.device, trajectories: Sequence[Trajectory], budget: int, steps: int
) -> list[float]:
    """Return the seconds of each step: one update on all sequences, in micro-batches of at most `budget` tokens."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    length, on_gpu = len(trajectories[0]), device.type == "cuda"
    rows = max(budget // length, 1)

    class Timer(TrainerCallback):
        """Notes how long each step takes."""

        began = 0.0
        taken: list[float] = []  # noqa: RUF012

        def on_step_begin(self, *args: Any, **settings: Any) -> None:
            self.began = now(device)

        def on_step_end(self, *args: Any, **settings: Any) -> None:
            self.taken.append(now(device) - self.began)

    def given(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        half = length // 2
        return {
            "prompt_ids": [one.token_ids[:half].tolist() for one in trajectories],
            "completion_ids": [one.token_ids[half:].tolist() for one in trajectories],
            "logprobs": [one.logprobs[half:].tolist() for one in trajectories],
        }

    vocabulary = 1 + max(int(one.token_ids.max()) for one in trajectories)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(max(vocabulary, 3))}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w0", unk_token="w2")
    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=len(trajectories) // rows,
        num_generations=2,
        max_completion_length=length,
        max_steps=steps,
        beta=0.0,
        learning_rate=1e-7,
        bf16=on_gpu,
        use_cpu=not on_gpu,
        gradient_checkpointing=True,
        model_init_kwargs={"dtype": "bfloat16" if on_gpu else "float32"},
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    timer = Timer()
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=_first_of_two,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["w3"] * len(trajectories)}),
        processing_class=tokenizer,
        rollout_func=given,
        callbacks=[timer],
    )
    trainer.train()
    return timer.taken


def _first_of_two(completions: list[Any], **_: Any) -> list[float]:
    """Rewards with a signal in each group of two."""
    return [float(number % 2) for number in range(len(completions))]
