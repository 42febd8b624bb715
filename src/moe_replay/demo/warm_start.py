"""A short supervised phase, after which the model is sometimes correct, so that RL has a reward to improve."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from moe_replay.demo.model import PAD, TOKENS, DemoSettings
from moe_replay.demo.task import Problem, problems
from moe_replay.utils.misc import StatusCallback

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

IGNORED = -100
EVAL_EVERY = 25
EVAL_PROBLEMS = 256


def warm_start(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: DemoSettings, status: StatusCallback
) -> float:
    """Train on worked answers, then on a mix with estimates; returns the probability of a correct answer."""
    random = Random(settings.seed)
    training = problems(random, settings.terms, held_out=False)
    evaluation = list(islice(problems(Random(settings.seed), settings.terms, held_out=True), EVAL_PROBLEMS))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start, max_steps = time.monotonic(), settings.max_steps + settings.mixed_steps

    def train(step: int, worked: float) -> float:
        batch = islice(training, settings.batch_size)
        answered = [
            (problem.prompt, problem.worked if random.random() < worked else problem.estimate(random))
            for problem in batch
        ]
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, settings)
        return _train_step(model, optimizer, *_batch(tokenizer, answered))

    def evaluate(step: int, loss: float, after: str = "") -> float:
        accuracy, seconds = expected_accuracy(model, tokenizer, evaluation), time.monotonic() - start
        progress = f"step {step} of at most {max_steps}, loss {loss:.3f}"
        status(f"pre-training: {progress}, {accuracy:.0%} correct{after}, {seconds:.0f} s")
        return accuracy

    model.train()
    with one_thread():
        for step in range(1, settings.max_steps + 1):
            loss = train(step, worked=1.0)
            if step % EVAL_EVERY == 0 and evaluate(step, loss) >= settings.enough:
                break
        for _ in range(settings.mixed_steps):
            loss = train(step, worked=settings.worked)
        model.eval()
        return evaluate(step + settings.mixed_steps, loss, after=" after training on estimates")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: for operations this small, synchronization costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def expected_accuracy(
    model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, evaluation: Sequence[Problem]
) -> float:
    """Return the mean probability of a correct answer at temperature 1, worked or not: the expected reward."""
    answers = [(problem.prompt, answer) for problem in evaluation for answer in (problem.solution, problem.worked)]
    token_ids, labels = _batch(tokenizer, answers)
    with torch.no_grad():
        losses = _token_losses(model(input_ids=token_ids).logits, labels)
    return float((-losses.sum(dim=1)).exp().sum()) / len(evaluation)


def _learning_rate(step: int, settings: DemoSettings) -> float:
    return settings.learning_rate * min(step / settings.warmup_steps, 1 - 0.9 * step / settings.max_steps)


def _train_step(
    model: Qwen3MoeForCausalLM, optimizer: torch.optim.Optimizer, token_ids: Tensor, labels: Tensor
) -> float:
    """Take one optimizer step; without the load-balancing loss a few experts would take all tokens."""
    is_token = token_ids.ne(TOKENS.index(PAD)).long()
    output = model(input_ids=token_ids, attention_mask=is_token, output_router_logits=True)
    loss = _token_losses(output.logits, labels).sum() / (labels != IGNORED).sum()
    balance = sum(load_balancing_loss(model.config, scores, is_token) for scores in output.router_logits)
    (loss + model.config.router_aux_loss_coef * balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def load_balancing_loss(config: Qwen3MoeConfig, scores: Tensor, is_token: Tensor) -> Tensor | int:
    """Return Transformers' loss for one layer: over all layers together, an expert may stay idle in one of them."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    return load_balancing_loss_func((scores,), config.num_experts, config.num_experts_per_tok, is_token)


def _token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-prob of each labelled token, 0 elsewhere, (B, W - 1)."""
    return cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")


def _batch(tokenizer: PreTrainedTokenizerFast, answers: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Return token ids (B, W), padded on the right, and labels (B, W): the answers and their end tokens."""
    prompt_lengths = [len(prompt) for prompt, _ in answers]  # one token per character
    texts = [prompt + answer + str(tokenizer.eos_token) for prompt, answer in answers]
    token_ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")["input_ids"]
    position = torch.arange(token_ids.shape[1])
    is_answer = (position >= torch.tensor(prompt_lengths)[:, None]) & (token_ids != tokenizer.pad_token_id)
    return token_ids, token_ids.where(is_answer, IGNORED)
